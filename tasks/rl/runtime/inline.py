"""Generator and learner in this process, in turns: deterministic on CPU."""

from collections.abc import Sequence
from pathlib import Path

from configs.schema import PipelineConfig
from tasks.environments.row import Row
from tasks.rl.learner import Learner, StepReport
from tasks.rl.prompt_queue import Ticket
from tasks.rl.rollout_worker import Harvest, RolloutWorker
from tasks.rl.sentinel import ProbeResult
from tasks.rl.types import Group
from tasks.rl.weight_sync import Receipt, SyncProof
from tasks.sampling.types import Rollout


class InlineRuntimeDriver:
    """`Runtime` without any concurrency: a call is finished when it returns."""

    workers = 1
    shares_device = True

    def __init__(
        self, config: PipelineConfig, snapshot: Path, snapshot_sha256: str, rows: Sequence[Row]
    ) -> None:
        self._arguments = (config, snapshot, snapshot_sha256, rows)

    async def start(self) -> None:
        """Load both sides."""
        config, snapshot, sha256, rows = self._arguments
        self._learner = Learner(config, snapshot, sha256, rows, threads=config.rl.deepspeed.threads)
        self._worker = RolloutWorker(config, snapshot, rows)

    async def play(
        self, worker: int, tickets: Sequence[Ticket], samples: int, temperature: float
    ) -> Harvest:
        """Sample episodes."""
        return self._worker.play(tickets, samples, temperature)

    async def grade(self, worker: int, rollouts: Sequence[Rollout]) -> list[Group]:
        """Grade episodes."""
        return self._worker.grade(rollouts)

    async def probe(self, worker: int) -> list[ProbeResult]:
        """Known-answer probes."""
        return self._worker.probe()

    async def sync(self, worker: int, receipt: Receipt) -> SyncProof:
        """Load and prove weights."""
        return self._worker.sync(receipt)

    async def train(self, groups: Sequence[Group], kl_coefficient: float) -> StepReport:
        """One optimiser step."""
        return self._learner.train(groups, kl_coefficient)

    async def publish(self, root: Path, attempt: int) -> Receipt:
        """Write weights."""
        return self._learner.publish(root, attempt)

    async def save(self, folder: Path) -> dict[str, str]:
        """Write the learner's state."""
        return self._learner.save(folder)

    async def load(self, folder: Path, steps_taken: int) -> dict[str, str]:
        """Read the learner's state."""
        return self._learner.load(folder, steps_taken)

    async def save_policy(self, out_dir: Path) -> str:
        """Write the merged policy."""
        return self._learner.save_policy(out_dir)

    async def stop(self) -> None:
        """Nothing runs on its own here."""
