"""Second moments: written out for the first matrix, shared where inputs are, refused where bad."""

import numpy as np
import pytest
import torch
from test_imatrix import FIRST, ROLLOUTS, first_inputs
from transformers import AutoModelForCausalLM

from quantize.errors import ImatrixError
from quantize.imatrix import collect
from quantize.moments import collect_moments


def test_the_first_matrix_written_out(folders):
    x = np.concatenate([first_inputs(folders["qwen3"], ids) for ids in ROLLOUTS])
    moments = collect_moments(folders["qwen3"], ROLLOUTS)
    np.testing.assert_allclose(moments[FIRST], x.T @ x, rtol=1e-4, atol=1e-4)


def test_the_diagonal_is_the_importance_matrix(folders):
    moments = collect_moments(folders["qwen3"], ROLLOUTS)
    sums = collect(folders["qwen3"], ROLLOUTS).sums
    assert set(moments) == set(sums)
    for name, square in moments.items():
        np.testing.assert_allclose(np.diag(square), sums[name], rtol=1e-4)
        np.testing.assert_allclose(square, square.T, rtol=1e-6, atol=1e-9)


def test_matrices_fed_alike_share_one_array(folders):
    moments = collect_moments(folders["qwen3"], ROLLOUTS)
    assert moments["blk.1.attn_q.weight"] is not moments["blk.0.attn_q.weight"]
    assert np.shares_memory(moments["blk.0.attn_q.weight"], moments["blk.0.attn_v.weight"])
    assert not np.shares_memory(moments["blk.0.attn_q.weight"], moments["blk.0.ffn_up.weight"])


def test_an_error_of_a_row_is_that_of_its_output(folders):
    """δᵀ (Σ x xᵀ) δ = Σ (x·δ)², with one column off by 0.25."""
    model = AutoModelForCausalLM.from_pretrained(str(folders["qwen3"]), dtype=torch.float32)
    delta = np.zeros(model.config.hidden_size)
    delta[3] = 0.25
    moments = collect_moments(folders["qwen3"], ROLLOUTS)[FIRST]
    x = np.concatenate([first_inputs(folders["qwen3"], ids) for ids in ROLLOUTS])
    assert delta @ moments @ delta == pytest.approx(((x[:, 3] * 0.25) ** 2).sum(), rel=1e-4)


@pytest.mark.parametrize(("rollouts", "said"), [([], "no rollouts"), ([[1], []], "rollout 1")])
def test_nothing_to_collect_from(folders, rollouts, said):
    with pytest.raises(ImatrixError, match=said):
        collect_moments(folders["qwen3"], rollouts)
