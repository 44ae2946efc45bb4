"""When a candidate becomes the champion: rules over what the stages left; unknown never passes.

A figure that is NaN, infinite or missing is left out before anything is compared, and a release
that has one in what decides is not promoted (A21): a store may show a NaN as 0.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from flows.report.text import finite
from tasks.artifacts import ArtifactRecord
from tasks.tracking.promotion_ledger import LedgerState, Release

Outcome = Literal["promoted", "candidate", "waiting", "champion already"]
MAX_NAMED = 3


@dataclass(frozen=True)
class Judgement:
    """What the rules say of one release, and the figures they used."""

    passed: bool
    reason: str
    evidence: dict[str, Any] = field(default_factory=dict)


def not_finite(value: Any, at: str = "") -> list[str]:
    """Dotted paths of every NaN and infinity inside JSON data."""
    if isinstance(value, Mapping):
        return [p for k, v in value.items() for p in not_finite(v, f"{at}.{k}" if at else str(k))]
    if isinstance(value, list | tuple):
        return [p for i, v in enumerate(value) for p in not_finite(v, f"{at}[{i}]")]
    if isinstance(value, float) and not math.isfinite(value):
        return [at]
    return []


def gate_failures(records: Mapping[str, ArtifactRecord]) -> list[str]:
    """Every gate a release did not pass, in words: data, evaluation, its shipped quantisation.

    A gate that left no verdict did not pass.
    """
    failures = []
    for stage, name in (("data", "gate.json"), ("evaluation", "summary.json")):
        body, problem = _read(records.get(stage), stage, name)
        gate = body if stage == "data" else _mapping(body.get("gate"))
        if problem:
            failures.append(problem)
        elif gate.get("passed") is not True:
            reasons = gate.get("reasons")
            why = "; ".join(map(str, reasons)) if isinstance(reasons, list) else ""
            failures.append(f"the {stage} gate failed: {why or 'it left no verdict'}")
        elif stage == "evaluation" and (bad := not_finite(body)):
            failures.append(f"the evaluation has figures that are not finite: {_named(bad)}")
    return [*failures, *_quantisation_failures(records)]


def _quantisation_failures(records: Mapping[str, ArtifactRecord]) -> list[str]:
    """Why the bundle's default file may not ship."""
    package = records.get("package")
    default = package.meta.get("default") if package is not None else None
    body, problem = _read(records.get("quantize"), "quantize", "parity.json")
    if problem:
        return [problem]
    variant = _mapping(_mapping(body.get("quant")).get(str(default)))
    if variant.get("ships") is not True:
        why = variant.get("why") or "it is not among the judged ones"
        return [f"the default quantisation {default} does not ship: {why}"]
    if bad := not_finite(variant):
        return [f"the parity of {default} has figures that are not finite: {_named(bad)}"]
    return []


def _read(record: ArtifactRecord | None, stage: str, name: str) -> tuple[dict[str, Any], str]:
    """A JSON object a stage left, or why it cannot be read."""
    if record is None:
        return {}, f"there is no output of {stage}"
    path = record.path / name
    try:
        body = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        return {}, f"{path} cannot be read: {error}"
    if not isinstance(body, dict):
        return {}, f"{path} holds no JSON object"
    return body, ""


def _mapping(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _named(paths: list[str]) -> str:
    more = f" and {len(paths) - MAX_NAMED} more" if len(paths) > MAX_NAMED else ""
    return ", ".join(paths[:MAX_NAMED]) + more


def judge_challenge(result: Mapping[str, Any], champion: Release, margin: float) -> Judgement:
    """Candidate against champion: the lower end of the paired interval may not be under −margin.

    Args:
        result: `challenge.json`.
        champion: whom the candidate met.
        margin: `promotion.margin`.
    """
    delta = _mapping(result.get("delta"))
    ends = delta.get("ci95")
    low, high = (
        (finite(ends[0]), finite(ends[1]))
        if isinstance(ends, list | tuple) and len(ends) == 2
        else (None, None)
    )
    value = finite(delta.get("value"))
    problems = result.get("problems")
    sides = {side: _mapping(result.get(side)) for side in ("candidate", "champion")}
    evidence = {
        "champion": champion.bundle_sha256,
        "champion_version": champion.version,
        "problems": problems if isinstance(problems, int) else None,
        "candidate_accuracy": finite(sides["candidate"].get("accuracy")),
        "champion_accuracy": finite(sides["champion"].get("accuracy")),
        "delta": value,
        "ci95": [low, high],
        "margin": margin,
        "heldout_sha256": result.get("heldout_sha256"),
    }
    if low is None or high is None or value is None or not evidence["problems"]:
        return Judgement(
            False, f"the comparison with {champion.name} has no finite result", evidence
        )
    wanted = f"the lower end must be at least {0.0 - margin:+.4f} (promotion.margin={margin:g})"
    told = (
        f"accuracy minus that of {champion.name} after quantisation is {value:+.4f}, 95 % interval "
        f"[{low:+.4f}, {high:+.4f}], on {problems} held-out problems; {wanted}"
    )
    return Judgement(low >= -margin, told, evidence)


def held_back(state: LedgerState, release: Release) -> str | None:
    """Why this release may not be promoted without a person, whatever it scores; None if it may."""
    if release.bundle_sha256 not in state.withdrawn:
        return None
    entry = state.latest[release.bundle_sha256]
    if entry.action == "reject":
        return f"rejected by {entry.actor} on {entry.time[:10]}: {entry.reason}"
    return (
        f"{release.model} v{entry.release.version} was rolled back earlier; only a person promotes "
        "it again: rl-pipeline promote"
    )


def objection(state: LedgerState, release: Release) -> str | None:
    """Why a person should not promote this release without `--force`; None where nothing is said.

    A release that was champion before may come back. Any other one has to have met the champion
    of now and held its own.
    """
    if failures := gate_failures(release.records):
        return "; ".join(failures)
    champion, sha256 = state.champion, release.bundle_sha256
    if champion is None or sha256 in state.served:
        return None
    latest = state.latest.get(sha256)
    if latest is None or latest.evidence.get("champion") != champion.bundle_sha256:
        return (
            f"it has not been compared with {champion.name}, the champion of now; run its profile "
            "again: finished stages are reused and the comparison is made"
        )
    return None if latest.evidence.get("passed") is True else latest.reason
