"""Side by side: partings, flips and curves worked out by hand, and a real pair of files."""

import json

import numpy as np
import pytest
from tiny_models import kl

from quantize import side_by_side
from quantize.errors import ParityError
from quantize.quantise import quantise
from quantize.rollouts import RolloutTokens
from quantize.side_by_side import (
    Parting,
    Played,
    Reading,
    chosen_problems,
    first_divergence,
    kl_by_position,
    measure,
    still_the_same,
)
from tasks.sampling.llama_cpp_engine import LlamaCppEngine
from tasks.sampling.types import GenerateRequest, SamplingParams

PROMPT, NEW = 5, 6


@pytest.mark.parametrize(
    ("ours", "theirs", "expected"),
    [
        ((), (), None),
        ((4, 5), (4, 5), None),
        ((4, 5, 6), (4, 7, 6), Parting(1, 5, 7)),
        ((4,), (4, 9), Parting(1, None, 9)),
        ((4, 9), (4,), Parting(1, 9, None)),
        ((), (3,), Parting(0, None, 3)),
    ],
)
def test_the_first_token_at_which_answers_part(ours, theirs, expected):
    assert first_divergence(ours, theirs) == expected


def test_the_spread_comes_first_and_is_even_then_flips_of_every_file():
    base = np.array([1, 1, 1, 1, 0, 0, 0, 0, 1], float)
    worse, better = base.copy(), base.copy()
    worse[[0, 2, 3]] = 0  # place 0 is in the spread already
    better[[5, 7]] = 1
    answers = {"Q": worse, "F16": base, "R": better}
    assert chosen_problems(answers, "F16", 3) == [0, 4, 8, 2, 3, 5, 7]
    assert chosen_problems({"F16": base}, "F16", 99) == list(range(9))
    assert chosen_problems({"F16": base[:1]}, "F16", 64) == [0]
    both = {"F16": np.array([1.0, 1, 0, 1]), "Q": np.array([1.0, 1, 1, 0])}
    assert chosen_problems(both, "F16", 1) == [0, 3, 2]  # what was lost before what was gained


def test_no_more_flips_are_picked_than_are_shown():
    base, worse = np.ones(50), np.zeros(50)
    places = chosen_problems({"F16": base, "Q": worse}, "F16", 2)
    assert places == [0, 49, 1, 2, 3, 4, 5]  # of the first six flips, 0 is there already


def test_kl_at_a_position_is_the_mean_of_the_answers_that_reach_it():
    true = np.ones(3, bool)
    readings = [Reading(np.array([0.1, 0.3, 0.5]), true), Reading(np.array([0.3]), true[:1])]
    curve = kl_by_position(readings)
    assert [(c["position"], c["answers"]) for c in curve] == [(0, 2), (1, 1), (2, 1)]
    assert [c["kl"] for c in curve] == pytest.approx([0.2, 0.3, 0.5])
    assert curve[0]["low"] == pytest.approx(0.1) and curve[0]["high"] == pytest.approx(0.3)


def test_share_of_answers_still_the_same():
    partings = [None, Parting(0, 1, 2), Parting(2, 1, 2), Parting(2, None, 2)]
    curve = still_the_same(partings, 3)
    assert [(c["tokens"], c["share"]) for c in curve] == [(0, 1), (1, 0.75), (2, 0.75), (3, 0.25)]


def test_a_very_long_answer_makes_no_endless_curve():
    readings = [Reading(np.zeros(5000), np.ones(5000, bool))]
    assert len(kl_by_position(readings)) == side_by_side.MOST_POSITIONS
    assert len(still_the_same([None], 5000)) == side_by_side.MOST_POSITIONS + 1


def play(gguf, places):
    """Greedy answers to prompts that depend on the place only; right where the sum is even."""
    prompts = [tuple(3 + (7 * place + i) % 300 for i in range(PROMPT)) for place in places]
    params = SamplingParams(0.0, NEW)
    with LlamaCppEngine(gguf, n_ctx_per_seq=32, parallel_sequences=8) as engine:
        done = engine.generate(
            [GenerateRequest(str(i), p, params, 0) for i, p in enumerate(prompts)]
        )
    return [
        played(place, p, c.token_ids) for place, p, c in zip(places, prompts, done, strict=True)
    ]


def played(place, prompt, ids):
    right = sum(ids) % 2 == 0
    return Played(
        row_id=f"row-{place}",
        band="easy",
        gold="2",
        correct=right,
        outcome="correct" if right else "wrong",
        extracted=str(sum(ids)),
        messages=({"role": "user", "content": "sum?"}, {"role": "assistant", "content": "…"}),
        tokens=RolloutTokens((*prompt, *ids), (False,) * len(prompt) + (True,) * len(ids)),
    )


def texts(ids):
    return [f"<{i}>" for i in ids]


@pytest.fixture(scope="module")
def q4(gguf, tmp_path_factory):
    return quantise(gguf, tmp_path_factory.mktemp("q") / "Q4_K_M.gguf", "Q4_K_M").path


@pytest.fixture(scope="module")
def found(gguf, q4):
    return measure(gguf, {"Q4_K_M": q4}, play, range(40), texts, counted=30)


def test_figures_are_those_of_the_answers_themselves(found, gguf, q4):
    base, other = play(gguf, range(30)), play(q4, range(30))
    facts = found["files"]["Q4_K_M"]
    assert found["problems"] == 30
    assert found["f16_accuracy"] == np.mean([p.correct for p in base])
    assert facts["accuracy"] == np.mean([p.correct for p in other])
    pairs = list(zip(base, other, strict=True))
    assert facts["lost"] == sum(a.correct and not b.correct for a, b in pairs)
    assert facts["gained"] == sum(b.correct and not a.correct for a, b in pairs)
    assert facts["identical"] == sum(a.sampled == b.sampled for a, b in pairs)
    assert 0 < facts["identical"] < 30, "this pair must both agree and differ to prove anything"
    delta = facts["accuracy_delta"]
    assert delta["value"] == pytest.approx((facts["gained"] - facts["lost"]) / 30)
    assert delta["ci95"][0] <= delta["value"] <= delta["ci95"][1]
    json.dumps(found)  # plain data


def test_kl_is_measured_on_f16s_own_answer(found, gguf, q4):
    first = play(gguf, [0])[0]
    rows = []
    for path in (gguf, q4):
        with LlamaCppEngine(path, n_ctx_per_seq=32, parallel_sequences=1) as engine:
            rows.append(engine.logits([first.tokens.token_ids])[0][PROMPT - 1 : -1])
    expected = [kl(p[None], q[None]) for p, q in zip(*rows, strict=True)]
    readings = side_by_side.read_aloud(gguf, {"Q": q4}, [first], 1)["Q"][0]
    np.testing.assert_allclose(readings.kl, expected, rtol=1e-6)
    assert len(readings.kl) == NEW


def test_examples_show_flips_first_with_where_they_part(found, gguf, q4):
    examples = found["files"]["Q4_K_M"]["examples"]
    kinds = [e["kind"] for e in examples]
    assert kinds == sorted(kinds, key=["lost", "gained", "other words"].index)
    assert {"lost", "gained"} & set(kinds)
    for example in examples:
        place = int(example["row_id"].split("-")[1])
        a, b = play(gguf, [place])[0], play(q4, [place])[0]
        parting = first_divergence(a.sampled, b.sampled)
        assert example["parting"]["position"] == parting.position
        assert example["parting"]["f16"] == f"<{parting.f16_token}>"
        assert example["f16"]["correct"] is a.correct and example["file"]["correct"] is b.correct
        assert [t["text"] for t in example["tokens"]] == texts(a.sampled)
        assert all(t["kl"] >= 0 for t in example["tokens"])


def test_a_file_beside_itself_never_parts(gguf):
    facts = measure(gguf, {"again": gguf}, play, range(5), texts)["files"]["again"]
    assert (facts["identical"], facts["lost"], facts["gained"]) == (5, 0, 0)
    assert facts["first_divergence_median"] is None and facts["examples"] == []
    assert facts["kl"]["value"] == 0
    assert {c["share"] for c in facts["still_the_same"]} == {1.0}


def test_no_problem_or_other_problems_are_refused(gguf):
    with pytest.raises(ParityError, match="no problem"):
        measure(gguf, {"again": gguf}, play, [], texts)
    order = iter([[0, 1], [1, 0]])
    with pytest.raises(ParityError, match="again answered other problems than F16"):
        measure(gguf, {"again": gguf}, lambda path, _: play(path, next(order)), [0, 1], texts)


def test_an_answer_without_a_token_is_refused(gguf):
    silent = [played(0, (5, 6, 7), ())]
    with pytest.raises(ParityError, match="no sampled token"):
        measure(gguf, {"again": gguf}, lambda path, _: silent, [0], texts)
