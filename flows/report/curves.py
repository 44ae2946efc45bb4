"""Which metrics of SFT and RL become which chart.

A stage may record more than is named here: everything else it wrote is charted under "more
metrics", and a chart whose metrics were not recorded is named as missing, never drawn empty.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from flows.report.charts import Series, line_chart
from flows.report.data import RunFiles, dig, table
from flows.report.text import finite, number, percent


@dataclass(frozen=True)
class ChartSpec:
    """A chart: its title and, for each line, a label and the metric's name."""

    title: str
    lines: tuple[tuple[str, str], ...]
    unit: str = ""
    smooth: bool = True


RL_CHARTS = (
    ChartSpec("Reward", (("mean", "reward_mean"),)),
    ChartSpec("Accuracy on training groups", (("accuracy", "accuracy"),), "share"),
    ChartSpec("KL to the SFT snapshot", (("k1", "kl_k1_mean"), ("k3", "kl_k3_mean")), "nats"),
    ChartSpec("KL coefficient", (("β", "kl_coefficient"),), smooth=False),
    ChartSpec("Entropy", (("entropy", "entropy_mean"),), "nats per token"),
    ChartSpec("Clip share", (("clipped", "clip_fraction"),), "share of tokens"),
    ChartSpec(
        "Effective share",
        (
            ("ESS of raw weights", "ess_share"),
            ("kept tokens", "kept_token_share"),
            ("effective samples", "effective_share"),
        ),
        "share",
    ),
    ChartSpec("Largest importance weight", (("largest", "weight_max"),), smooth=False),
    ChartSpec(
        "Staleness",
        (("mean", "staleness_mean"), ("max", "staleness_max")),
        "optimiser steps",
        smooth=False,
    ),
    ChartSpec(
        "Throughput",
        (("rollout", "rollout_tokens_per_s"), ("training", "train_tokens_per_s")),
        "tokens per second",
    ),
    ChartSpec(
        "Sampled length",
        (("generated", "generated_tokens_mean"), ("trained", "trained_tokens_mean")),
        "tokens",
    ),
    ChartSpec("Tool calls", (("episodes that call", "tool_call_share"),), "share"),
    ChartSpec(
        "Truncated and unscored",
        (("truncated", "truncated_share"), ("unscored", "unscored_share")),
        "share",
    ),
    ChartSpec("Groups that can teach", (("mixed outcomes", "mixed_groups_share"),), "share"),
    ChartSpec("Overlap of rollout and training", (("overlap", "overlap_share"),), "share"),
    ChartSpec("Gradient norm", (("norm", "grad_norm"),)),
    ChartSpec("Learning rate", (("lr", "lr"),), smooth=False),
    ChartSpec("Temperature", (("temperature", "temperature"),), smooth=False),
)

SFT_CHARTS = (
    ChartSpec("Loss", (("loss", "loss"),), "nats per policy token"),
    ChartSpec("Gradient norm", (("norm", "grad_norm"),)),
    ChartSpec("Learning rate", (("lr", "lr"),), smooth=False),
)


def _lines(files: RunFiles, stage: str) -> list[dict[str, Any]]:
    """Metric lines of a stage, names without the stage in front (`rl/lr` is `lr`)."""
    return [
        {
            "step": line["step"],
            "values": {k.removeprefix(f"{stage}/"): v for k, v in table(line, "values").items()},
        }
        for line in files.metrics(stage)
    ]


def _drawn(
    prefix: str, specs: Iterable[ChartSpec], lines: Sequence[dict[str, Any]]
) -> tuple[list[dict[str, Any]], list[str]]:
    """Charts that have something to show, and the titles of those that have not."""
    charts, missing = [], []
    for index, spec in enumerate(specs):
        series = [
            Series(label, tuple((m["step"], finite(dig(m, "values", name))) for m in lines))
            for label, name in spec.lines
        ]
        series = [s for s in series if s.known]
        if not series:
            missing.append(spec.title)
            continue
        svg = line_chart(f"{prefix}-{index}", spec.title, series, smooth=spec.smooth)
        labels = list(enumerate(s.label for s in series))
        charts.append({"title": spec.title, "unit": spec.unit, "svg": svg, "labels": labels})
    return charts, missing


def _others(
    prefix: str, specs: Sequence[ChartSpec], lines: Sequence[dict[str, Any]]
) -> list[dict[str, Any]]:
    """Charts of every metric no spec names."""
    named = {name for spec in specs for _, name in spec.lines}
    found = sorted({name for line in lines for name in table(line, "values")} - named)
    rest = [ChartSpec(name, (("value", name),)) for name in found]
    return _drawn(f"{prefix}-more", rest, lines)[0]


def rl_section(files: RunFiles) -> dict[str, Any]:
    """Curves and facts of the RL stage."""
    lines = _lines(files, "rl")
    charts, missing = _drawn("rl", RL_CHARTS, lines)
    facts = {**files.json("rl", "summary.json"), **table(files.summary, "rl")}
    named = (
        ("Optimiser steps", number(facts.get("steps"), 6)),
        ("Samples trained on", number(facts.get("samples"), 6)),
        ("Effective samples", number(facts.get("effective_samples"), 6)),
        ("Effective share", _ratio(facts.get("effective_samples"), facts.get("samples"))),
        ("Staleness limit", number(facts.get("staleness_limit"))),
        ("Highest staleness seen", number(facts.get("max_staleness_seen"))),
        ("Rollout and training at once", percent(facts.get("overlap_share"))),
        ("Samples dropped", percent(facts.get("dropped_share"))),
        ("Weight syncs proven", number(facts.get("sync_proofs"), 6)),
        ("Steps skipped", number(facts.get("skipped_steps"), 6)),
        ("Suspicious batches", number(facts.get("suspicious_batches"), 6)),
        ("Resumes", number(facts.get("resumes"))),
    )
    return {
        "charts": charts,
        "missing": missing,
        "others": _others("rl", RL_CHARTS, lines),
        "facts": [{"name": n, "value": v} for n, v in named] if facts else [],
    }


def _ratio(part: object, whole: object) -> str:
    over, under = finite(part), finite(whole)
    return percent(over / under if over is not None and under else None)


def sft_section(files: RunFiles) -> dict[str, Any]:
    """Curves of the SFT stage."""
    lines = _lines(files, "sft")
    charts, _ = _drawn("sft", SFT_CHARTS, lines)
    return {"charts": charts + _others("sft", SFT_CHARTS, lines)}
