"""Candidate against champion: what is scored, how it is paired, and what is refused."""

import json

import pytest

from tasks.artifacts import ArtifactRecord, hash_file, write_json, write_jsonl
from tasks.artifacts.progress import Reporter, read_metrics
from tasks.evaluation.challenge import ChallengeError, compare, run, served_model
from tasks.evaluation.types import AnswerRecord
from tasks.rewards.verdict import Outcome
from tests.small_releases import small_rows, write_bundle


def answer(row_id, correct, band="easy", outcome=None):
    """One graded answer."""
    outcome = outcome or (Outcome.CORRECT if correct else Outcome.WRONG)
    return AnswerRecord(
        row_id, 0, band, 0, outcome, "1", "1", "1", "", 3, 1, False, 0, 0, ()
    )  # fmt: skip


@pytest.fixture
def inputs(tmp_path):
    """Records of data, and of two packaged policies."""
    write_jsonl(tmp_path / "data" / "heldout.jsonl", small_rows(10))
    records = {"data": ArtifactRecord(kind="dataset", uri=str(tmp_path / "data"), sha256="d" * 64)}
    for side in ("", "champion_"):
        folder = tmp_path / f"{side}package"
        prompt = {"system_prompt": f"You are the {side or 'candidate'}."}
        serving = {"tools": ["calc"], "max_new_tokens": 5 if side else 7, "max_turns": 2}
        sha256 = write_bundle(
            folder / "bundle", tmp_path / "keys", side or "new", prompt=prompt, serving=serving
        )
        records[f"{side}package"] = ArtifactRecord(kind="bundle", uri=str(folder), sha256=sha256)
        write_json(tmp_path / f"{side}rl" / "policy" / "tokenizer_config.json", {})
        records[f"{side}rl"] = ArtifactRecord(
            kind="model", uri=str(tmp_path / f"{side}rl"), sha256="a" * 64
        )
    return records


def test_each_side_answers_as_its_own_bundle_serves_it(inputs, tmp_path):
    asked = []

    def answers(model, rows, progress):
        asked.append((model, [row.id for row in rows]))
        progress(len(rows), len(rows))
        better = "new" in model.gguf.read_text()
        return [answer(row.id, better or index < 2) for index, row in enumerate(rows)]

    out = tmp_path / "out"
    record = run(inputs, out, Reporter(out), problems=8, resamples=500, answer=answers)
    (candidate, rows), (champion, same_rows) = asked
    assert rows == same_rows == [f"h{i}" for i in range(8)]
    assert candidate.system_prompt == "You are the candidate."
    assert champion.system_prompt == "You are the champion_."
    assert (candidate.sampling.max_new_tokens, champion.sampling.max_new_tokens) == (7, 5)
    assert candidate.sampling.temperature == 0.0
    assert candidate.sampling.max_turns == 2
    assert candidate.tools == ("calc",)
    assert candidate.tokenizer == inputs["rl"].path / "policy"
    assert champion.tokenizer == inputs["champion_rl"].path / "policy"

    result = json.loads((out / "challenge.json").read_bytes())
    assert record.sha256 == hash_file(out / "challenge.json")
    assert result["problems"] == 8
    assert result["candidate"]["accuracy"] == 1.0
    assert result["champion"]["accuracy"] == 0.25
    assert result["delta"]["value"] == 0.75
    assert result["candidate"]["bundle_sha256"] == inputs["package"].sha256
    assert result["champion"]["quantisation"] == "Q8_0"
    assert result["heldout_sha256"] == hash_file(inputs["data"].path / "heldout.jsonl")
    lines = (out / "champion.jsonl").read_bytes().splitlines()
    assert [json.loads(line)["outcome"] for line in lines] == ["correct"] * 2 + ["wrong"] * 6
    values = {k: v for m in read_metrics(out / "metrics.jsonl") for k, v in m["values"].items()}
    assert values["challenge/delta"] == 0.75
    assert json.loads((out / "progress.json").read_bytes())["message"] == "done"


def test_equal_answers_differ_by_exactly_nothing():
    same = [answer(f"h{i}", i % 3 == 0) for i in range(30)]
    delta = compare(same, same, resamples=200)["delta"]
    assert delta == {"value": 0.0, "ci95": [0.0, 0.0]}


def test_unscored_and_no_answer_count_as_wrong_on_both_sides():
    mixed = [
        answer("h0", False, outcome=Outcome.UNSCORED),
        answer("h1", False, outcome=Outcome.NO_ANSWER),
        answer("h2", True),
        answer("h3", True, band="hard"),
    ]
    right = [answer(f"h{i}", True) for i in range(4)]
    result = compare(mixed, right, resamples=200)
    assert result["candidate"]["accuracy"] == 0.5
    assert result["delta"]["value"] == -0.5
    assert [(b["band"], b["accuracy"]) for b in result["candidate"]["by_band"]] == [
        ("easy", pytest.approx(1 / 3)),
        ("hard", 1.0),
    ]


def test_other_problems_or_another_order_cannot_be_compared():
    one, other = [answer("h0", True), answer("h1", True)], [answer("h1", True), answer("h0", True)]
    for second in (other, one[:1], []):
        with pytest.raises(ChallengeError, match="the same problems"):
            compare(one, second, resamples=200)


@pytest.mark.parametrize("what", ["manifest.json", "models/Q8_0.gguf"])
@pytest.mark.parametrize("how", ["changed", "gone"])
def test_a_file_that_is_not_what_was_packaged_is_not_scored(inputs, what, how):
    package = inputs["champion_package"]
    path = package.path / "bundle" / what
    if how == "gone":
        path.unlink()
    else:
        path.write_bytes(path.read_bytes().replace(b"champion_", b"champion!"))
    with pytest.raises(ChallengeError, match=r"cannot be scored|is not the file that was packaged"):
        served_model(package, inputs["champion_rl"].path / "policy")


def test_a_manifest_that_says_too_little_and_a_tokenizer_that_is_gone(inputs, tmp_path):
    sha256 = write_bundle(tmp_path / "odd" / "bundle", tmp_path / "keys", "odd", serving={})
    odd = ArtifactRecord(kind="bundle", uri=str(tmp_path / "odd"), sha256=sha256)
    with pytest.raises(ChallengeError, match="KeyError"):
        served_model(odd, inputs["rl"].path / "policy")
    with pytest.raises(ChallengeError, match="holds no tokenizer"):
        served_model(inputs["package"], tmp_path / "nowhere")
