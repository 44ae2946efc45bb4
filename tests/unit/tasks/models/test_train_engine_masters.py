"""With bfloat16 weights the optimiser works on float32 masters: they are state like any other."""

import pytest
import torch

from configs.schema.training import DeepSpeedSettings, Optimiser
from tasks.models.train_engine import TrainEngine

STEPS = 6


class Line(torch.nn.Module):
    """y = Wx, whose squared error to fixed targets is the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(6, 3)
        with torch.no_grad():
            self.layer.weight.copy_(torch.arange(18).reshape(3, 6) / 10)
            self.layer.bias.zero_()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.layer(x.to(self.layer.weight.dtype)).float()
        return (y - torch.tensor([1.0, -2.0, 3.0])).pow(2).mean()


def engine(dtype: str) -> TrainEngine:
    return TrainEngine(
        Line(),
        Optimiser(lr=3e-3, warmup_steps=0, grad_clip=1.0),
        DeepSpeedSettings(dtype=dtype),
        total_steps=STEPS,
    )


def train(trained: TrainEngine, first: int, last: int) -> None:
    for step in range(first, last):
        trained.backward(trained.forward(torch.linspace(-1, 1 + step, 24).reshape(4, 6)))
        trained.step()


def weights(trained: TrainEngine) -> dict[str, torch.Tensor]:
    return {k: v.detach().clone() for k, v in trained.module.state_dict().items()}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_resumed_run_goes_on_bit_for_bit(dtype):
    whole = engine(dtype)
    train(whole, 0, 3)
    kept, state = weights(whole), whole.state_tensors()
    train(whole, 3, STEPS)

    resumed = engine(dtype)
    resumed.module.load_state_dict(kept)
    resumed.load_state_tensors(state, 3)
    train(resumed, 3, STEPS)

    for name, tensor in weights(whole).items():
        assert torch.equal(tensor, weights(resumed)[name]), name
        assert not torch.equal(tensor, kept[name]), name
    for name, tensor in whole.state_tensors().items():
        assert torch.equal(tensor, resumed.state_tensors()[name]), name


def test_masters_are_float32_and_kept_only_where_they_differ_from_the_weights():
    low, full = engine("bfloat16"), engine("float32")
    train(low, 0, 2)
    train(full, 0, 2)
    masters = {k: v for k, v in low.state_tensors().items() if k.endswith(".master")}
    assert {k: (v.dtype, tuple(v.shape)) for k, v in masters.items()} == {
        "0.master": (torch.float32, (3, 6)),
        "1.master": (torch.float32, (3,)),
    }
    assert torch.equal(masters["0.master"].bfloat16(), low.module.layer.weight)
    assert not torch.equal(masters["0.master"], low.module.layer.weight.float())
    assert not [k for k in full.state_tensors() if k.endswith(".master")]


def test_small_steps_add_up_in_bfloat16():
    # One step moves a weight near 1.7 by 3e-5; bfloat16 is 0.0078 apart there.
    trained = TrainEngine(
        Line(),
        Optimiser(lr=3e-5, warmup_steps=0),
        DeepSpeedSettings(dtype="bfloat16"),
        total_steps=400,
    )
    start = trained.module.layer.weight[2, 5].item()
    for _ in range(400):
        trained.backward(trained.forward(torch.ones(1, 6)))
        trained.step()
    assert trained.module.layer.weight[2, 5].item() == pytest.approx(start - 400 * 3e-5, abs=5e-3)
