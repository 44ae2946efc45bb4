"""What a person sees first on a run in MLflow's pages: a description in words, and its figures.

Made from the run's summary; a figure nobody measured is left out, never shown as 0.
"""

import math
from collections.abc import Iterator, Mapping
from typing import Any

NOTE = "mlflow.note.content"
_NEXT = (
    "Artifacts: `report.html` is the whole run on one page, `lineage.html` how everything hangs "
    "together. Every child run holds its stage's files, and `manifest.json` with the sha256 of "
    "each. Outputs under *Logged models*, data under *Datasets*.",
    "",
    "`rl-pipeline lineage <sha256>` walks from any of them to the prompts and to the devices.",
)
_QUANT_FIGURES = ("accuracy", "kld_mean", "top1", "bits_per_weight", "size_bytes")


def figures(summary: Mapping[str, Any]) -> dict[str, float]:
    """The run's figures under names that sort into groups."""
    return {
        name: float(value)
        for name, value in _named(summary)
        if isinstance(value, int | float) and math.isfinite(value)
    }


def _named(summary: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    heldout = summary.get("heldout") or {}
    delta = heldout.get("delta") or {}
    interval = delta.get("ci95") or [None, None]
    yield "heldout/accuracy_snapshot", (heldout.get("sft") or {}).get("accuracy")
    yield "heldout/accuracy_policy", (heldout.get("rl") or {}).get("accuracy")
    yield "heldout/delta", delta.get("value")
    yield "heldout/delta_ci95_low", interval[0]
    yield "heldout/delta_ci95_high", interval[1]
    for band in (heldout.get("rl") or {}).get("by_band") or ():
        yield f"heldout/accuracy_policy_{band.get('band')}", band.get("accuracy")
    for quant, facts in (summary.get("quant") or {}).items():
        for name in _QUANT_FIGURES:
            yield f"parity/{quant}/{name}", facts.get(name)
        yield f"parity/{quant}/ships", _flag(facts.get("ships"))
    cost = summary.get("cost") or {}
    yield "cost/usd", cost.get("usd")
    yield "cost/usd_per_effective_sample", cost.get("usd_per_effective_sample")
    yield "cost/effective_samples", cost.get("effective_samples")
    yield "run/wall_s", summary.get("wall_s")
    yield "run/peak_tree_bytes", summary.get("peak_tree_bytes")


def _flag(value: object) -> float | None:
    return float(value) if isinstance(value, bool) else None


def description(summary: Mapping[str, Any]) -> str:
    """Markdown: what came out, what each stage made, where to look next."""
    blocks = (_outcome(summary), _quant(summary), _stages(summary), _NEXT)
    return "\n\n".join("\n".join(block) for block in blocks)


def _outcome(summary: Mapping[str, Any]) -> list[str]:
    heldout = summary.get("heldout") or {}
    before = (heldout.get("sft") or {}).get("accuracy")
    after = (heldout.get("rl") or {}).get("accuracy")
    interval = (heldout.get("delta") or {}).get("ci95")
    lines = [f"**{summary.get('status')}** profile `{summary.get('profile')}`"]
    if before is not None and after is not None and interval:
        low, high = (100 * end for end in interval)
        lines += [
            "",
            f"Held-out accuracy **{before:.1%} → {after:.1%}** after RL, difference 95 % interval "
            f"[{low:+.1f}, {high:+.1f}] points.",
        ]
    promotion = summary.get("promotion") or {}
    if promotion.get("reason"):
        lines += ["", f"Promotion: {promotion['reason']}"]
    return lines


def _quant(summary: Mapping[str, Any]) -> list[str]:
    quant = summary.get("quant") or {}
    if not quant:
        return ["No quantisation was made."]
    lines = [
        "| quantisation | size | bits/weight | KL to F16 | verdict |",
        "| --- | --- | --- | --- | --- |",
    ]
    for name, facts in quant.items():
        why = str(facts.get("why") or "").replace("|", "/")
        cells = (
            name,
            _cell(facts.get("size_bytes"), 1e-6, ".2f", " MB"),
            _cell(facts.get("bits_per_weight"), 1, ".2f"),
            _cell(facts.get("kld_mean"), 1, ".2g"),
            why,
        )
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def _cell(value: object, scale: float, form: str, unit: str = "") -> str:
    known = isinstance(value, int | float) and not isinstance(value, bool)
    return f"{value * scale:{form}}{unit}" if known else "—"  # type: ignore[operator]


def _stages(summary: Mapping[str, Any]) -> list[str]:
    lines = ["| stage | status | output (child run tag `output.sha256`) |", "| --- | --- | --- |"]
    for name, facts in (summary.get("stages") or {}).items():
        made = facts.get("output_sha256")
        status = f"{facts.get('status')}{', reused' if facts.get('cached') else ''}"
        lines.append(f"| {name} | {status} | {f'`{made[:12]}`' if made else '—'} |")
    return lines
