"""The read-back sees what the kernels read: one wrong bit, a stale row, a module left over."""

from types import SimpleNamespace

import pytest
import torch

from tasks.artifacts import hash_tensors
from tasks.sampling.vllm_worker import PUBLISHED_PREFIX, PolicyMemory, _holds, _multiplied, _split

RANK, ROOM, SLOTS = 2, 8, 3


def layer(*widths: int, inside: int = 4) -> SimpleNamespace:
    """Buffers of a layer with one slice per width, as vLLM lays them out, empty."""
    return SimpleNamespace(
        tp_size=1,
        lora_a_stacked=tuple(torch.zeros(SLOTS, 1, ROOM, inside) for _ in widths),
        lora_b_stacked=tuple(torch.zeros(SLOTS, 1, width, ROOM) for width in widths),
    )


def load(module, slot: int, pairs) -> SimpleNamespace:
    """Put (A, B) of each slice into a slot; gives the weights vLLM registers beside it."""
    for i, (a, b) in enumerate(pairs):
        module.lora_a_stacked[i][slot, 0, :RANK] = a
        module.lora_b_stacked[i][slot, 0, :, :RANK] = b
    one = len(pairs) == 1
    return SimpleNamespace(
        lora_a=pairs[0][0] if one else [a for a, _ in pairs],
        lora_b=pairs[0][1] if one else [b for _, b in pairs],
    )


def pair(width: int, inside: int = 4):
    return torch.randn(RANK, inside), torch.randn(width, RANK)


@pytest.fixture
def worker():
    """A worker with a packed and a plain adapted layer and one without, adapter 7 in slot 1."""
    torch.manual_seed(0)
    qkv, down, untouched = layer(6, 2), layer(4), layer(4)
    pairs = {"q_proj": pair(6), "k_proj": pair(2), "down_proj": pair(4)}
    loras = {
        "qkv": load(qkv, 1, [pairs["q_proj"], pairs["k_proj"]]),
        "down_proj": load(down, 1, [pairs["down_proj"]]),
    }
    manager = SimpleNamespace(
        modules={"qkv": qkv, "down_proj": down, "o_proj": untouched},
        packed_modules={"qkv": ["q_proj", "k_proj"]},
        lora_index_to_id=[3, 7, None],
        get_adapter={7: SimpleNamespace(get_lora=loras.get)}.get,
    )
    memory = PolicyMemory()
    memory.model_runner = SimpleNamespace(lora_manager=SimpleNamespace(_adapter_manager=manager))
    return SimpleNamespace(memory=memory, manager=manager, pairs=pairs)


def test_the_hash_is_that_of_the_published_tensors(worker):
    published = {}
    for name, (a, b) in worker.pairs.items():
        published[f"{PUBLISHED_PREFIX}{name}.lora_A.weight"] = a
        published[f"{PUBLISHED_PREFIX}{name}.lora_B.weight"] = b / 2  # vLLM holds B x scaling
    answer = worker.memory.policy_adapter_hash(7, 2.0)
    assert answer == {"sha256": hash_tensors(published), "differs": []}
    assert worker.memory.policy_adapter_hash(7, 4.0)["sha256"] != answer["sha256"]


@pytest.mark.parametrize(
    ("module", "which", "place"),
    [
        ("qkv", "lora_a_stacked", (0, 1, 0, 0, 0)),  # a weight
        ("qkv", "lora_b_stacked", (1, 1, 0, 1, 1)),  # of the second slice
        ("qkv", "lora_a_stacked", (0, 1, 0, RANK, 0)),  # a stale row of a larger rank
        ("o_proj", "lora_b_stacked", (0, 1, 0, 0, 0)),  # a module the adapter does not have
    ],
)
def test_one_wrong_number_is_seen(worker, module, which, place):
    buffers = getattr(worker.manager.modules[module], which)
    buffers[place[0]][place[1:]] += 1e-6 if module != "o_proj" else 1.0
    assert worker.memory.policy_adapter_hash(7, 2.0)["differs"] == [module]


def test_other_slots_do_not_matter(worker):
    worker.manager.modules["qkv"].lora_a_stacked[0][0] = 5.0
    assert worker.memory.policy_adapter_hash(7, 2.0)["differs"] == []
    with pytest.raises(ValueError):
        worker.memory.policy_adapter_hash(8, 2.0)  # not in any slot: nothing to hash


def test_a_slice_without_an_adapter_must_be_empty():
    module = layer(6, 2)
    weights = load(module, 0, [pair(6), pair(2)])
    weights.lora_a[1] = weights.lora_b[1] = None
    assert not _holds(module, 0, weights)
    module.lora_a_stacked[1].zero_()
    module.lora_b_stacked[1].zero_()
    assert _holds(module, 0, weights)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_identity_gives_a_packed_weight_back_to_the_bit(dtype):
    weight = torch.randn(5, 7, dtype=dtype)
    packed = SimpleNamespace(
        weight=torch.empty(0, dtype=dtype),
        input_size=7,
        cpu_linear=lambda x, _weight, _bias: torch.nn.functional.linear(x, weight),
    )
    assert torch.equal(_multiplied(packed), weight)
    packed.bias = torch.arange(5, dtype=torch.float32)
    packed.output_sizes = [3, 2]
    tensors = _split("layers.0.attn.qkv_proj", packed, {"qkv_proj": ["q_proj", "k_proj"]})
    assert list(tensors) == [
        f"layers.0.attn.{p}.{kind}" for p in ("q_proj", "k_proj") for kind in ("weight", "bias")
    ]
    assert torch.equal(tensors["layers.0.attn.k_proj.weight"], weight[3:])
    assert tensors["layers.0.attn.k_proj.bias"].tolist() == [3, 4]
