"""What a run needs of a GPU's memory, part by part, before anything is loaded.

Bytes follow from shapes and settings. Sources: states of mixed-precision Adam and their division by
ZeRO stage, arXiv 1910.02054 (section 3.1); one layer's saved activations, counted from the modules
(a test compares the count with what autograd keeps); paged key-value cache, arXiv 2309.06180. What
no formula gives, the CUDA context, NCCL's buffers, CUDA graphs and the allocator's slack, are the
constants below.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from configs.schema import PipelineConfig
from configs.schema.rl_engines import VllmEngineConfig
from configs.schema.rl_runtimes import InlineRuntime
from configs.schema.training import Lora, Trainable
from tasks.models.shapes import ModelShape

GIB = float(1 << 30)
CONTEXT_GIB = 0.6
"""CUDA context and libraries of one process."""
NCCL_GIB = 0.5
"""Buffers of one rank of a group."""
GRAPHS_GIB = 1.0
"""CUDA graphs of a vLLM engine that is not eager."""
SLACK = 1.1
"""Memory the allocator holds over what is live, as a factor."""
DEVICES_GIB = {"24 GB": 23.99, "40 GB": 40.0, "48 GB": 47.99, "80 GB": 79.65, "141 GB": 140.4}
"""What `nvidia-smi` reports for cards sold under these sizes."""
SMALLEST_MICRO_BATCH = 256


@dataclass(frozen=True)
class Needs:
    """GiB by what they are for; `total` is their sum."""

    parts: dict[str, float]

    @property
    def total(self) -> float:
        """GiB in all."""
        return sum(self.parts.values())


@dataclass(frozen=True)
class Card:
    """One GPU and the processes that live on it."""

    roles: tuple[Literal["learner", "rollout"], ...]


@dataclass(frozen=True)
class Fit:
    """Whether a card is large enough, and what to change where it is not."""

    card: Card
    needs_gib: float
    has_gib: float
    fits: bool
    detail: str
    remedy: str = ""


def element_bytes(config: PipelineConfig) -> int:
    """Of a weight as the learner computes with it."""
    return 2 if config.rl.deepspeed.dtype == "bfloat16" else 4


def activation_bytes_per_token(shape: ModelShape, size: int, trainable: Trainable) -> int:
    """What one token leaves behind in the layers for the backward pass; `size` bytes an element.

    A norm keeps its input in float32; attention its queries, its output, and keys and values, all
    four as wide as the queries; the feed-forward layer three products of width F. A weight that is
    trained, or has an adapter beside it, adds its input. Attention scores are not kept (fused
    attention).
    """
    h, f, q, k = shape.hidden, shape.ffn, shape.query_width, shape.key_width
    norms = 4 * (2 * h + (q + k if shape.head_norm else 0))
    kept = 4 * q + 3 * f
    adapted = trainable.targets if isinstance(trainable, Lora) else tuple(shape.projections())
    if {"q_proj", "k_proj", "v_proj"} & set(adapted):
        kept += h
    if {"gate_proj", "up_proj"} & set(adapted):
        kept += h
    if "down_proj" in adapted:
        kept += f
    if not isinstance(trainable, Lora):  # the norms' own weights are trained
        kept += 2 * h + (q + k if shape.head_norm else 0)
    return shape.layers * (size * kept + norms)


def logit_bytes_per_token(shape: ModelShape, size: int) -> int:
    """Logits once as the model makes them and three times in float32: tempered, their logarithm,
    and its gradient or the entropy's product."""
    return shape.vocabulary * (size + 12)


def _activation_bytes(shape: ModelShape, config: PipelineConfig, tokens: int) -> int:
    """Of a micro-batch; computed anew, each layer keeps its input and one at a time the rest."""
    size = element_bytes(config)
    kept = activation_bytes_per_token(shape, size, config.rl.trainable)
    if config.rl.deepspeed.gradient_checkpointing:
        kept = shape.layers * size * shape.hidden + kept // shape.layers
    return tokens * kept


def _logit_bytes(shape: ModelShape, config: PipelineConfig, tokens: int) -> int:
    """Of a micro-batch, or of so many of its tokens as are scored at a time."""
    at_a_time = min(tokens, config.rl.deepspeed.logits_chunk_tokens or tokens)
    return at_a_time * logit_bytes_per_token(shape, element_bytes(config))


def trained_parameters(shape: ModelShape, config: PipelineConfig) -> int:
    """Weights with an optimiser state."""
    trainable = config.rl.trainable
    if isinstance(trainable, Lora):
        return shape.adapter_parameters(trainable.r, trainable.targets)
    return shape.parameters


def learner_needs(shape: ModelShape, config: PipelineConfig, ranks: int) -> Needs:
    """One rank of the learner at its fullest: the backward pass of a full micro-batch in which
    every token is an action."""
    settings, size = config.rl.deepspeed, element_bytes(config)
    mixed = settings.dtype == "bfloat16"
    trained = trained_parameters(shape, config)
    lora = isinstance(config.rl.trainable, Lora)
    weights = shape.parameters + (trained if lora else 0)
    stage = settings.zero_stage
    by_stage = {at: ranks if stage >= at else 1 for at in (1, 2, 3)}
    optimiser = trained * (8 + (4 if mixed else 0)) / by_stage[1]
    parts = {
        "weights": weights * size / by_stage[3],
        "frozen reference": 0.0 if lora else float(shape.parameters * size),
        "gradients": trained * 4 / by_stage[2],
        "optimiser": optimiser,
        "activations": float(_activation_bytes(shape, config, settings.micro_batch_tokens)),
        "logits": float(_logit_bytes(shape, config, settings.micro_batch_tokens)),
    }
    gib = {name: value * SLACK / GIB for name, value in parts.items()}
    gib["context"] = CONTEXT_GIB + (NCCL_GIB if ranks > 1 else 0.0)
    return Needs(gib)


def engine_fixed_needs(shape: ModelShape, config: PipelineConfig) -> Needs:
    """One GPU of a rollout engine, its key-value cache left out."""
    engine = config.rl.engine
    shards = engine.tensor_parallel_size if isinstance(engine, VllmEngineConfig) else 1
    batched = engine.max_batched_tokens if isinstance(engine, VllmEngineConfig) else 0
    graphs = isinstance(engine, VllmEngineConfig) and not engine.enforce_eager
    weights = 2.0 * (shape.parameters + trained_parameters(shape, config)) / shards
    forward = 2.0 * batched * (4 * shape.hidden + 3 * shape.ffn / shards)
    sampled = 4.0 * 2 * engine.max_sequences * shape.vocabulary
    return Needs(
        {
            "weights": weights / GIB,
            "forward pass": forward / GIB,
            "logits": sampled / GIB,
            "context": CONTEXT_GIB + (GRAPHS_GIB if graphs else 0.0),
        }
    )


def cache_gib(shape: ModelShape, config: PipelineConfig, sequences: int) -> float:
    """Key-value cache of sequences of full length on one GPU of an engine."""
    engine = config.rl.engine
    shards = engine.tensor_parallel_size if isinstance(engine, VllmEngineConfig) else 1
    shards = min(shards, shape.kv_heads)
    tokens = sequences * config.model.max_length
    return tokens * shape.cache_bytes_per_token() / shards / GIB


def cards(config: PipelineConfig) -> list[Card]:
    """Which processes share a GPU: whole GPUs first, then shares of one, first place that fits."""
    runtime = config.rl.runtime
    if isinstance(runtime, InlineRuntime):
        engine = config.rl.engine
        both = isinstance(engine, VllmEngineConfig) and config.requires.gpus > 0
        return [Card(("learner", "rollout"))] if both else []
    wanted: list[tuple[Literal["learner", "rollout"], float]] = []
    wanted += [("learner", runtime.gpus_per_learner)] * runtime.learner_ranks
    wanted += [("rollout", runtime.gpus_per_rollout)] * runtime.rollout_workers
    whole = [Card((role,)) for role, gpus in wanted for _ in range(int(gpus))]
    shared: list[tuple[float, list[Literal["learner", "rollout"]]]] = []
    for role, gpus in wanted:
        if not 0 < gpus < 1:
            continue
        for place, (used, roles) in enumerate(shared):
            if used + gpus <= 1 + 1e-9:
                shared[place] = (used + gpus, [*roles, role])
                break
        else:
            shared.append((gpus, [role]))
    return whole + [Card(tuple(roles)) for _, roles in shared]


def fit(shape: ModelShape, config: PipelineConfig, card: Card, has_gib: float) -> Fit:
    """Whether `card` can be a GPU of `has_gib`, with the reckoning."""
    runtime = config.rl.runtime
    ranks = 1 if isinstance(runtime, InlineRuntime) else runtime.learner_ranks
    engine = config.rl.engine
    in_turns = isinstance(engine, VllmEngineConfig) and engine.colocated
    words: list[str] = []
    total: list[float] = []
    remedies: list[str] = []
    left = has_gib
    for _ in range(card.roles.count("rollout")):
        taken, said, remedy = _engine_fit(shape, config, has_gib)
        words.append(said)
        remedies += [remedy] if remedy else []
        total.append(taken)
        left -= 0.0 if in_turns else taken
    for _ in range(card.roles.count("learner")):
        needs = learner_needs(shape, config, ranks)
        words.append(f"learner {needs.total:.1f} GiB ({_listed(needs)})")
        total.append(needs.total)
        if needs.total > left:
            remedies.append(_smaller_learner(shape, config, ranks, left))
        left -= needs.total
    needed = max(total) if in_turns else sum(total)
    fits = not remedies and needed <= has_gib
    if not fits and not remedies:
        remedies.append("give each process a GPU of its own, or a larger one")
    return Fit(card, needed, has_gib, fits, "; ".join(words), "; ".join(dict.fromkeys(remedies)))


def _engine_fit(
    shape: ModelShape, config: PipelineConfig, has_gib: float
) -> tuple[float, str, str]:
    """GiB an engine takes, in words, and what to change where no whole sequence has room."""
    fixed, engine = engine_fixed_needs(shape, config), config.rl.engine
    one = cache_gib(shape, config, 1)
    if not isinstance(engine, VllmEngineConfig):
        needs = fixed.total + cache_gib(shape, config, engine.max_sequences)
        return needs, f"engine {needs:.1f} GiB ({_listed(fixed)} and the cache)", ""
    share = engine.gpu_memory_utilization * has_gib
    room = engine.kv_cache_gib or share - fixed.total
    taken = fixed.total + engine.kv_cache_gib if engine.kv_cache_gib else share
    sequences = int(max(0.0, room) / one)
    said = (
        f"engine {taken:.1f} GiB ({_listed(fixed)}; the cache's {max(0.0, room):.1f} GiB hold "
        f"{sequences} full sequences of the {engine.max_sequences} asked for)"
    )
    if sequences >= 1:
        return taken, said, ""
    least = (fixed.total + one) / has_gib
    remedy = (
        f"rl.engine.gpu_memory_utilization={least + 0.01:.2f} or more"
        if least < 0.95
        else "rl.engine.tensor_parallel_size=2, or a larger GPU"
    )
    return taken, said, remedy


def largest_micro_batch(
    shape: ModelShape, config: PipelineConfig, ranks: int, has_gib: float
) -> int | None:
    """Tokens of a micro-batch that fit, a multiple of 256; None where not even 256 do."""
    needs, settings = learner_needs(shape, config, ranks), config.rl.deepspeed
    growing = needs.parts["activations"]
    if settings.logits_chunk_tokens is None:
        growing += needs.parts["logits"]
    per_token = growing / settings.micro_batch_tokens
    fixed = needs.total - growing
    tokens = int((has_gib - fixed) / per_token) // SMALLEST_MICRO_BATCH * SMALLEST_MICRO_BATCH
    return tokens if tokens >= SMALLEST_MICRO_BATCH else None


def _smaller_learner(shape: ModelShape, config: PipelineConfig, ranks: int, left: float) -> str:
    tokens = largest_micro_batch(shape, config, ranks, left)
    longest = config.model.max_length
    if tokens is not None and tokens >= longest:
        return f"rl.deepspeed.micro_batch_tokens={tokens}"
    advice = []
    if not isinstance(config.rl.trainable, Lora):
        advice.append("rl.trainable.type=lora")
    if config.rl.deepspeed.dtype == "float32":
        advice.append("rl.deepspeed.dtype=bfloat16")
    if not config.rl.deepspeed.gradient_checkpointing:
        advice.append("rl.deepspeed.gradient_checkpointing=true")
    if config.rl.deepspeed.logits_chunk_tokens is None and config.rl.deepspeed.zero_stage < 3:
        advice.append("rl.deepspeed.logits_chunk_tokens=1024")
    if tokens is not None:
        advice.append(f"rl.deepspeed.micro_batch_tokens={tokens} with a shorter model.max_length")
    return " or ".join([*advice, "a larger GPU"])


def fits_everywhere(fits: Sequence[Fit]) -> bool:
    """Whether every card is large enough."""
    return all(fit.fits for fit in fits)


def _listed(needs: Needs) -> str:
    named = [f"{name} {gib:.1f}" for name, gib in needs.parts.items() if gib >= 0.05]
    return ", ".join(named)
