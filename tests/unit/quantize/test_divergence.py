"""Many files against one reference: the right tokens, the right file, ids as they are."""

import numpy as np
import pytest
from tiny_models import kl

from quantize.divergence import against, paired_logits, targets, wanted_rows
from quantize.quantise import quantise
from quantize.rollouts import RolloutTokens
from tasks.sampling.llama_cpp_context import LlamaCppContext

ROLLOUTS = [
    RolloutTokens((5, 9, 300, 7, 41), (False, False, True, False, True)),
    RolloutTokens((8, 41), (False, True)),
    RolloutTokens((60, 61, 62), (True, False, False)),  # its only sampled token has no predecessor
]


@pytest.fixture(scope="module")
def files(gguf, tmp_path_factory):
    root = tmp_path_factory.mktemp("files")
    return {t: quantise(gguf, root / f"{t}.gguf", t).path for t in ("Q8_0", "Q4_K_M")}


def logits(path, ids):
    with LlamaCppContext(path, parallel_sequences=1, n_ctx_per_seq=len(ids)) as context:
        return next(context.logits_of([ids]))


def test_targets_and_rows_belong_together():
    assert targets(ROLLOUTS[0]).tolist() == [300, 41]
    assert wanted_rows(ROLLOUTS)[0].tolist() == [False, True, False, True, False]
    assert targets(ROLLOUTS[2]).size == 0


def test_each_file_is_held_against_the_reference_at_sampled_tokens(gguf, files):
    found = against(gguf, files, ROLLOUTS, 1)
    assert list(found) == ["Q8_0", "Q4_K_M"]
    for name, path in files.items():
        for rollout, sums in zip(ROLLOUTS[:2], found[name], strict=False):
            rows = wanted_rows([rollout])[0]
            p, q = (logits(f, list(rollout.token_ids))[rows] for f in (gguf, path))
            assert sums.tokens == rows.sum()
            assert sums.kl == pytest.approx(kl(p, q) * rows.sum(), rel=1e-6)
        assert found[name][2] == (0, 0.0, 0, 0.0, 0.0)
    assert sum(s.kl for s in found["Q8_0"]) < sum(s.kl for s in found["Q4_K_M"])


def test_a_file_against_itself_is_at_no_distance(gguf):
    same = against(gguf, {"again": gguf}, ROLLOUTS, 1)["again"]
    assert [s.kl for s in same] == [0, 0, 0]
    assert [s.same_top for s in same] == [2, 1, 0]


def test_no_file_is_no_work(gguf):
    assert against(gguf, {}, ROLLOUTS, 1) == {}


def test_stopping_half_way_leaves_nothing_open(gguf, files):
    pairs = paired_logits(gguf, files, ROLLOUTS * 10, 1)
    p_logits, others = next(pairs)
    pairs.close()
    assert p_logits.shape == others["Q8_0"].shape == (2, 448)
    assert np.isfinite(p_logits).all()
