"""Sections of the report that are tables: result, held-out, quantisation, cost, data.

Each takes the run's files and gives plain values for the template; an empty mapping means the
stage left nothing, and the page then says so.
"""

from collections.abc import Callable
from typing import Any

from flows.report.charts import COLOURS, Bar, Part, interval_bars, stacked_bar
from flows.report.data import RunFiles, dig, quantised, rows, strings, table
from flows.report.gates import docs_link, reward_gate
from flows.report.text import (
    UNKNOWN,
    clipped,
    dollars,
    duration,
    finite,
    interval,
    number,
    percent,
    points,
    short_hash,
    size,
)
from tasks.evaluation.metrics import ordered_bands


def headline(files: RunFiles) -> dict[str, Any]:
    """The tiles at the top."""
    summary = files.summary
    facts = [
        f"{duration(summary['wall_s'])} wall-clock" if finite(summary.get("wall_s")) else "",
        f"commit {short_hash(summary.get('git_sha'))}" if summary.get("git_sha") else "",
        _machine(table(summary, "machine")),
    ]
    return {
        "profile": str(summary.get("profile") or files.config.get("profile") or "unknown profile"),
        "run_id": str(summary.get("run_id") or files.run_dir.name),
        "facts": [fact for fact in facts if fact],
        "accuracy": _accuracy_tile(files),
        "quant": [
            {"type": name, "size": size(q.get("size_bytes")), **_ships(q)}
            for name, q in quantised(files).items()
        ],
        "cost": _cost_tile(files),
        "bundle": _bundle_tile(table(summary, "bundle")),
    }


def _machine(machine: dict[str, Any]) -> str:
    cores, speed = finite(machine.get("cores")), finite(machine.get("gflops_f32"))
    parts = [f"{cores:.0f} cores" if cores else "", f"{speed:.0f} GFLOP/s" if speed else ""]
    return ", ".join(part for part in parts if part)


def _evaluated(files: RunFiles) -> dict[str, Any]:
    """The evaluation stage's own summary; what `summary.json` repeats of it where it is gone."""
    return files.json("evaluation", "summary.json") or table(files.summary, "heldout")


def _accuracy_tile(files: RunFiles) -> dict[str, str] | None:
    result = _evaluated(files)
    delta = table(result, "delta")
    if finite(dig(result, "rl", "accuracy")) is None or finite(delta.get("value")) is None:
        return None
    low, high = _ends(delta.get("ci95"))
    if low is None or high is None:
        verdict, tone = "no interval", "warn"
    elif low > 0:
        verdict, tone = "better", "good"
    elif high < 0:
        verdict, tone = "worse", "bad"
    else:
        verdict, tone = "no difference shown", "warn"
    return {
        "before": percent(dig(result, "sft", "accuracy")),
        "after": percent(dig(result, "rl", "accuracy")),
        "delta": points(delta["value"]),
        "ci": interval(delta.get("ci95")),
        "n": number(dig(result, "rl", "n"), 6),
        "verdict": verdict,
        "tone": tone,
    }


def _ends(pair: Any) -> tuple[float | None, float | None]:
    if not isinstance(pair, list) or len(pair) != 2:
        return None, None
    return finite(pair[0]), finite(pair[1])


def _cost_tile(files: RunFiles) -> dict[str, str] | None:
    cost = table(files.summary, "cost")
    total = finite(cost.get("usd"))
    if total is None:
        return None
    per_sample = finite(cost.get("usd_per_effective_sample"))
    detail = "cost per effective sample unknown"
    if per_sample is not None:
        detail = f"{dollars(per_sample * 1000)} per 1,000 effective samples"
    return {"total": dollars(total), "detail": detail}


def _bundle_tile(bundle: dict[str, Any]) -> dict[str, str] | None:
    if not bundle.get("path"):
        return None
    words, tone = "signature unknown", "warn"
    if isinstance(bundle.get("signed"), bool):
        words, tone = ("signed", "good") if bundle["signed"] else ("not signed", "bad")
    return {
        "path": str(bundle["path"]),
        "sha": short_hash(bundle.get("sha256")),
        "signed": words,
        "tone": tone,
    }


def heldout_section(files: RunFiles) -> dict[str, Any]:
    """Bars by band, measures before and after, the promotion gate, signs of reward hacking."""
    result = _evaluated(files)
    before, after = table(result, "sft"), table(result, "rl")
    if not before and not after:
        return {}
    sampling = table(result, "sampling")
    return {
        "sentence": _sampling_sentence(sampling, after or before),
        "bars": _bars(before, after),
        "measures": [
            {"name": name, "before": show(before), "after": show(after)} for name, show in _MEASURES
        ],
        "gate": _gate(table(result, "gate")),
        "drift": [_check(sign, "quiet", "alarm") for sign in rows(result, "drift")],
    }


def _sampling_sentence(sampling: dict[str, Any], side: dict[str, Any]) -> str:
    asked = f"{number(side.get('n'), 6)} problems that training never saw"
    if not sampling:
        return asked + "."
    return (
        f"{asked}, {number(sampling.get('samples'))} samples each at temperature "
        f"{number(sampling.get('temperature'))}, at most {number(sampling.get('max_turns'))} turns "
        f"of {number(sampling.get('max_new_tokens'))} tokens; the same block and seeds for both."
    )


_MEASURES: tuple[tuple[str, Callable[[dict[str, Any]], str]], ...] = (
    ("Accuracy", lambda s: percent(s.get("accuracy"))),
    ("95 % interval", lambda s: _share_interval(s.get("ci95"))),
    ("Answer could be read", lambda s: percent(s.get("format_share"))),
    ("Wrong answers", lambda s: _of_answers(s, "wrong")),
    ("No answer", lambda s: _of_answers(s, "no_answer")),
    ("Could not be scored", lambda s: _of_answers(s, "unscored")),
    ("Same answer in every sample", lambda s: percent(s.get("stability"))),
    ("Cut off", lambda s: percent(s.get("truncated_share"))),
    ("Calls a tool", lambda s: percent(s.get("tool_use_share"))),
    ("Tool calls that fail", lambda s: percent(s.get("tool_error_share"))),
    ("Tokens, mean", lambda s: number(dig(s, "lengths", "mean"))),
    (
        "Tokens, 50 / 90 / 99 %",
        lambda s: " / ".join(number(dig(s, "lengths", p)) for p in ("p50", "p90", "p99")),
    ),
)


def _share_interval(pair: Any) -> str:
    low, high = _ends(pair)
    return UNKNOWN if low is None else f"{percent(low)} – {percent(high)}"


def _of_answers(side: dict[str, Any], outcome: str) -> str:
    count, answers = finite(dig(side, "outcomes", outcome)), finite(side.get("answers"))
    if count is None or not answers:
        return UNKNOWN
    return f"{percent(count / answers)} ({count:,.0f})"


def _bars(before: dict[str, Any], after: dict[str, Any]) -> Any:
    sides = [{str(b.get("band")): b for b in rows(side, "by_band")} for side in (before, after)]
    names = list(dict.fromkeys([*sides[1], *sides[0]]))
    groups = [("all", [_bar(before, "before"), _bar(after, "after")])]
    groups += [
        (name, [_bar(sides[0].get(name, {}), "before"), _bar(sides[1].get(name, {}), "after")])
        for name in names
    ]
    return interval_bars("heldout-bars", "Held-out accuracy by difficulty band", groups)


def _bar(block: dict[str, Any], label: str) -> Bar:
    low, high = _ends(block.get("ci95"))
    return Bar(label, finite(block.get("accuracy")), low, high)


def _gate(gate: dict[str, Any]) -> dict[str, Any]:
    return {
        **_passed(gate.get("passed"), "promoted", "not promoted"),
        "checks": [_check(check, "passed", "failed") for check in rows(gate, "checks")],
    }


def _check(check: dict[str, Any], yes: str, no: str) -> dict[str, str]:
    """A measured value against its limit; a value that is unknown is said to be."""
    known = finite(check.get("value")) is not None
    return {
        "name": str(check.get("name", "")),
        "value": number(check.get("value")),
        "limit": number(check.get("limit")),
        **_passed(check.get("passed") if known else None, yes, no),
    }


def _passed(value: Any, yes: str, no: str) -> dict[str, str]:
    if not isinstance(value, bool):
        return {"verdict": "unknown", "tone": "warn"}
    return {"verdict": yes, "tone": "good"} if value else {"verdict": no, "tone": "bad"}


def _ships(quant: dict[str, Any]) -> dict[str, str]:
    return _passed(quant.get("ships"), "ships", "rejected")


def quant_section(files: RunFiles) -> dict[str, Any]:
    """The parity table, the attribution sentence and the tensor types really used."""
    parity = files.json("quantize", "parity.json")
    table_rows = [
        {
            "type": name,
            "size": size(q.get("size_bytes")),
            "bits": number(q.get("bits_per_weight")),
            "kld": number(q.get("kld_mean")),
            "top1": percent(q.get("top1"), 2),
            "ppl": number(q.get("ppl_ratio"), 5),
            "accuracy": percent(q.get("accuracy")),
            "delta": interval(q.get("accuracy_delta_ci95")),
            "why": str(q.get("why") or ""),
            **_ships(q),
        }
        for name, q in quantised(files).items()
    ]
    tensors, kinds = _tensor_types(quantised(files))
    return {
        "rows": table_rows,
        "attribution": str(parity.get("attribution") or ""),
        "tensors": tensors,
        "tensor_types": kinds,
    }


def _tensor_types(quant: dict[str, Any]) -> tuple[list[dict[str, Any]], list[tuple[int, str]]]:
    """A bar for each file: which types its matrices really have; and the legend."""
    counted = {
        name: {kind: n for kind, n in table(facts, "tensor_types").items() if finite(n)}
        for name, facts in quant.items()
    }
    kinds = sorted({kind for types in counted.values() for kind in types})
    shown: list[dict[str, Any]] = []
    for name, types in counted.items():
        if not types:
            continue
        parts = [Part(kind, float(types.get(kind, 0)), i % COLOURS) for i, kind in enumerate(kinds)]
        words = ", ".join(f"{kind} × {number(n, 6)}" for kind, n in types.items())
        notes = strings(quant[name], "fallbacks")
        if notes:
            words += f"; {len(notes)} tensors fell back, for instance: {clipped(notes[0], 160)}"
        title = f"Tensor types of {name}"
        svg = stacked_bar(f"tensors-{len(shown)}", title, parts, "matrices")
        shown.append({"type": name, "svg": svg, "words": words})
    return shown, [(i % COLOURS, kind) for i, kind in enumerate(kinds)]


def data_section(files: RunFiles) -> dict[str, Any]:
    """Row counts, the data gate and what was quarantined, by reason."""
    if not files.ran("data"):
        return {}
    gate = files.json("data", "gate.json")
    facts = {**table(files.record("data"), "meta"), **files.json("data", "summary.json")}
    return {
        "facts": [
            {"name": name.replace("_", " "), "value": _fact(name, value)}
            for name, value in sorted(facts.items())
            if finite(value) is not None or (name.endswith("_bands") and isinstance(value, dict))
        ],
        **_passed(gate.get("passed"), "passed", "failed"),
        "reasons": strings(gate, "reasons"),
        **_gate_table(rows(gate, "verdicts")),
        "quarantine": _quarantine(files.lines("data", "quarantine.jsonl")),
        "docs": docs_link(files),
        "rewards": reward_gate(files),
    }


def _gate_table(verdicts: list[dict[str, Any]]) -> dict[str, Any]:
    """One line for each check, one column for each set of rows it was made on."""
    suites = [str(verdict.get("suite", "")) for verdict in verdicts]
    cells: dict[str, dict[str, dict[str, str]]] = {}
    for suite, verdict in zip(suites, verdicts, strict=True):
        for check in rows(verdict, "checks"):
            name = " · ".join(str(check[k]) for k in ("code", "column") if check.get(k))
            found = clipped(str(check.get("error") or _observed(check)), 120)
            cells.setdefault(name, {})[suite] = {
                "found": found,
                **_passed(check.get("passed"), "passed", "failed"),
            }
    none = {"found": "", "verdict": "not made", "tone": "calm"}
    checks = [
        {"name": name, "cells": [by_suite.get(suite, none) for suite in suites]}
        for name, by_suite in cells.items()
    ]
    return {"suites": suites, "checks": checks}


def _fact(name: str, value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{band} {number(value[band], 6)}" for band in ordered_bands(value))
    return percent(value) if name.endswith("_share") else number(value, 6)


def _observed(check: dict[str, Any]) -> str:
    failing = finite(check.get("unexpected_count"))
    if failing:
        return f"{failing:,.0f} rows fail"
    observed = check.get("observed")
    return number(observed, 6) if finite(observed) is not None else ""


def _quarantine(lines: list[dict[str, Any]]) -> list[dict[str, str]]:
    """Rows set aside, counted by the short name their reason begins with; the most frequent first.

    The first row of each kind is the example.
    """
    by_code: dict[str, list[dict[str, Any]]] = {}
    for line in lines:
        code = str(line.get("reason") or "no reason").partition(":")[0]
        by_code.setdefault(code, []).append(line)
    ordered = sorted(by_code.items(), key=lambda item: (-len(item[1]), item[0]))
    return [
        {"reason": code, "count": number(len(found), 6), "example": _example(found[0])}
        for code, found in ordered
    ]


def _example(line: dict[str, Any]) -> str:
    where = f"line {line['line']}" if line.get("line") is not None else ""
    parts = [str(line.get("row_id") or ""), where, str(line.get("reason") or "")]
    return clipped(" · ".join(filter(None, parts)), 160)
