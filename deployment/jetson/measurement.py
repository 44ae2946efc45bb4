"""What a GGUF file takes and how fast it runs on this machine's CPU, in a process of its own.

    python -m deployment.jetson.measurement FILE.gguf --context 512

The buffers are llama.cpp's own report and the same on every machine; memory and speed are this
machine's, one thread, and stand beside the bundle, never in its signed manifest.
"""

import argparse
import json
import os
import platform
import re
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deployment.jetson.errors import MissingInputError
from deployment.jetson.memory_plan import Serving

PROMPT_TOKENS, DECODED_TOKENS = 128, 64
DEADLINE_S = 600.0
MIB = 1 << 20
_REPORTS = {
    "kv_cache_bytes": re.compile(r"KV buffer size =\s*([\d.]+) MiB"),
    "output_bytes": re.compile(r"output buffer size =\s*([\d.]+) MiB"),
    "compute_bytes": re.compile(r"compute buffer size is\s*([\d.]+) MiB"),
}
_RESIDENT = re.compile(r"^VmHWM:\s*(\d+) kB$", re.MULTILINE)


def read_report(lines: list[str]) -> dict[str, int]:
    """Bytes of llama.cpp's buffers out of its log, summed over buffers of the same use.

    Raises:
        MissingInputError: a line is missing; another llama.cpp writes another log.
    """
    text, found = "\n".join(lines), {}
    for name, pattern in _REPORTS.items():
        sizes = [float(size) for size in pattern.findall(text)]
        if not sizes:
            raise MissingInputError(f"llama.cpp reported no {name}; its log was: {text[-500:]}")
        found[name] = round(sum(sizes) * MIB)
    return found


def reported_buffers(gguf: Path, serving: Serving) -> dict[str, int]:
    """Open the file as it will be served, on the CPU, and return what llama.cpp reports; bytes.

    Raises:
        MissingInputError: llama.cpp cannot open it.
    """
    from tasks.sampling.llama_cpp_context import captured_log

    with captured_log() as log:
        _, free = _open(gguf, serving)
        free()
    return read_report(log)


def _open(gguf: Path, serving: Serving) -> tuple[Any, Any]:
    """(context, function that frees it and the model).

    Raises:
        MissingInputError: llama.cpp cannot open the file.
    """
    import llama_cpp

    llama_cpp.llama_backend_init()
    wanted = llama_cpp.llama_model_default_params()
    wanted.n_gpu_layers = 0
    model = llama_cpp.llama_model_load_from_file(str(gguf).encode(), wanted)
    if not model:
        raise MissingInputError(f"llama.cpp cannot load {gguf}; quantise again")
    params = llama_cpp.llama_context_default_params()
    params.n_ctx, params.n_seq_max = serving.context, serving.slots
    params.n_ubatch = min(serving.ubatch, serving.context)
    params.n_batch = max(params.n_ubatch, min(512, serving.context))
    params.n_threads = params.n_threads_batch = 1
    kinds = {"F16": llama_cpp.GGML_TYPE_F16, "Q8_0": llama_cpp.GGML_TYPE_Q8_0}
    params.type_k = params.type_v = kinds[serving.kv_type]
    params.flash_attn_type = (
        llama_cpp.LLAMA_FLASH_ATTN_TYPE_ENABLED
        if serving.flash_attention
        else llama_cpp.LLAMA_FLASH_ATTN_TYPE_DISABLED
    )
    context = llama_cpp.llama_init_from_model(model, params)

    def free() -> None:
        if context:
            llama_cpp.llama_free(context)
        llama_cpp.llama_model_free(model)

    if not context:
        free()
        raise MissingInputError(f"llama.cpp cannot serve {gguf} with {serving}")
    return context, free


@dataclass(frozen=True)
class _Clock:
    """Tokens per second of the prompt and of what is decoded after it."""

    prompt: float
    decode: float


def _timed(context: Any, serving: Serving) -> _Clock:
    """Read a prompt, then decode token by token; what the tokens are does not matter."""
    import llama_cpp

    prompt = max(1, min(PROMPT_TOKENS, serving.context // 2, serving.ubatch))
    decoded = max(1, min(DECODED_TOKENS, serving.context - prompt))
    tokens = (llama_cpp.llama_token * prompt)(*([0] * prompt))
    start = time.perf_counter()
    llama_cpp.llama_decode(context, llama_cpp.llama_batch_get_one(tokens, prompt))
    middle = time.perf_counter()
    one = (llama_cpp.llama_token * 1)(0)
    for _ in range(decoded):
        llama_cpp.llama_decode(context, llama_cpp.llama_batch_get_one(one, 1))
    end = time.perf_counter()
    return _Clock(prompt / (middle - start), decoded / (end - middle))


def _peak_bytes() -> int:
    match = _RESIDENT.search(Path("/proc/self/status").read_text())
    return int(match[1]) * 1024 if match else 0


def measure_here(gguf: Path, serving: Serving) -> dict[str, Any]:
    """Buffers, growth of this process's memory, and speed; call it in a fresh process."""
    import llama_cpp

    from tasks.sampling.llama_cpp_context import captured_log

    with captured_log() as log:
        before = _peak_bytes()
        context, free = _open(gguf, serving)
        clock = _timed(context, serving)
        grown = _peak_bytes() - before
        free()
    return {
        "buffers": read_report(log),
        "resident_bytes": grown,
        "prompt_tokens_per_s": round(clock.prompt, 1),
        "decode_tokens_per_s": round(clock.decode, 1),
        "threads": 1,
        "where": f"CPU of the machine that built the bundle ({platform.machine()})",
        "llama_cpp_python": llama_cpp.__version__,
    }


def measure(gguf: Path, serving: Serving) -> dict[str, Any]:
    """`measure_here` in a process of its own, so that its memory is this file's alone.

    Raises:
        MissingInputError: it failed; with what it said.
    """
    command = [sys.executable, "-m", "deployment.jetson.measurement", str(gguf)]
    command += ["--context", str(serving.context), "--ubatch", str(serving.ubatch)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=DEADLINE_S,
            check=False,
            env=environment,
        )
    except subprocess.TimeoutExpired:
        raise MissingInputError(f"measuring {gguf} took over {DEADLINE_S:.0f} s") from None
    if done.returncode != 0:
        raise MissingInputError(f"measuring {gguf} failed: {done.stderr.strip()[-500:]}")
    return json.loads(done.stdout)


def main() -> int:
    """Command line; JSON on standard output."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("gguf", type=Path)
    parser.add_argument("--context", type=int, required=True)
    parser.add_argument("--ubatch", type=int, required=True)
    options = parser.parse_args()
    serving = Serving(options.context, ubatch=options.ubatch).checked()
    sys.stdout.write(json.dumps(measure_here(options.gguf, serving), sort_keys=True) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
