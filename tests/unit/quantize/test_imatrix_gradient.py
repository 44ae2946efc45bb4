"""The matrix weighted by gradients: what it predicts comes true, and what cannot count does not."""

import numpy as np
import pytest
import torch
from tiny_models import kl, make_model, save
from transformers import AutoModelForCausalLM

from quantize.errors import ImatrixError
from quantize.imatrix import collect
from quantize.imatrix_gradient import collect_by_gradient
from quantize.rollouts import RolloutTokens

MATRIX, MODULE = "blk.1.ffn_down.weight", "model.layers.1.mlp.down_proj"


def rollout(ids, acted) -> RolloutTokens:
    return RolloutTokens(tuple(ids), tuple(bool(a) for a in acted))


def sampled_rollouts(folder, count=16, prompt=3, length=12) -> list[RolloutTokens]:
    """Drawn from the model itself, token by token: only then is g² the Fisher information."""
    model = AutoModelForCausalLM.from_pretrained(str(folder), dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, 400, (count, prompt), generator=generator)
    with torch.inference_mode():
        while ids.shape[1] < length:
            p = torch.softmax(model(input_ids=ids).logits[:, -1], -1)
            ids = torch.cat([ids, torch.multinomial(p, 1, generator=generator)], 1)
    return [rollout(row, [i >= prompt for i in range(length)]) for row in ids.tolist()]


def test_columns_it_calls_important_cost_more_kl(folders):
    """The same noise in its 16 most and least important columns, and the KL that follows."""
    folder = folders["qwen3"]
    rollouts = sampled_rollouts(folder)
    weights = collect_by_gradient(folder, rollouts).means()[MATRIX]
    order = np.argsort(weights)
    noise = torch.randn(256, 16, generator=torch.Generator().manual_seed(1)) * 0.02
    model = AutoModelForCausalLM.from_pretrained(str(folder), dtype=torch.float32).eval()
    ids, matrix, cost = [r.token_ids for r in rollouts], model.get_submodule(MODULE).weight, {}
    with torch.no_grad():
        before = model(input_ids=torch.tensor(ids)).logits[:, 2:-1].numpy()
        for name, columns in (("least", order[:16]), ("most", order[-16:])):
            chosen = torch.from_numpy(columns.copy())
            matrix[:, chosen] += noise
            cost[name] = kl(before, model(input_ids=torch.tensor(ids)).logits[:, 2:-1].numpy())
            matrix[:, chosen] -= noise
    predicted = weights[order[-16:]].sum() / weights[order[:16]].sum()
    assert predicted > 2
    assert predicted / 2 < cost["most"] / cost["least"] < predicted * 2


def test_what_follows_the_last_sampled_token_counts_for_nothing(folders):
    """Nothing there can change what was sampled, so more of it changes no mean."""
    acted = [0, 0, 1, 1]
    short = collect_by_gradient(folders["llama"], [rollout([5, 9, 300, 7], acted)])
    longer = collect_by_gradient(
        folders["llama"], [rollout([5, 9, 300, 7, 80, 81, 82], [*acted, 0, 0, 0])]
    )
    assert (short.counts[MATRIX], longer.counts[MATRIX]) == (4, 7)
    for name, means in short.means().items():
        np.testing.assert_allclose(longer.means()[name], means, rtol=1e-4, err_msg=name)


def test_of_one_sampled_token_only_its_own_context_matters(folders):
    """A sampled token right after the first: a single position has a gradient, so the mean is the
    square of that position's input, as `collect` sees it."""
    weighted = collect_by_gradient(folders["qwen2"], [rollout([5, 9, 300], [0, 1, 0])])
    alone = collect(folders["qwen2"], [[5]])
    for name, means in alone.means().items():
        np.testing.assert_allclose(
            weighted.means()[name], means, rtol=1e-4, atol=1e-7, err_msg=name
        )


def test_the_head_is_covered_only_when_asked_for(folders):
    rollouts = [rollout([5, 9, 300, 7], [0, 0, 1, 1])]
    assert len(collect_by_gradient(folders["qwen3"], rollouts).sums) == 14
    assert "output.weight" in collect_by_gradient(folders["qwen3"], rollouts, head=True).sums


def test_a_rollout_without_sampled_tokens_is_passed_over(folders):
    spoken, silent = rollout([5, 9, 300, 7], [0, 0, 1, 1]), rollout([4, 4], [1, 0])
    both = collect_by_gradient(folders["qwen3"], [silent, spoken])
    assert both.rollouts == 1
    np.testing.assert_allclose(
        both.means()[MATRIX], collect_by_gradient(folders["qwen3"], [spoken]).means()[MATRIX]
    )


@pytest.mark.parametrize(
    ("rollouts", "said"),
    [
        ([], "no rollouts"),
        ([rollout([], [])], "has no tokens"),
        ([rollout([5, 9], [0, 0])], "no rollout has a sampled token"),
    ],
)
def test_rollouts_that_give_nothing_are_refused(rollouts, said, folders):
    with pytest.raises(ImatrixError, match=said):
        collect_by_gradient(folders["qwen3"], rollouts)


def test_a_model_that_overflows_is_refused(tokenizer, tmp_path):
    model = make_model("qwen3")
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight[0] = float("inf")
    folder = save(model, tokenizer, tmp_path / "m")
    with pytest.raises(ImatrixError, match="are not finite; the model must not ship"):
        collect_by_gradient(folder, [rollout([5, 9, 300], [0, 1, 1])])
