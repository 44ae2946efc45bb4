"""Where the time and the money went: the RL ledger, the stages, the price of a sample."""

from collections.abc import Sequence
from typing import Any

from flows.report.charts import COLOURS, Part, stacked_bar
from flows.report.data import RunFiles, table
from flows.report.text import UNKNOWN, dollars, duration, finite, number, percent, short_hash
from tasks.stages import STAGES

_STATES = (
    "rollout",
    "train",
    "grade",
    "sync",
    "checkpoint",
    "startup",
    "idle",
    "dropped",
    "filtered",
)
_FACTS = {
    "usd": "Cost of RL",
    "usd_per_effective_sample": "Per effective sample",
    "usd_per_device_hour": "Price of a slot-hour",
    "device_s": "Slot time",
    "effective_samples": "Effective samples",
    "dropped_share": "Samples dropped",
    "filtered_share": "Samples filtered",
    "modelled_s": "These samples, as modelled",
    "modelled_synchronous_s": "The same with η = 0, as modelled",
}


def cost_section(files: RunFiles) -> dict[str, Any]:
    """Bars of time, the books' balance, prices, and the table of stages."""
    ledger = files.json("rl", "ledger.json")
    balance = table(files.json("rl", "summary.json"), "ledger")
    bars = [_ledger_bar(ledger, balance), _use_bar(files), _stage_bar(files)]
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
    return _ordered(totals, _STATES)


def _ordered(seconds: dict[str, float], known: Sequence[str]) -> dict[str, float]:
    """Known names in their order, then the others, sorted."""
    names = [n for n in known if n in seconds] + sorted(set(seconds) - set(known))
    return {name: seconds[name] for name in names}


def _ledger_bar(ledger: dict[str, Any], balance: dict[str, Any]) -> dict[str, Any] | None:
    totals = seconds_by_state(ledger)
    measured = sum(totals.values())
    if not measured:
        return None
    slots = len(table(ledger, "seconds"))
    return {
        **_bar("ledger", "RL: what every placement slot did", totals, _STATES),
        "total": f"{duration(measured)} over {slots} {'slot' if slots == 1 else 'slots'}",
        "note": _balance(balance),
    }


def _balance(balance: dict[str, Any]) -> str:
    wall_s, slots = finite(balance.get("wall_s")), finite(balance.get("slots"))
    miss = finite(balance.get("miss_share"))
    if wall_s is None or slots is None or miss is None:
        return "The stage left no balance, so the books cannot be checked against wall-clock."
    verdict = "the books balance" if balance.get("balanced") is True else "the books do not balance"
    return (
        f"Wall-clock × slots is {duration(wall_s * slots)}; the measured states miss it by "
        f"{percent(miss, 2)}: {verdict}."
    )


def _use_bar(files: RunFiles) -> dict[str, Any] | None:
    """The same seconds by what they bought: rollouts never trained on stand apart."""
    uses = table(files.summary, "cost", "seconds_by_use")
    seconds = {str(use): known for use, s in uses.items() if (known := finite(s))}
    if not seconds:
        return None
    return {
        **_bar("uses", "RL: what the time went into", _ordered(seconds, _STATES), _STATES),
        "total": dollars(table(files.summary, "cost").get("usd")),
        "note": "Dropped: sampled, then too old to train on. Filtered: groups that teach nothing.",
    }


def _bar(key: str, title: str, seconds: dict[str, float], known: Sequence[str]) -> dict[str, Any]:
    """A bar and its legend; a name has the same colour in every bar over the same `known` names."""
    total = sum(seconds.values())
    others = [name for name in seconds if name not in known]
    colour = {name: i % COLOURS for i, name in enumerate([*known, *others])}
    parts = [Part(name, value, colour[name]) for name, value in seconds.items()]
    return {
        "title": title,
        "svg": stacked_bar(key, title, parts, "s"),
        "legend": [
            (colour[name], f"{name} {duration(value)} ({percent(value / total)})")
            for name, value in seconds.items()
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
        **_bar("stages", "The run: wall-clock by stage", ordered, tuple(STAGES)),
        "total": f"{duration(total)} in all" if total else "",
        "note": "",
    }


def _facts(cost: dict[str, Any]) -> list[dict[str, str]]:
    shown = []
    names = [*_FACTS, *sorted(set(cost) - set(_FACTS))]
    for name in names:
        value = cost.get(name)
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
        shown.append({"name": _FACTS.get(name, name.replace("_", " ")), "value": text})
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
