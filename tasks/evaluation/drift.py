"""Signs that a policy games its reward: pure comparisons for a person to follow up.

None of them proves anything alone; an alarm says which transcripts to read.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from configs.schema.evaluation import DriftAlarms

LAST_STEPS = 10
"""Training accuracy is the mean over this many last optimiser steps."""


def train_accuracy(values: Sequence[float | None]) -> float | None:
    """Mean of the last known accuracies on training groups; None where none is known."""
    known = [v for v in values if v is not None and math.isfinite(v)][-LAST_STEPS:]
    return sum(known) / len(known) if known else None


def drift_signs(
    alarms: DriftAlarms,
    snapshot: Mapping[str, Any],
    policy: Mapping[str, Any],
    trained_accuracy: float | None,
) -> list[dict[str, Any]]:
    """`{name, value, limit, passed}` for each sign; unknown values are null and do not pass.

    Args:
        alarms: the limits.
        snapshot: metrics of the snapshot, as `metrics.evaluate` gives them.
        policy: metrics of the policy.
        trained_accuracy: accuracy on training groups at the end of RL.
    """
    before, after = snapshot["lengths"]["mean"], policy["lengths"]["mean"]
    ratio = after / before if before else None
    longer = None if not ratio else max(ratio, 1 / ratio)
    drop = snapshot["format_share"] - policy["format_share"]
    gap = None if trained_accuracy is None else trained_accuracy - policy["accuracy"]
    return [
        _sign("answer length, times longer or shorter", longer, alarms.max_length_ratio),
        _sign("answers that can be read, share lost", drop, alarms.max_format_drop),
        _sign("training accuracy above held-out", gap, alarms.max_train_heldout_gap),
    ]


def _sign(name: str, value: float | None, limit: float) -> dict[str, Any]:
    known = value is not None and math.isfinite(value)
    passed = value is not None and known and value <= limit
    return {"name": name, "value": value if known else None, "limit": limit, "passed": passed}
