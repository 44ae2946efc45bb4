"""One row of a look at something: what was looked at, how it stands, what to do."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

Status = Literal["pass", "warn", "fail", "open"]
"""`open`: there is nothing to look at yet, so neither passed nor failed."""


@dataclass(frozen=True)
class Finding:
    """`remedy` is empty where nothing is to do."""

    name: str
    status: Status
    looked_at: str
    """What was measured or compared, with the values found."""
    remedy: str = ""


def worst(findings: Iterable[Finding]) -> Status:
    """The worst status among `findings`; none at all is a pass."""
    statuses = {finding.status for finding in findings}
    if "fail" in statuses:
        return "fail"
    return "warn" if "warn" in statuses else "pass"
