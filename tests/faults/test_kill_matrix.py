"""kill -9 of every process in every stage: a terminal state, a resume, nothing lost, nobody left.

The micro profile is deterministic, so a resumed stage must give the very hash of a run that was
never killed.
"""

import time
from dataclasses import dataclass, field

import psutil
import pytest
from living_checkout import Checkout, alive, checkout, kill

from tasks.artifacts.store import finished_outputs
from tests.figures.record import record

PAIRS = (
    ("flow", "data"),
    ("worker", "sft"),
    ("child", "rl"),
    ("all", "rl"),
    ("mlflow", "evaluation"),
    ("prefect", "quantize"),
    ("all", "package"),
    ("child", "package"),
)
"""Every process and every stage is killed; RL also with everything at once."""
PROFILE = {"profile": "micro"}
START_S, TERMINAL_S, GONE_S, RESUME_S = 240.0, 300.0, 60.0, 600.0
REPEATABLE = frozenset({"data", "sft", "rl", "quantize"})
"""Stages whose hash depends on nothing but content; others name the run that made them."""


@dataclass
class Outcome:
    """What became of one pair."""

    victim: str
    stage: str
    terminal: str = ""
    resumed: str = ""
    problems: list[str] = field(default_factory=list)

    @property
    def good(self) -> bool:
        """Whether all that was asked holds."""
        return not self.problems

    def __str__(self) -> str:
        ends = f"{self.victim} in {self.stage}: {self.terminal}, resumed {self.resumed}"
        return f"{ends}{'; ' + '; '.join(self.problems) if self.problems else ''}"


def victims(living: Checkout, victim: str, stage: str) -> list[psutil.Process]:
    """Whom to kill."""
    if victim == "all":
        return living.tree()
    found = {
        "child": lambda: living.stage_process(stage),
        "flow": living.flow_process,
    }.get(victim, lambda: living.service(victim))()
    return [found] if found is not None else []


def wait_for_stage(living: Checkout, stage: str) -> bool:
    """Whether the stage's process came up in time."""
    deadline_s = time.monotonic() + START_S
    while time.monotonic() < deadline_s:
        if living.stage_process(stage) is not None:
            return True
        time.sleep(0.1)
    return False


def kill_and_resume(living: Checkout, victim: str, stage: str, reference: dict) -> Outcome:
    """One pair of the matrix."""
    outcome = Outcome(victim, stage)
    flow_run = living.start(**PROFILE, force=[stage], stop_after=stage)
    if not wait_for_stage(living, stage):
        outcome.problems.append(f"the stage did not start: {living.state_of(flow_run)}")
        return outcome
    if stage in ("sft", "rl", "evaluation"):
        time.sleep(2.0)  # into the work, past the imports
    before = [p for p in living.tree() if victim == "all" or p.pid not in _service_pids(living)]
    doomed = victims(living, victim, stage)
    if not doomed:
        outcome.problems.append("there was no such process to kill")
    kill(doomed)
    living.require_up()  # what a person, or systemd after a reboot, does next
    outcome.terminal = living.wait(flow_run, TERMINAL_S)
    if outcome.terminal not in ("COMPLETED", "FAILED", "CRASHED", "CANCELLED"):
        outcome.problems.append("no terminal state in time")
    _resume(living, stage, outcome)
    _check_gone(before, outcome)
    _check_artefacts(living, stage, reference, outcome)
    return outcome


def _service_pids(living: Checkout) -> set[int]:
    found = (living.service(name) for name in ("prefect", "mlflow", "worker"))
    return {p.pid for p in found if p is not None}


def _resume(living: Checkout, stage: str, outcome: Outcome) -> None:
    """The next run must get the slot and complete the stage."""
    again = living.start(**PROFILE, stop_after=stage)
    outcome.resumed = living.wait(again, RESUME_S)
    if outcome.resumed != "COMPLETED":
        outcome.problems.append(f"the next run ended {outcome.resumed or 'nowhere'}")


def _check_gone(before: list[psutil.Process], outcome: Outcome) -> None:
    """Nothing of the killed run may live on; services that were not killed may."""
    deadline_s = time.monotonic() + GONE_S
    while (left := [c for c in alive(before) if "stage_process" in c or "engine" in c]) and (
        time.monotonic() < deadline_s
    ):
        time.sleep(0.5)
    outcome.problems += [f"still alive: {line[:80]}" for line in left]


def _check_artefacts(living: Checkout, stage: str, reference: dict, outcome: Outcome) -> None:
    """Every finished output is whole, and the resumed stage is what it would have been."""
    for folder, _ in finished_outputs(living.runs / "store"):
        verdict = folder.verify()
        if verdict.finished is None:
            outcome.problems.append(f"{folder.stage}: {verdict.reason}")
    made = living.records().get(stage, {}).get("sha256")
    if made is None:
        outcome.problems.append("the resumed run left no record of the stage")
    elif stage in REPEATABLE and made != reference[stage]["sha256"]:
        outcome.problems.append("the resumed stage differs from the one never killed")


@pytest.mark.faults
@pytest.mark.figure("kill_matrix")
@pytest.mark.timeout(5400)
def test_every_process_is_killed_in_some_stage_and_every_stage_resumes(tmp_path):
    with checkout(tmp_path) as living:
        assert living.wait(living.start(**PROFILE), RESUME_S) == "COMPLETED"
        reference = living.records()
        assert set(reference) >= {"data", "sft", "rl", "evaluation", "quantize", "package"}
        outcomes = [kill_and_resume(living, *pair, reference) for pair in PAIRS]
    for outcome in outcomes:
        print(outcome)
    good = sum(o.good for o in outcomes)
    bad = "; ".join(str(o) for o in outcomes if not o.good)
    record(
        "kill_matrix",
        value=good / len(outcomes),
        met=good == len(outcomes),
        note=bad or f"{len(outcomes)} pairs: {', '.join(f'{v} in {s}' for v, s in PAIRS)}",
        details={f"{o.victim} in {o.stage}": str(o) for o in outcomes},
    )
    assert good == len(outcomes), bad
