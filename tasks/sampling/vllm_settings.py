"""How an engine of vLLM is started: its arguments and environment, checked before minutes go by."""

import importlib.util
import json
import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, get_args

from configs.schema.rl_engines import VllmEngineConfig
from configs.schema.training import PROJECTIONS, FullWeights, Lora
from tasks.sampling.errors import EngineStartError
from tasks.sampling.vllm_worker import EXTENSION

GIB = 1 << 30
KERNEL_NOISE = {"float32": 1e-5, "bfloat16": 0.1}
"""Nats, root mean square, by which vLLM's scores differ from transformers' with the same weights:
measured 2e-6 and 0.074 (SmolLM2-135M, where either is 0.07 off its own float32)."""
CPU_CACHE_GIB = 1.0
CPU_BLOCK_TOKENS = 32
"""The CPU build's own blocks of 128 tokens would keep no prompt shorter than that in the cache."""


def check_startable(
    settings: VllmEngineConfig, trainable: Lora | FullWeights, snapshot: Path, *, on_cpu: bool
) -> None:
    """Refuse what cannot work here, before anything is loaded.

    Raises:
        EngineStartError: names the key and what to do.
    """
    if importlib.util.find_spec("vllm") is None:
        raise EngineStartError(
            "rl.engine.type=vllm: vLLM is not installed here; run `make install`, or use "
            "rl.engine.type=transformers"
        )
    if on_cpu and settings.tensor_parallel_size > 1:
        raise EngineStartError(
            f"rl.engine.tensor_parallel_size={settings.tensor_parallel_size} needs as many GPUs; "
            "this is the CPU build, where it must be 1"
        )
    if on_cpu and settings.colocated:
        raise EngineStartError(
            "rl.engine.colocated=true hands GPU memory over between generator and learner; a CPU "
            "has none to hand over, use false here"
        )
    if isinstance(trainable, FullWeights):
        if settings.tensor_parallel_size > 1:
            raise EngineStartError(
                f"rl.engine.tensor_parallel_size={settings.tensor_parallel_size} with "
                "rl.trainable.type=full: weights cut over GPUs cannot be read back whole, so no "
                "publish could be proven; train an adapter (lora), or use 1"
            )
    else:
        _check_adapter(trainable)
    if on_cpu:
        _check_head_size(snapshot)


def _check_adapter(adapter: Lora) -> None:
    if not math.log2(adapter.alpha / adapter.r).is_integer():
        raise EngineStartError(
            f"rl.trainable.alpha={adapter.alpha} over r={adapter.r} is no power of two: vLLM "
            "folds that scaling into the weights, and they could not be read back exactly; use "
            f"alpha={adapter.r} or {2 * adapter.r}"
        )
    foreign = sorted(set(adapter.targets) - PROJECTIONS)
    if foreign:
        raise EngineStartError(
            f"rl.trainable.targets={foreign}: vLLM takes adapters of a layer's projections alone, "
            f"expected some of {sorted(PROJECTIONS)}; leave the others out, or use "
            "rl.engine.type=transformers"
        )


def _check_head_size(snapshot: Path) -> None:
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    config = json.loads((snapshot / "config.json").read_text())
    size = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    sizes = CPUAttentionBackend.get_supported_head_sizes()
    if size not in sizes:
        raise EngineStartError(
            f"this model's attention heads have size {size}; vLLM's CPU build knows {sizes}: "
            "change model.heads, or use rl.engine.type=transformers"
        )


@contextmanager
def environment(threads: int, start_timeout_s: float) -> Iterator[None]:
    """What vLLM and its processes read at their start; as it was afterwards."""
    before = dict(os.environ)
    os.environ |= {
        "OMP_NUM_THREADS": str(threads),
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # others work on these cores too
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the CPU build then leaves one process at one
        "VLLM_ENGINE_READY_TIMEOUT_S": str(math.ceil(start_timeout_s)),
        "VLLM_LOGGING_STREAM": "ext://sys.stderr",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
    }
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")  # its warnings are about settings of ours
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def engine_arguments(
    snapshot: Path,
    settings: VllmEngineConfig,
    trainable: Lora | FullWeights,
    *,
    dtype: str,
    max_length: int,
    keep: int,
    on_cpu: bool,
) -> dict[str, Any]:
    """Arguments of `AsyncEngineArgs`."""
    cache_gib = settings.kv_cache_gib or (CPU_CACHE_GIB if on_cpu else None)
    # one token more than a sequence may have: vLLM always wants room to sample one, `score` too
    positions = max_length + 1
    arguments: dict[str, Any] = {
        "model": str(snapshot),
        "dtype": dtype,
        "skip_tokenizer_init": True,
        "generation_config": "vllm",
        "max_model_len": positions,
        "hf_overrides": {"max_position_embeddings": positions},
        "max_num_seqs": settings.max_sequences,
        "max_num_batched_tokens": max(settings.max_batched_tokens, settings.max_sequences),
        "enable_chunked_prefill": True,
        "enable_prefix_caching": True,
        "logprobs_mode": "processed_logprobs",
        "enforce_eager": settings.enforce_eager or on_cpu,
        "tensor_parallel_size": settings.tensor_parallel_size,
        "gpu_memory_utilization": settings.gpu_memory_utilization,
        "kv_cache_memory_bytes": int(cache_gib * GIB) if cache_gib else None,
        "worker_extension_cls": EXTENSION,
        "enable_sleep_mode": settings.colocated,
        "disable_log_stats": True,
        "enable_log_requests": False,
    }
    if on_cpu:
        arguments["block_size"] = CPU_BLOCK_TOKENS
    if settings.tensor_parallel_size == 1:
        arguments["distributed_executor_backend"] = "uni"  # one process fewer to start
    if isinstance(trainable, Lora):
        arguments |= {
            "enable_lora": True,
            "max_lora_rank": _rank_room(trainable.r),
            "max_loras": keep + 1,
            "max_cpu_loras": keep + 1,
            "lora_target_modules": list(trainable.targets),
        }
    return arguments


def _rank_room(rank: int) -> int:
    from vllm.config.lora import MaxLoRARanks

    sizes = sorted(get_args(MaxLoRARanks))
    fitting = [size for size in sizes if size >= rank]
    if not fitting:
        raise EngineStartError(f"rl.trainable.r={rank}; vLLM serves ranks up to {sizes[-1]}")
    return fitting[0]
