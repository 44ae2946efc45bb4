"""The reward gate: each cycle's batch against a Great Expectations suite, beside the step.

Validation runs in a thread of its own with a context of its own; the loop hands a batch over before
it trains on it and takes the verdict after. Inside the step only the sentinel's own arithmetic
guards. A verdict for every cycle stands in `reward_gate.jsonl`; a resumed run goes on with the
verdicts of the steps it goes on from.
"""

import importlib
import math
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from configs.schema.rl import RewardGateConfig, RLConfig
from tasks.artifacts import write_jsonl
from tasks.artifacts.append_log import locked_log, read_log
from tasks.gates.rewards import RewardLimits, gate_rewards
from tasks.gates.verdict import GateVerdict
from tasks.rl.errors import RewardGateError

FILE_NAME = "reward_gate.jsonl"


def reward_limits(config: RLConfig) -> RewardLimits:
    """The suite's bounds; outcomes lie in [0, 1] and a batch has all its samples."""
    gate = config.reward_gate
    return RewardLimits(
        floor=0.0,
        ceiling=1.0,
        min_rows=config.batch_size,
        max_missing_share=gate.max_missing_share,
        min_mean=gate.min_mean,
        max_mean=gate.max_mean,
        min_std=gate.min_std,
        max_saturated_share=gate.max_saturated_share,
    )


class RewardGate:
    """Verdicts on the batches of one run, over all its attempts."""

    def __init__(self, config: RLConfig, folder: Path) -> None:
        self._rule: RewardGateConfig = config.reward_gate
        self._limits = reward_limits(config)
        self._path = folder / FILE_NAME
        # here and not in the thread: while that imports, the engines start and import too, and two
        # threads deep in imports that cross can wait for each other for ever
        importlib.import_module("great_expectations.expectations")
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="reward-gate")
        self._pending: list[Future[dict[str, Any]]] = []
        self._lines: list[dict[str, Any]] = []

    def resume(self, step: int) -> None:
        """Go on from the verdicts up to `step`; later ones are of a dead attempt."""
        kept = [line for line in read_log(self._path).rows if int(line["step"]) <= step]
        write_jsonl(self._path, kept)
        self._lines = kept

    def submit(self, step: int, outcomes: Sequence[float | None], names: Sequence[str]) -> None:
        """Hand over the batch that step `step` is about to train on; returns at once."""
        self._pending.append(self._thread.submit(self._judge, step, list(outcomes), list(names)))

    def _judge(self, step: int, outcomes: list[float | None], names: list[str]) -> dict[str, Any]:
        return gate_line(step, gate_rewards(outcomes, self._limits, names), outcomes)

    def settle(self) -> dict[str, float]:
        """Wait for the verdicts asked for, write them down, and return the newest as metrics."""
        new = [future.result() for future in self._pending]
        self._pending = []
        if not new:
            return {}
        with locked_log(self._path) as log:
            for line in new:
                log.append(line)
        self._lines += new
        newest = new[-1]
        return {
            "reward_gate_passed": float(newest["passed"]),
            "reward_gate_failed_checks": float(len(newest["failed"])),
        }

    @property
    def failed_in_a_row(self) -> int:
        """Cycles since one passed."""
        passed = [bool(line["passed"]) for line in reversed(self._lines)]
        return passed.index(True) if True in passed else len(passed)

    def enforce(self) -> None:
        """Stop the run where the rule says so.

        Raises:
            RewardGateError: too many cycles in a row failed; the last checkpoint is intact.
        """
        most, count = self._rule.stop_after, self.failed_in_a_row
        if most is not None and count >= most:
            raise RewardGateError(
                f"rewards failed their gate {count} cycles in a row, up to step "
                f"{self._lines[-1]['step']}: {self._lines[-1]['why']}; look at {self._path}, mend "
                "the data or the verifier, or raise rl.reward_gate.stop_after"
            )

    def summary(self) -> dict[str, Any]:
        """How many cycles were judged and failed, and by which checks."""
        failed = [line for line in self._lines if not line["passed"]]
        codes = Counter(code for line in failed for code in line["failed"])
        return {
            "cycles": len(self._lines),
            "failed": len(failed),
            "codes": dict(sorted(codes.items())),
        }

    def close(self) -> None:
        """End the thread; a batch that no step trained on needs no verdict."""
        self._thread.shutdown(wait=True, cancel_futures=True)


def gate_line(step: int, verdict: GateVerdict, outcomes: Sequence[float | None]) -> dict[str, Any]:
    """One line of `reward_gate.jsonl`; unknown statistics are null."""
    scored = [o for o in outcomes if o is not None and not math.isnan(o)]
    observed = {
        check.code: check.observed
        for check in verdict.checks
        if isinstance(check.observed, int | float) and math.isfinite(check.observed)
    }
    return {
        "step": step,
        "passed": verdict.passed,
        "rows": verdict.evaluated_rows,
        "scored": len(scored),
        "failed": [check.code for check in verdict.failed_checks],
        "why": verdict.why(),
        "observed": observed,
        "seconds": round(verdict.seconds, 4),
    }
