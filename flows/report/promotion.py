"""What was decided of the release, and the comparison with the champion that decided it."""

from typing import Any

from flows.report.data import RunFiles, table
from flows.report.text import UNKNOWN, interval, number, percent, points, short_hash

_TONES = {"promoted": "good", "champion already": "good", "waiting": "plain", "candidate": "bad"}


def promotion_section(files: RunFiles) -> dict[str, Any] | None:
    """Outcome, reason and figures; None where nothing was decided, as before packaging."""
    decided = table(files.summary, "promotion")
    if not decided:
        return None
    evidence = table(decided, "evidence")
    outcome = str(decided.get("outcome") or "unknown")
    return {
        "name": f"{decided.get('model') or '?'} v{decided.get('version') or '?'}",
        "outcome": outcome,
        "tone": _TONES.get(outcome, "bad"),
        "reason": str(decided.get("reason") or "no reason was recorded"),
        "aliases_wait": decided.get("aliases") == "pending",
        "facts": _facts(evidence),
    }


def _facts(evidence: dict[str, Any]) -> list[tuple[str, str]]:
    """What the decision stood on, each fact where it is known."""
    shown = {
        "Candidate, quantised": percent(evidence.get("candidate_accuracy")),
        "Champion, quantised": percent(evidence.get("champion_accuracy")),
        "Candidate minus champion": points(evidence.get("delta")),
        "95 % interval": interval(evidence.get("ci95")),
        "May be lower by": points(evidence.get("margin")),
        "Held-out problems, paired": number(evidence.get("problems")),
        "Champion's bundle": short_hash(evidence.get("champion")),
    }
    facts = [(name, value) for name, value in shown.items() if UNKNOWN not in value]
    if until := evidence.get("approve_by"):
        facts.append(("To be approved by", str(until)))
    return facts
