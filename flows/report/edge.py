"""What each shipped file takes on the device and how fast it can be: predicted, and measured."""

from typing import Any

from flows.report.data import RunFiles, table
from flows.report.text import UNKNOWN, finite, number

_MIB = 1 << 20
_BUFFERS = ("kv_cache_bytes", "compute_bytes", "output_bytes")


def edge_section(files: RunFiles) -> dict[str, Any]:
    """Rows of the models in the bundle; empty where no bundle was made.

    Predictions and llama.cpp's own report come from the signed manifest; memory and speed were
    measured on the CPU of the machine that built the bundle, and stand beside it.
    """
    manifest = files.json("package", "bundle/manifest.json")
    measured = files.json("package", "measured.json")
    models = table(manifest, "models")
    rows = [_row(quant, table(models, quant), table(measured, quant)) for quant in sorted(models)]
    where = [table(measured, quant).get("where") for quant in sorted(measured)]
    device = next((table(models, q, "predicted").get("device") for q in sorted(models)), None)
    return {
        "rows": rows,
        "device": device if isinstance(device, str) else UNKNOWN,
        "where": next((text for text in where if isinstance(text, str)), ""),
        "context": number(table(manifest, "serving").get("context_length")),
    }


def _row(quant: str, entry: dict[str, Any], measured: dict[str, Any]) -> dict[str, str]:
    predicted, memory = table(entry, "predicted"), table(entry, "memory")
    reported = table(entry, "reported")
    return {
        "type": quant,
        "file": _mib(entry.get("size")),
        "predicted_file": _with_error(predicted.get("file_bytes"), entry.get("size")),
        "memory": _mib(memory.get("total_bytes")),
        "buffers": _mib(_sum(reported)),
        "predicted_buffers": _with_error(_sum(memory), _sum(reported)),
        "speed": _speeds(table(predicted, "tokens_per_s")),
        "resident": _mib(measured.get("resident_bytes")),
        "decode": number(measured.get("decode_tokens_per_s")),
        "prompt": number(measured.get("prompt_tokens_per_s")),
    }


def _sum(sizes: dict[str, Any]) -> float | None:
    """KV, compute and output buffer together; None where one is unknown."""
    found = [finite(sizes.get(name)) for name in _BUFFERS]
    known = [size for size in found if size is not None]
    return sum(known) if len(known) == len(found) else None


def _mib(value: object) -> str:
    size = finite(value)
    return UNKNOWN if size is None else f"{size / _MIB:,.1f} MiB"


def _with_error(predicted: object, real: object) -> str:
    """A predicted size, and by how much it missed the real one."""
    guess, truth = finite(predicted), finite(real)
    if guess is None:
        return UNKNOWN
    if not truth:
        return _mib(guess)
    return f"{_mib(guess)} ({100 * (guess / truth - 1):+.1f} %)"


def _speeds(modes: dict[str, Any]) -> str:
    """Expected tokens per second of each power mode, equal ones together."""
    spans: dict[str, list[str]] = {}
    for mode in modes:
        expected = table(modes, mode).get("expected")
        ends = [finite(end) for end in expected] if isinstance(expected, list) else []
        if len(ends) == 2 and ends[0] is not None and ends[1] is not None:
            spans.setdefault(f"{ends[0]:,.0f}–{ends[1]:,.0f}", []).append(mode)
    return "; ".join(f"{span} ({', '.join(names)})" for span, names in spans.items()) or UNKNOWN
