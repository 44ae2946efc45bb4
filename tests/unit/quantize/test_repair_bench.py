"""What tensors cost is measured on the file itself; mixes are those llama.cpp makes."""

import numpy as np
import pytest

from configs.schema.quantize import RepairConfig
from quantize.divergence import against
from quantize.errors import RepairError
from quantize.imatrix import collect, write_imatrix
from quantize.parity import summarise
from quantize.quantise import quantise
from quantize.repair_bench import RepairBench, Subject, mix_name, rollouts_within
from quantize.rollouts import RolloutTokens
from quantize.splice import same_tensors


@pytest.mark.parametrize(
    ("spent", "left", "fitting"),
    [
        (2.0, 100.0, 32),  # 16 groups × 1 s × 9/8 = 18 s
        (2.0, 18.0, 32),
        (2.0, 9.0, 16),
        (200.0, 18.0, 1),
        (2.0, -5.0, 1),
    ],
)
def test_fewer_rollouts_where_time_does_not_suffice(spent, left, fitting):
    assert rollouts_within(32, spent, 16, left) == fitting


def test_names():
    assert mix_name("IQ2_M", {}) == "IQ2_M"
    assert mix_name("IQ2_M", {"a": "Q4_K", "b": "Q8_0"}) == "IQ2_M+2"


@pytest.fixture(scope="module")
def rollouts():
    rng = np.random.default_rng(2)
    return [
        RolloutTokens(tuple(rng.integers(3, 390, 20).tolist()), (False,) * 4 + (True,) * 16)
        for _ in range(4)
    ]


@pytest.fixture(scope="module")
def subject(folders, gguf, rollouts, tmp_path_factory):
    """The Qwen3 model as Q4_K_M, which needs no long search for its grids."""
    folder = tmp_path_factory.mktemp("bench")
    matrix = collect(folders["qwen3"], [r.token_ids for r in rollouts])
    write_imatrix(matrix, folder / "imatrix.gguf", "test")
    quantise(gguf, folder / "Q4_K_M.gguf", "Q4_K_M", folder / "imatrix.gguf")
    return Subject(gguf, folder / "imatrix.gguf", folder / "Q4_K_M.gguf", "Q4_K_M")


@pytest.fixture(scope="module")
def groups(subject, rollouts, tmp_path_factory):
    folder = tmp_path_factory.mktemp("work") / "w"
    with RepairBench(subject, folder) as bench:
        found = bench.groups(rollouts, RepairConfig(), lambda text: None)
    assert not folder.exists()
    return found


def kld(subject, file, rollouts):
    return summarise(against(subject.f16, {"x": file}, rollouts, 1)["x"]).kld.value


def test_every_quantised_tensor_has_its_cost_and_its_rungs(groups, subject, rollouts, tmp_path):
    assert len(groups) == 2 * 7 + 2
    for group in groups:
        sizes = [rung.size_bytes for rung in group.rungs]
        assert sizes == sorted(set(sizes)) and group.rungs[0].left == 1.0
        assert group.rungs[-1].types == ("F16",) and group.rungs[-1].left == 0.0
    # more bits leave less of the error: Q4_K, Q6_K, Q8_0, F16
    (ffn,) = [g for g in groups if g.tensors == ("blk.0.ffn_gate.weight",)]
    assert [r.types[0] for r in ffn.rungs] == ["Q4_K", "Q6_K", "Q8_0", "F16"]
    lefts = [r.left for r in ffn.rungs]
    assert lefts == sorted(lefts, reverse=True) and lefts[1] < 0.2
    # 256 × 512 weights at 4.5, 6.5625, 8.5 and 16 bits
    assert [r.size_bytes for r in ffn.rungs] == [73_728, 107_520, 139_264, 262_144]


def test_the_costs_add_up_to_about_the_whole(groups, subject, rollouts):
    """Near the float model the KL is quadratic and errors are unrelated: that is what is used."""
    whole = kld(subject, subject.file, rollouts)
    assert sum(g.harm for g in groups) == pytest.approx(whole, rel=0.5)


def test_a_mix_is_what_llama_cpp_makes_although_the_recipe_counts(subject, tmp_path):
    """Q4_K_M gives more bits to every so many attn_v: naming one must not shift the others."""
    mix = {"blk.0.attn_v.weight": "Q8_0", "blk.1.ffn_up.weight": "F16"}
    with RepairBench(subject, tmp_path / "w") as bench:
        report = subject.quantise_with(mix, tmp_path / "real.gguf")
        assert same_tensors(report.path, bench.spliced(mix))
        with pytest.raises(RepairError, match=r"attn_q.weight cannot become IQ1_S"):
            bench.spliced({"blk.0.attn_q.weight": "IQ1_S"})
    assert sorted(p.name for p in tmp_path.iterdir()) == ["real.gguf"]
