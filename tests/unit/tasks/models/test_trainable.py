"""Adapters and their frozen reference, for a fresh start and for an adapter that goes on (A05)."""

import pytest
import torch
from peft import PeftModel

from configs.schema.training import FullWeights, Lora
from tasks.artifacts import hash_tensors
from tasks.models.errors import WeightsMismatchError
from tasks.models.policy import PolicyModule
from tasks.models.trainable import (
    attach,
    freeze_reference,
    load_trainable,
    reference_weights,
    trainable_tensors,
)

LORA = Lora(r=4, alpha=8, targets=("q_proj", "v_proj", "down_proj"), dropout=0.5)
IDS = torch.arange(3, 3 + 24).reshape(2, 12)
STARTS = ["fresh", "continued"]


def fill(model: torch.nn.Module, seed: int, scale: float = 0.3) -> None:
    """Train the adapter, as it were: B ≠ 0."""
    generator = torch.Generator().manual_seed(seed)
    load_trainable(
        model,
        {
            name: torch.randn(tensor.shape, generator=generator) * scale
            for name, tensor in trainable_tensors(model).items()
        },
    )


@pytest.fixture
def policy_of(tiny_model):
    """A policy module over a fresh adapter, or over one that was trained before."""

    def build(start: str) -> PolicyModule:
        model = attach(tiny_model(), LORA, seed=0)
        if start == "continued":
            fill(model, seed=3)
        freeze_reference(model)
        return PolicyModule(model, value_head=False, seed=0)

    return build


def logprobs(policy: PolicyModule) -> torch.Tensor:
    everywhere = torch.ones_like(IDS, dtype=torch.bool)
    everywhere[:, 0] = False
    valid = torch.ones_like(everywhere)
    return policy(IDS, valid, everywhere, torch.ones(2)).logprobs_B_T


def reference(policy: PolicyModule) -> torch.Tensor:
    with policy.as_reference():
        return logprobs(policy)


@pytest.mark.parametrize("start", STARTS)
def test_a05_kl_at_step_0_is_0(policy_of, start, tiny_model):
    policy = policy_of(start).eval()
    now = logprobs(policy).detach()
    assert (now - reference(policy)).abs().max() <= 1e-6
    base = logprobs(PolicyModule(tiny_model(), value_head=False, seed=0)).detach()
    moved = (now - base).abs().max()  # a continued adapter is far from the base, a fresh one is it
    assert moved > 0.1 if start == "continued" else moved <= 1e-6


@pytest.mark.parametrize("start", STARTS)
def test_a05_the_reference_stays_while_the_policy_moves(policy_of, start):
    policy = policy_of(start).eval()
    before = reference(policy)
    trained = [p for p in policy.parameters() if p.requires_grad]
    optimiser = torch.optim.AdamW(trained, lr=0.05)
    for _ in range(3):
        optimiser.zero_grad()
        logprobs(policy).sum().backward()
        optimiser.step()
    assert torch.equal(reference(policy), before)
    assert (logprobs(policy) - before).abs().max() > 0.05


@pytest.mark.parametrize("start", STARTS)
def test_a05_no_dropout_in_the_reference_and_training_mode_comes_back(policy_of, start):
    policy = policy_of(start).train()
    with policy.as_reference():
        passes = [logprobs(policy) for _ in range(3)]
        assert all(torch.equal(p, passes[0]) for p in passes)
        assert not any(m.training for m in policy.model.modules())
        assert not passes[0].requires_grad
    assert all(m.training for m in policy.model.modules())
    if start == "continued":  # dropout is really there: training passes differ
        assert not torch.equal(logprobs(policy), logprobs(policy))


@pytest.mark.parametrize("start", STARTS)
@pytest.mark.parametrize("mode", [True, False])
def test_a05_an_exception_leaves_adapters_on_and_trainable(policy_of, start, mode):
    policy = policy_of(start)
    fill(policy.model, seed=9)
    policy.train(mode)
    trained = {n for n, p in policy.named_parameters() if p.requires_grad}
    policy.eval()
    before = logprobs(policy).detach()
    policy.train(mode)
    with pytest.raises(ZeroDivisionError), policy.as_reference():
        raise ZeroDivisionError
    assert {n for n, p in policy.named_parameters() if p.requires_grad} == trained
    assert all(".default." in name for name in trained) and trained
    assert policy.model.training == mode
    policy.eval()
    assert torch.equal(logprobs(policy), before)
    assert (reference(policy) - before).abs().max() > 0.05


@pytest.mark.parametrize("start", STARTS)
def test_the_reference_is_neither_published_nor_trained(policy_of, start):
    policy = policy_of(start)
    tensors = trainable_tensors(policy.model)
    assert len(tensors) == 2 * len(LORA.targets)  # A and B of one layer's three projections
    assert not any("reference" in name or "default" in name for name in tensors)
    has_copy = "reference" in policy.model.peft_config
    assert has_copy == (start == "continued")
    freeze_reference(policy.model)  # twice is once
    assert ("reference" in policy.model.peft_config) == has_copy


def test_freezing_twice_keeps_the_first_reference(policy_of):
    policy = policy_of("continued").eval()
    first = reference(policy)
    fill(policy.model, seed=8)
    freeze_reference(policy.model)
    assert torch.equal(reference(policy), first)


def test_full_weights_have_no_reference_inside(tiny_model):
    model = attach(tiny_model(), FullWeights(), seed=0)
    assert all(p.requires_grad for p in model.parameters())
    with pytest.raises(WeightsMismatchError, match="frozen copy"), reference_weights(model):
        pass


def test_adapters_start_as_the_identity_and_alike_for_one_seed(tiny_model):
    state = torch.random.get_rng_state()
    models = [attach(tiny_model(), LORA, seed=s) for s in (0, 0, 1)]
    assert torch.equal(torch.random.get_rng_state(), state)
    hashes = [hash_tensors(trainable_tensors(m)) for m in models]
    assert hashes[0] == hashes[1] != hashes[2]
    assert all(isinstance(m, PeftModel) for m in models)
    for name, tensor in trainable_tensors(models[0]).items():
        assert tensor.any() == ("lora_A" in name)


def test_targets_that_match_nothing_are_named(tiny_model):
    with pytest.raises(WeightsMismatchError, match=r"\['c_attn'\].*down_proj.*q_proj"):
        attach(tiny_model(), Lora(targets=("q_proj", "c_attn")), seed=0)


@pytest.mark.parametrize(
    "target", ["self_attn", "model", "layers", "0", "norm", "act_fn", "embed_tokens", ""]
)
def test_targets_that_are_no_linear_layer_are_named(tiny_model, target):
    with pytest.raises(WeightsMismatchError, match=rf"\['{target}'\] match no linear .*q_proj"):
        attach(tiny_model(), Lora(targets=("q_proj", target)), seed=0)


@pytest.mark.parametrize("kind", [LORA, FullWeights()])
def test_published_weights_load_into_another_model(tiny_model, kind):
    source, target = attach(tiny_model(1), kind, 0), attach(tiny_model(2), kind, 5)
    fill(source, seed=4)
    tensors = trainable_tensors(source)
    load_trainable(target, tensors)
    assert hash_tensors(trainable_tensors(target)) == hash_tensors(tensors)


def test_weights_of_another_shape_or_name_are_refused_untouched(tiny_model):
    model = attach(tiny_model(), LORA, 0)
    before = hash_tensors(trainable_tensors(model))
    other = trainable_tensors(attach(tiny_model(), LORA.model_copy(update={"r": 2}), 0))
    with pytest.raises(WeightsMismatchError, match="another rank"):
        load_trainable(model, other)
    fewer = dict(list(trainable_tensors(model).items())[1:])
    with pytest.raises(WeightsMismatchError, match="differ in names"):
        load_trainable(model, fewer)
    assert hash_tensors(trainable_tensors(model)) == before
