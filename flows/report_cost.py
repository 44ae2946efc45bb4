"""Where the time and the money went: the RL ledger, the stages, the price of a sample."""

from typing import Any

from flows.report_charts import Part, stacked_bar
from flows.report_data import STAGES, RunFiles, table
from flows.report_text import UNKNOWN, dollars, duration, finite, number, percent, short_hash

_STATES = ("rollout", "train", "grade", "sync", "checkpoint", "startup", "idle")
TOLERANCE = 0.01


def cost_section(files: RunFiles) -> dict[str, Any]:
    """Bars of time, the books' balance, prices, and the table of stages."""
    ledger = files.json("rl", "ledger.json")
    bars = [_ledger_bar(ledger), _stage_bar(files)]
    return {
        "bars": [bar for bar in bars if bar],
        "facts": _facts(table(files.summary, "cost")),
        "stages": _stages(files),
    }


def seconds_by_state(ledger: dict[str, Any]) -> dict[str, float]:
    """Slot-seconds by state over all slots, the known states first."""
    totals: dict[str, float] = {}
    for states in table(ledger, "seconds").values():
        for state, seconds in (states if isinstance(states, dict) else {}).items():
            known = finite(seconds)
            if known is not None:
                totals[state] = totals.get(state, 0.0) + known
    order = [s for s in _STATES if s in totals] + sorted(set(totals) - set(_STATES))
    return {state: totals[state] for state in order}


def _ledger_bar(ledger: dict[str, Any]) -> dict[str, Any] | None:
    totals = seconds_by_state(ledger)
    if not sum(totals.values()):
        return None
    measured = sum(totals.values())
    slots = len(table(ledger, "seconds"))
    return {
        **_bar("ledger", "RL: what every placement slot did", totals),
        "total": f"{duration(measured)} over {slots} slots",
        "note": _balance(finite(ledger.get("earlier_wall_s")), slots, measured),
    }


def _balance(wall_s: float | None, slots: int, measured: float) -> str:
    if not wall_s:
        return "The stage's wall-clock is not in the ledger, so the books cannot be balanced."
    miss = abs(measured - wall_s * slots) / (wall_s * slots)
    verdict = "the books balance" if miss <= TOLERANCE else "time is missing from the books"
    return (
        f"Wall-clock × slots is {duration(wall_s * slots)}; measured states are off by "
        f"{percent(miss, 2)}: {verdict} (limit {percent(TOLERANCE, 0)})."
    )


def _bar(key: str, title: str, seconds: dict[str, float]) -> dict[str, Any]:
    total = sum(seconds.values())
    parts = [Part(label, value) for label, value in seconds.items()]
    return {
        "title": title,
        "svg": stacked_bar(key, title, parts, "s"),
        "labels": [
            f"{label} {duration(value)} ({percent(value / total)})"
            for label, value in seconds.items()
        ],
    }


def _stage_bar(files: RunFiles) -> dict[str, Any] | None:
    seconds = {}
    for name, stage in table(files.summary, "stages").items():
        wall = finite(stage.get("wall_s")) if isinstance(stage, dict) else None
        if wall:
            seconds[name] = wall
    ordered = {
        n: seconds[n] for n in [*STAGES, *sorted(set(seconds) - set(STAGES))] if n in seconds
    }
    if not ordered:
        return None
    total = finite(files.summary.get("wall_s"))
    return {
        **_bar("stages", "The run: wall-clock by stage", ordered),
        "total": f"{duration(total)} in all" if total else "",
        "note": "",
    }


def _facts(cost: dict[str, Any]) -> list[dict[str, str]]:
    shown = []
    for name, value in sorted(cost.items()):
        if finite(value) is None:
            continue
        if "usd" in name:
            text = dollars(value)
        elif name.endswith("_share"):
            text = percent(value)
        elif name.endswith("_s"):
            text = duration(value)
        else:
            text = number(value, 6)
        shown.append({"name": name.replace("_", " "), "value": text})
    return shown


def _stages(files: RunFiles) -> list[dict[str, str]]:
    stages = table(files.summary, "stages")
    if not stages:
        return []
    shown = []
    for name in [*STAGES, *sorted(set(stages) - set(STAGES))]:
        stage = table(stages, name)
        cached = stage.get("cached")
        status = str(stage.get("status") or "not run")
        shown.append(
            {
                "name": name,
                "status": status.lower(),
                "tone": _tone(status.lower()),
                "cached": {True: "reused", False: "made"}.get(cached, UNKNOWN)
                if isinstance(cached, bool)
                else UNKNOWN,
                "wall": duration(stage.get("wall_s")),
                "sha": str(stage.get("output_sha256") or "not made"),
                "short": short_hash(stage.get("output_sha256")),
            }
        )
    return shown


def _tone(status: str) -> str:
    if status in ("completed", "ok", "cached", "hit", "reused", "succeeded"):
        return "good"
    return "bad" if status in ("failed", "crashed", "cancelled") else "warn"
