"""Memory of a GPU, against sums made by hand and against what autograd really keeps."""

import pytest

from configs.load import load_config
from configs.schema import PipelineConfig
from configs.schema.training import FullWeights, Lora, Trainable
from tasks.models.shapes import PUBLISHED, ModelShape
from tasks.rl.memory import (
    CONTEXT_GIB,
    DEVICES_GIB,
    GIB,
    NCCL_GIB,
    SLACK,
    Card,
    activation_bytes_per_token,
    cache_gib,
    cards,
    engine_fixed_needs,
    fit,
    largest_micro_batch,
    learner_needs,
    logit_bytes_per_token,
)

SHAPE = PUBLISHED["Qwen2.5-7B"]
BOTH = Card(("rollout", "learner"))


def config(**overrides: object) -> PipelineConfig:
    keys: dict[str, object] = {
        "model": {"type": "pretrained", "path": "Qwen/Qwen2.5-7B-Instruct", "max_length": 1024},
        "rl.engine.type": "vllm",
        "rl.deepspeed.dtype": "bfloat16",
        "rl.deepspeed.micro_batch_tokens": 1024,
    }
    chosen = {key.replace("__", "."): value for key, value in overrides.items()}
    return load_config("calculator", {**keys, **chosen})


def test_adapters_of_7b_by_hand() -> None:
    lora = {"type": "lora", "r": 16, "targets": ["q_proj", "v_proj"]}
    needs = learner_needs(SHAPE, config(rl__trainable=lora), ranks=1).parts
    adapter = 28 * 16 * ((3584 + 3584) + (3584 + 512))
    assert needs["weights"] == pytest.approx((7_615_616_512 + adapter) * 2 * SLACK / GIB)
    assert needs["gradients"] == pytest.approx(adapter * 4 * SLACK / GIB)
    assert needs["optimiser"] == pytest.approx(adapter * 12 * SLACK / GIB)  # two moments, master
    assert needs["frozen reference"] == 0.0
    assert needs["context"] == CONTEXT_GIB
    # a layer: queries, output, keys and values 4·3584, three of 18944, input of q and v; norms 8·H
    layer = 2 * (4 * 3584 + 3 * 18944 + 3584) + 8 * 3584
    assert needs["activations"] == pytest.approx(1024 * 28 * layer * SLACK / GIB)
    assert needs["logits"] == pytest.approx(1024 * 152064 * 14 * SLACK / GIB)


@pytest.mark.parametrize(
    ("stage", "weights", "gradients", "optimiser"),
    [(0, 2, 4, 12), (1, 2, 4, 12 / 8), (2, 2, 4 / 8, 12 / 8), (3, 2 / 8, 4 / 8, 12 / 8)],
)
def test_zero_divides_what_its_stage_says(stage, weights, gradients, optimiser) -> None:
    chosen = config(rl__trainable={"type": "full"}, rl__deepspeed__zero_stage=stage)
    needs = learner_needs(SHAPE, chosen, ranks=8).parts
    each = SHAPE.parameters * SLACK / GIB
    assert needs["weights"] == pytest.approx(weights * each)
    assert needs["frozen reference"] == pytest.approx(2 * each)
    assert needs["gradients"] == pytest.approx(gradients * each)
    assert needs["optimiser"] == pytest.approx(optimiser * each)
    assert needs["context"] == pytest.approx(CONTEXT_GIB + NCCL_GIB)


def test_what_is_computed_anew_is_not_kept() -> None:
    """28 layers keep their input of 3584 in two bytes; the rest is there one layer at a time."""
    plain = learner_needs(SHAPE, config(), 1).parts
    anew = learner_needs(SHAPE, config(rl__deepspeed__gradient_checkpointing=True), 1).parts
    inputs = 1024 * 28 * 2 * 3584 * SLACK / GIB
    assert anew["activations"] == pytest.approx(inputs + plain["activations"] / 28)
    chunked = config(rl__deepspeed__logits_chunk_tokens=256)
    assert learner_needs(SHAPE, chunked, 1).parts["logits"] == pytest.approx(plain["logits"] / 4)
    longer = config(rl__deepspeed__logits_chunk_tokens=4096)
    assert learner_needs(SHAPE, longer, 1).parts["logits"] == pytest.approx(plain["logits"])
    assert largest_micro_batch(SHAPE, chunked, 1, 40.0) > largest_micro_batch(
        SHAPE, config(), 1, 40.0
    )


def test_float32_has_no_second_copy_of_the_weights() -> None:
    chosen = config(rl__trainable={"type": "full"}, rl__deepspeed__dtype="float32")
    needs = learner_needs(SHAPE, chosen, ranks=1).parts
    each = SHAPE.parameters * SLACK / GIB
    assert needs["weights"] == pytest.approx(4 * each)
    assert needs["optimiser"] == pytest.approx(8 * each)


def test_cache_and_logits_by_hand() -> None:
    assert cache_gib(SHAPE, config(), 10) == pytest.approx(10 * 1024 * 2 * 28 * 512 * 2 / GIB)
    halved = config(rl__engine__tensor_parallel_size=2)
    assert cache_gib(SHAPE, halved, 10) == pytest.approx(10 * 1024 * 2 * 28 * 512 / GIB)
    assert engine_fixed_needs(SHAPE, halved).parts["weights"] == pytest.approx(
        engine_fixed_needs(SHAPE, config()).parts["weights"] / 2
    )
    assert logit_bytes_per_token(SHAPE, 4) == 152064 * 16


def layout(**runtime: object) -> list[Card]:
    return cards(config(rl__runtime={"type": "ray", **runtime}))


def test_who_shares_a_gpu() -> None:
    assert layout() == []  # none reserved: a CPU run
    halves = {"gpus_per_rollout": 0.5, "gpus_per_learner": 0.5}
    assert layout(**halves) == [Card(("learner", "rollout"))]
    assert layout(**halves, rollout_workers=2) == [
        Card(("learner", "rollout")), Card(("rollout",)),
    ]  # fmt: skip
    assert layout(gpus_per_rollout=2, gpus_per_learner=1, learner_ranks=2) == [
        Card(("learner",)), Card(("learner",)), Card(("rollout",)), Card(("rollout",)),
    ]  # fmt: skip


def test_a_learner_too_large_is_told_the_micro_batch_that_fits() -> None:
    chosen = config(rl__deepspeed__micro_batch_tokens=16384)
    verdict = fit(SHAPE, chosen, Card(("learner",)), DEVICES_GIB["80 GB"])
    assert not verdict.fits and verdict.needs_gib > 79.65
    key, _, tokens = verdict.remedy.partition("=")
    assert key == "rl.deepspeed.micro_batch_tokens"
    smaller = config(rl__deepspeed__micro_batch_tokens=int(tokens))
    assert fit(SHAPE, smaller, Card(("learner",)), DEVICES_GIB["80 GB"]).fits
    larger = config(rl__deepspeed__micro_batch_tokens=int(tokens) + 256)
    assert not fit(SHAPE, larger, Card(("learner",)), DEVICES_GIB["80 GB"]).fits


def test_a_card_too_small_for_the_weights_is_told_so() -> None:
    full = config(rl__trainable={"type": "full"}, rl__deepspeed__dtype="float32")
    verdict = fit(SHAPE, full, Card(("learner",)), DEVICES_GIB["24 GB"])
    assert not verdict.fits
    assert verdict.remedy == (
        "rl.trainable.type=lora or rl.deepspeed.dtype=bfloat16 or "
        "rl.deepspeed.gradient_checkpointing=true or rl.deepspeed.logits_chunk_tokens=1024 or "
        "a larger GPU"
    )
    assert largest_micro_batch(SHAPE, full, 1, 24.0) is None


def test_an_engine_without_room_for_one_sequence() -> None:
    chosen = config(rl__engine__gpu_memory_utilization=0.2)
    verdict = fit(SHAPE, chosen, Card(("rollout",)), 80.0)
    assert not verdict.fits and "hold 0 full sequences" in verdict.detail
    assert verdict.remedy.startswith("rl.engine.gpu_memory_utilization=0.2")
    share = float(verdict.remedy.split("=")[1].split()[0])
    raised = config(rl__engine__gpu_memory_utilization=share)
    assert fit(SHAPE, raised, Card(("rollout",)), 80.0).fits
    tiny = fit(SHAPE, config(), Card(("rollout",)), 16.0)
    assert not tiny.fits and "tensor_parallel_size=2" in tiny.remedy


def test_sharing_adds_up_and_taking_turns_does_not() -> None:
    chosen = config(rl__engine__gpu_memory_utilization=0.5)
    alone = learner_needs(SHAPE, chosen, 1).total
    shared = fit(SHAPE, chosen, BOTH, 100.0)
    assert shared.fits and shared.needs_gib == pytest.approx(50.0 + alone)
    turns = config(
        rl__engine__gpu_memory_utilization=0.9, rl__engine__colocated=True,
        rl__runtime={"type": "inline"}, rl__staleness_limit=0,
        rl__publish={"start": 1, "end": 1},
    )  # fmt: skip
    alternating = fit(SHAPE, turns, BOTH, 40.0)
    assert alternating.fits and alternating.needs_gib == pytest.approx(36.0)


ON_MLP = Lora(r=4, targets=("o_proj", "up_proj", "down_proj"))


@pytest.mark.parametrize("trainable", [FullWeights(), Lora(r=4), ON_MLP], ids=["full", "qv", "mlp"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", ["qwen2", "qwen3"])
def test_activations_against_what_autograd_keeps(
    kind, dtype, trainable: Trainable, monkeypatch
) -> None:
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM

    # DeepSpeed, imported by another test, puts a function in its place that keeps its inputs twice
    monkeypatch.setattr(torch.nn.functional, "linear", torch._C._nn.linear)
    sizes = {
        "hidden_size": 64, "num_hidden_layers": 8, "num_attention_heads": 4, "vocab_size": 300,
        "num_key_value_heads": 2, "intermediate_size": 160, "attn_implementation": "sdpa",
    }  # fmt: skip
    model = (
        Qwen2ForCausalLM(Qwen2Config(**sizes))
        if kind == "qwen2"
        else Qwen3ForCausalLM(Qwen3Config(head_dim=16, **sizes))
    )
    trunk = model.model
    if isinstance(trainable, Lora):
        adapters = LoraConfig(r=trainable.r, target_modules=list(trainable.targets))
        trunk = get_peft_model(model, adapters).get_base_model().model
    trunk.to(getattr(torch, dtype))
    weights = {p.untyped_storage().data_ptr() for p in trunk.parameters()}
    kept: dict[int, object] = {}

    def note(tensor):
        pointer = tensor.untyped_storage().data_ptr()
        if pointer not in weights:
            kept[pointer] = tensor  # held, so that no later tensor takes its place
        return tensor

    ids = torch.randint(0, 300, (2, 64))
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        trunk(input_ids=ids, use_cache=False)
    measured = sum(t.untyped_storage().nbytes() for t in kept.values())
    shape = ModelShape(64, 8, 4, 2, 16, 160, 300, True, head_norm=kind == "qwen3")
    size = 2 if dtype == "bfloat16" else 4
    estimate = ids.numel() * activation_bytes_per_token(shape, size, trainable)
    assert 0.97 <= estimate / measured <= 1.15
