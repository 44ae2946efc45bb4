"""Token scores of the policy: by length and not by id (A08), and equal to plain full logits."""

import pytest
import torch

from configs.schema.training import Lora
from tasks.models.batching import micro_batches, pad_rows, valid_by_length
from tasks.models.errors import BatchLayoutError
from tasks.models.logprobs import tempered_logprobs
from tasks.models.policy import PolicyModule
from tasks.models.trainable import attach

ROWS = [[5, 6, 0, 7, 8, 0], [9, 0, 4], [0], [11, 12, 13, 14]]
"""Token 0 is padding and a genuine token alike."""


def whole(row: list[int]) -> list[bool]:
    return [False] + [True] * (len(row) - 1)


def scores(policy: PolicyModule, rows, masks, temperature=1.0):
    return policy(
        pad_rows(rows, torch.long),
        valid_by_length([len(r) for r in rows]),
        pad_rows(masks, torch.bool),
        torch.full((len(rows),), temperature),
    )


@pytest.fixture
def policy(tiny_model) -> PolicyModule:
    return PolicyModule(tiny_model(), value_head=False, seed=0).eval()


def test_a08_validity_comes_from_lengths():
    # Ids [5, 6, 0, 7, 8, 0, 0, 0], true length 6: 0 is padding, EOS mid-text and EOS at the end.
    padded = pad_rows([[5, 6, 0, 7, 8, 0], [0] * 8], torch.long)
    assert padded[0].tolist() == [5, 6, 0, 7, 8, 0, 0, 0]
    assert valid_by_length([6, 8])[0].tolist() == [True] * 6 + [False] * 2


def test_a08_eos_that_looks_like_padding_is_scored_and_learnt(policy):
    policy.requires_grad_(True)
    result = scores(policy, [ROWS[0], [1] * 8], [whole(ROWS[0]), [False] * 8])
    logprobs = result.logprobs_B_T
    assert (logprobs[0] != 0).tolist() == [False, True, True, True, True, True, False, False]
    assert not logprobs[1].any()
    logprobs[0, 5].backward()  # the final EOS alone
    assert policy.causal_model.lm_head.weight.grad.abs().sum() > 0


def test_a08_padding_changes_no_score(policy):
    together = scores(policy, ROWS, [whole(r) for r in ROWS], 0.7)
    for i, row in enumerate(ROWS):
        alone = scores(policy, [row], [whole(row)], 0.7)
        torch.testing.assert_close(
            together.logprobs_B_T[i, : len(row)], alone.logprobs_B_T[0], rtol=0, atol=1e-5
        )
        assert not together.logprobs_B_T[i, len(row) :].any()


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.3])
def test_a06_scores_equal_full_tempered_logits(policy, temperature):
    row = ROWS[0]
    with torch.no_grad():
        logits = policy.causal_model(input_ids=torch.tensor([row])).logits
    expected = tempered_logprobs(logits, torch.tensor([row]), torch.tensor([temperature]))
    got = scores(policy, [row], [whole(row)], temperature)
    torch.testing.assert_close(got.logprobs_B_T, expected, rtol=0, atol=1e-5)
    p = torch.log_softmax(logits[0, :-1] / temperature, -1)
    entropy = -(p.exp() * p).sum(-1)
    torch.testing.assert_close(got.entropy_B_T[0, 1:], entropy, rtol=0, atol=1e-4)


def test_only_asked_tokens_are_scored(policy):
    some = [[False, False, True, False, True, False], [False, True, False], [False], [False] * 4]
    full = scores(policy, ROWS, [whole(r) for r in ROWS]).logprobs_B_T
    part = scores(policy, ROWS, some).logprobs_B_T
    mask = pad_rows(some, torch.bool)
    torch.testing.assert_close(part, full * mask, rtol=0, atol=1e-5)
    assert (part != 0).equal(mask)


def test_a_batch_without_one_asked_token_gives_zero_and_no_gradient(policy):
    policy.requires_grad_(True)
    logprobs = scores(policy, ROWS, [[False] * len(r) for r in ROWS]).logprobs_B_T
    assert logprobs.shape == (4, 6) and not logprobs.any()
    logprobs.sum().backward()
    assert not any(p.grad is not None and p.grad.any() for p in policy.parameters())


def test_gradient_equals_that_of_full_logits(tiny_model):
    lora = Lora(r=4, targets=("q_proj", "v_proj"))
    grads = []
    for way in ("policy", "plain"):
        model = attach(tiny_model(), lora, seed=0).eval()
        row = torch.tensor([ROWS[0]])
        if way == "policy":
            module = PolicyModule(model, value_head=False, seed=0)
            total = scores(module, [ROWS[0]], [whole(ROWS[0])]).logprobs_B_T.sum()
        else:
            logits = model(input_ids=row).logits
            total = tempered_logprobs(logits, row, torch.ones(1)).sum()
        total.backward()
        grads.append([p.grad for n, p in model.named_parameters() if "lora_B" in n])
    for ours, plain in zip(*grads, strict=True):
        assert plain.abs().max() > 1e-4
        torch.testing.assert_close(ours, plain, rtol=1e-4, atol=1e-5)


def test_value_head_reads_the_trunk_everywhere_and_is_the_same_for_one_seed(tiny_model):
    heads = [PolicyModule(tiny_model(), value_head=True, seed=s) for s in (1, 1, 2)]
    values = [scores(h, ROWS, [whole(r) for r in ROWS]).values_B_T.detach() for h in heads]
    assert values[0].shape == (4, 6)
    assert torch.equal(values[0], values[1]) and not torch.equal(values[0], values[2])
    alone = scores(heads[0], [ROWS[1]], [whole(ROWS[1])]).values_B_T
    torch.testing.assert_close(values[0][1, :3], alone[0], rtol=0, atol=1e-5)
    without = PolicyModule(tiny_model(), value_head=False, seed=1)
    assert scores(without, ROWS, [whole(r) for r in ROWS]).values_B_T is None


def test_micro_batches_by_hand():
    # Longest first; 2 × 5 = 10 fit, a third would need 15.
    assert micro_batches([3, 5, 1, 5], 10) == [[1, 3], [0, 2]]
    assert micro_batches([3, 5, 1, 5], 1) == [[1], [3], [0], [2]]  # too long alone: still a batch
    assert micro_batches([], 10) == []
    assert micro_batches([2, 2, 2], 100) == [[0, 1, 2]]


@pytest.mark.parametrize("budget", [1, 7, 16, 64, 1000])
def test_micro_batches_hold_every_row_once_within_the_budget(budget):
    lengths = [1 + (7 * i) % 23 for i in range(40)]
    batches = micro_batches(lengths, budget)
    assert sorted(i for b in batches for i in b) == list(range(40))
    for batch in batches:
        longest = max(lengths[i] for i in batch)
        assert len(batch) == 1 or len(batch) * longest <= budget


def test_padding_an_empty_list_is_empty():
    assert pad_rows([], torch.float32).shape == (0, 0)
    assert pad_rows([[], [1.5]], torch.float32).tolist() == [[0.0], [1.5]]


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("saving", [{"recompute": True}, {"logits_chunk": 3}, {"logits_chunk": 1}])
def test_saving_memory_changes_neither_scores_nor_gradients(tiny_model, packed, saving):
    def run(**settings):
        model = attach(tiny_model(), Lora(r=4, targets=("q_proj", "down_proj")), seed=0)
        module = PolicyModule(model, value_head=False, seed=0, packed=packed, **settings).train()
        result = scores(module, ROWS, [whole(r) for r in ROWS], 0.8)
        (result.logprobs_B_T * torch.arange(6)).sum().backward()
        grads = [p.grad.flatten() for p in module.parameters() if p.requires_grad]
        return result, torch.cat(grads)

    (plain, plain_grad), (saved, saved_grad) = run(), run(**saving)
    torch.testing.assert_close(saved.logprobs_B_T, plain.logprobs_B_T, rtol=0, atol=1e-6)
    torch.testing.assert_close(saved.entropy_B_T, plain.entropy_B_T, rtol=0, atol=1e-5)
    assert plain_grad.norm() > 1e-3
    assert (saved_grad - plain_grad).norm() <= 1e-5 * plain_grad.norm()


def test_recomputing_keeps_less_for_the_backward_pass(tiny_model):
    def kept(**settings) -> int:
        module = PolicyModule(tiny_model(), value_head=False, seed=0, packed=True, **settings)
        elements = []
        pack = lambda t: elements.append(t.numel()) or t  # noqa: E731
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            scores(module.train().requires_grad_(True), ROWS, [whole(r) for r in ROWS])
        return sum(elements)

    assert kept(recompute=True) < 0.8 * kept()
    assert kept(logits_chunk=2) < kept()


def test_no_entropy_without_a_gradient(policy):
    with torch.no_grad():
        assert scores(policy, ROWS, [whole(r) for r in ROWS]).entropy_B_T is None


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(
    ("valid", "mask", "said"),
    [
        ([0, 1, 1, 1], [0, 0, 1, 1], "a real token behind padding"),  # padded on the left
        ([1, 0, 1, 0], [0, 0, 1, 0], "a real token behind padding"),
        ([1, 1, 0, 0], [0, 1, 1, 0], "padding to be scored"),
        ([1, 1, 1, 0], [1, 1, 0, 0], "its first token, which nothing predicts"),
    ],
)
def test_a_grid_that_would_mean_something_else_is_refused(tiny_model, packed, valid, mask, said):
    module = PolicyModule(tiny_model(), value_head=False, seed=0, packed=packed)
    rows = [torch.tensor([[1, 1, 1, 1], row], dtype=torch.bool) for row in (valid, mask)]
    rows[1][0, 0] = False
    ids, temperature = torch.arange(3, 11).reshape(2, 4), torch.ones(2)
    with pytest.raises(BatchLayoutError, match=f"row 1 of 2 has {said}"):
        module(ids, *rows, temperature)
    fine = torch.tensor([[True] * 4, [True, True, False, False]])
    assert module(ids, fine, fine & (torch.arange(4) > 0), temperature).logprobs_B_T.any()
