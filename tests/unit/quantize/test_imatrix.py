"""Which tokens an importance matrix counts, and what it says of the head."""

import numpy as np
import pytest
import torch
from tiny_models import make_model, make_tokenizer, save
from transformers import AutoModelForCausalLM

from quantize.errors import ImatrixError
from quantize.imatrix import collect

ROLLOUTS = [[5, 9, 300, 7], [8, 41], [200, 3, 3, 17, 60, 90]]
FIRST, LAST = "blk.0.attn_q.weight", "blk.1.ffn_down.weight"


def first_inputs(folder, ids) -> np.ndarray:
    """What the first matrix sees: the normed embeddings, written out; float64 (T, hidden)."""
    model = AutoModelForCausalLM.from_pretrained(str(folder), dtype=torch.float32)
    weights = {name: p.detach().double().numpy() for name, p in model.named_parameters()}
    x = weights["model.embed_tokens.weight"][ids]
    scale = np.sqrt((x**2).mean(-1, keepdims=True) + model.config.rms_norm_eps)
    return x / scale * weights["model.layers.0.input_layernorm.weight"]


def test_counted_tokens_alone_enter_the_sums(folders):
    counted = [np.array([1, 0, 1, 0], bool), np.array([0, 0], bool), np.ones(6, bool)]
    matrix = collect(folders["qwen3"], ROLLOUTS, counted=counted)
    expected = sum(
        (first_inputs(folders["qwen3"], ids)[keep] ** 2).sum(0)
        for ids, keep in zip(ROLLOUTS, counted, strict=True)
    )
    np.testing.assert_allclose(matrix.sums[FIRST], expected, rtol=1e-5)
    assert set(matrix.counts.values()) == {8}


def test_tokens_left_out_stay_in_the_context(folders):
    """Their keys and values still reach the tokens after them, so the last block sees them."""
    only_last = [np.array([0, 0, 0, 1], bool)]
    seen = collect(folders["qwen3"], [ROLLOUTS[0]], counted=only_last)
    alone = collect(folders["qwen3"], [[ROLLOUTS[0][-1]]])
    assert not np.allclose(seen.sums[LAST], alone.sums[LAST], rtol=1e-2)
    np.testing.assert_allclose(seen.sums[FIRST], alone.sums[FIRST], rtol=1e-5)


def test_the_last_block_counts_every_token_and_short_rollouts_count_too(folders):
    """llama.cpp sees one token of the last block where logits are asked of one only, and its tool
    skips batches under 16 tokens: both would leave these three short rollouts out."""
    matrix = collect(folders["qwen3"], ROLLOUTS)
    assert matrix.counts[FIRST] == matrix.counts[LAST] == 4 + 2 + 6
    assert len(matrix.sums) == 2 * 7 and min(s.min() for s in matrix.sums.values()) >= 0


@pytest.mark.parametrize("tied", [True, False])
def test_the_head_has_the_name_its_tensor_has_in_the_file(tied, tmp_path):
    folder = save(make_model("qwen3", tie_word_embeddings=tied), make_tokenizer(), tmp_path / "m")
    name = "token_embd.weight" if tied else "output.weight"
    assert name not in collect(folder, ROLLOUTS).sums
    matrix = collect(folder, ROLLOUTS, head=True)
    model = AutoModelForCausalLM.from_pretrained(str(folder), dtype=torch.float32)
    with torch.inference_mode():
        hidden = [
            model.model(input_ids=torch.tensor([ids])).last_hidden_state[0].double().numpy()
            for ids in ROLLOUTS
        ]
    expected = (np.concatenate(hidden) ** 2).sum(0)
    np.testing.assert_allclose(matrix.sums[name], expected, rtol=1e-5)
    assert matrix.counts[name] == 12


@pytest.mark.parametrize(
    ("counted", "said"),
    [
        ([np.ones(4, bool)], "speaks of 1 rollouts"),
        ([np.ones(4, bool), np.ones(3, bool), np.ones(6, bool)], r"\[4, 3, 6\]"),
        ([np.zeros(4, bool), np.zeros(2, bool), np.zeros(6, bool)], "no token counts"),
    ],
)
def test_counts_that_do_not_fit_are_refused(counted, said, folders):
    with pytest.raises(ImatrixError, match=said):
        collect(folders["qwen3"], ROLLOUTS, counted=counted)


def test_a_failure_while_activations_are_gathered_stops_the_run(tmp_path):
    """llama.cpp's own callback would answer False here, and decoding would go on with garbage."""
    model = make_model("qwen3")
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[3, 5] = float("nan")
    folder = save(model, make_tokenizer(), tmp_path / "m")
    with pytest.raises(ImatrixError, match=r"blk\.1\.ffn_down\.weight are not finite"):
        collect(folder, ROLLOUTS)
