"""Multiplying by the merged weight: PEFT's own numbers and gradients, and PEFT's own forward where
they would not be."""

import pytest
import torch
from peft import LoraConfig, get_peft_model
from peft.tuners.lora import Linear

from tasks.models.lora_layer import MergedLoraLinear, merged_once, multiply_merged

R, NARROW, WIDE, SCALE = 3, 6, 8, 2.0
MANY, FEW = 8, 3
"""Tokens: merging pays above 6·8/(6+8) = 3.4 of them."""


class OneLayer(torch.nn.Module):
    """What PEFT is given here: a model of one linear layer."""

    def __init__(self, bias: bool) -> None:
        super().__init__()
        self.proj = torch.nn.Linear(NARROW, WIDE, bias=bias)


def model_of(bias: bool = False, dropout: float = 0.0):
    torch.manual_seed(5)
    config = LoraConfig(r=R, lora_alpha=SCALE * R, target_modules=["proj"], lora_dropout=dropout)
    attached = get_peft_model(OneLayer(bias), multiply_merged(config))
    with torch.no_grad():
        attached.base_model.model.proj.lora_B["default"].weight.normal_()
    return attached


def layer_of(model) -> MergedLoraLinear:
    layer = model.base_model.model.proj
    assert type(layer) is MergedLoraLinear
    return layer


def gradients(layer, forward, x):
    x = x.clone().requires_grad_(True)
    y = forward(x)
    (y * torch.linspace(-1, 1, y.numel()).view_as(y)).sum().backward()
    found = [y.detach(), x.grad, *(p.grad.clone() for p in layer.parameters() if p.requires_grad)]
    layer.zero_grad()
    return found


def merges(monkeypatch, layer, x) -> bool:
    """Whether the layer's forward goes its own way and not PEFT's."""
    called = []
    original = Linear.forward
    monkeypatch.setattr(
        Linear, "forward", lambda self, *a, **k: called.append(1) or original(self, *a, **k)
    )
    layer(x)
    return not called


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", [(MANY, NARROW), (2, MANY, NARROW), (1, FEW, NARROW)])
def test_numbers_and_gradients_are_those_of_peft(bias, shape):
    layer = layer_of(model_of(bias))
    x = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    ours = gradients(layer, layer, x)
    theirs = gradients(layer, lambda x: Linear.forward(layer, x), x)
    assert len(ours) == 4 and ours[0].shape == (*shape[:-1], WIDE)
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-6)


def test_the_gradient_is_that_of_finite_differences():
    layer = layer_of(model_of()).requires_grad_(True)
    x = torch.randn(MANY, NARROW)
    small, large = layer.lora_A["default"].weight, layer.lora_B["default"].weight
    weight = torch.randn(MANY, WIDE)
    ((layer(x) * weight).sum()).backward()
    for parameter in (small, large):
        for at in [(0, 0), (1, 2)]:
            kept = parameter.detach()[at].item()
            ends = []
            for step in (0.1, -0.1):
                with torch.no_grad():
                    parameter[at] = kept + step
                    ends.append(float((layer(x).double() * weight).sum()))
            with torch.no_grad():
                parameter[at] = kept
            assert parameter.grad[at].item() == pytest.approx((ends[0] - ends[1]) / 0.2, rel=1e-3)


def test_merging_is_for_many_tokens(monkeypatch):
    layer = layer_of(model_of())
    assert merges(monkeypatch, layer, torch.randn(MANY, NARROW))
    assert not merges(monkeypatch, layer, torch.randn(FEW, NARROW))


def test_where_merging_would_not_be_the_same_peft_runs(monkeypatch):
    x = torch.randn(MANY, NARROW)
    half = layer_of(model_of().to(torch.bfloat16))
    assert not merges(monkeypatch, half, x.to(torch.bfloat16))
    dropping = layer_of(model_of(dropout=0.5))
    assert not merges(monkeypatch, dropping.train(), x)
    assert merges(monkeypatch, dropping.eval(), x)
    model = model_of()
    with model.disable_adapter():
        assert not merges(monkeypatch, layer_of(model), x)
        base = torch.nn.functional.linear(x, layer_of(model).get_base_layer().weight)
        assert torch.equal(layer_of(model)(x), base)
    layer_of(model).lora_A["default"].weight.ds_id = 7  # ZeRO 3 may have split it
    assert not merges(monkeypatch, layer_of(model), x)
    two = model_of()
    two.add_adapter("other", two.peft_config["default"])
    two.base_model.set_adapter(["default", "other"])
    assert not merges(monkeypatch, layer_of(two), x)


def test_kept_weights_serve_until_the_end_and_no_longer(monkeypatch):
    model = model_of(bias=True)
    layer, x = layer_of(model).eval(), torch.randn(FEW, NARROW)
    before = layer(x)
    with merged_once(model):
        assert merges(monkeypatch, layer, x)
        torch.testing.assert_close(layer(x), before, rtol=1e-5, atol=1e-6)
    assert layer.kept is None
    with pytest.raises(KeyError), merged_once(model):
        raise KeyError("in the middle of decoding")
    assert layer.kept is None
    with torch.no_grad():
        layer.lora_B["default"].weight.zero_()
    with merged_once(model):
        torch.testing.assert_close(
            layer(x), torch.nn.Linear.forward(layer.get_base_layer(), x), rtol=1e-6, atol=1e-6
        )
    with model.disable_adapter(), merged_once(model):
        assert layer.kept is None


def test_an_adapter_switched_off_inside_counts_for_nothing():
    model, x = model_of(bias=True), torch.randn(2, NARROW)
    with torch.no_grad(), merged_once(model):
        on = layer_of(model)(x)
        with model.disable_adapter():
            off = layer_of(model)(x)
        assert torch.equal(off, layer_of(model).get_base_layer()(x))
        assert torch.equal(layer_of(model)(x), on) and not torch.allclose(on, off)


def test_an_adapter_has_the_names_peft_gives_it():
    torch.manual_seed(5)
    plain = get_peft_model(OneLayer(False), LoraConfig(r=R, target_modules=["proj"]))
    assert list(model_of().state_dict()) == list(plain.state_dict())
