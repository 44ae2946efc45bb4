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
        self._started: list[RolloutWorker] = []

    async def start(self) -> None:
        """Load both sides."""
        config, snapshot, sha256, rows = self._arguments
        self._learner = Learner(config, snapshot, sha256, rows, threads=config.rl.deepspeed.threads)
        self._started.append(RolloutWorker(config, snapshot, rows))

    @property
    def _worker(self) -> RolloutWorker:
        return self._started[-1]

    async def play(
        self, worker: int, tickets: Sequence[Ticket], samples: int, temperature: float
    ) -> Harvest:
        """Sample episodes."""
        return await self._worker.play(tickets, samples, temperature)

    async def grade(self, worker: int, rollouts: Sequence[Rollout]) -> list[Group]:
        """Grade episodes."""
        return self._worker.grade(rollouts)

    async def probe(self, worker: int) -> list[ProbeResult]:
        """Known-answer probes."""
        return self._worker.probe()

    async def sync(self, worker: int, receipt: Receipt) -> SyncProof:
        """Load and prove weights."""
        return await self._worker.sync(receipt)

    async def revive(self, worker: int) -> None:
        """Load another worker; this process outlives none, but one may have hung."""
        config, snapshot, _, rows = self._arguments
        await self._started.pop().close()
        self._started.append(RolloutWorker(config, snapshot, rows))

    async def train(
        self,
        groups: Sequence[Group],
        kl_coefficient: float,
        lr_scale: float = 1.0,
        tightness: float = 1.0,
    ) -> StepReport:
        """Train on one batch."""
        async with self._worker.resting():
            return self._learner.train(groups, kl_coefficient, lr_scale, tightness)

    async def publish(self, root: Path, attempt: int) -> Receipt:
        """Write weights."""
        receipt = self._learner.publish(root, attempt)
        assert receipt is not None  # the only rank is the first
        return receipt

    async def save(self, folder: Path) -> dict[str, str]:
        """Write the learner's state."""
        return self._learner.save(folder)

    async def load(self, folder: Path, steps_taken: int) -> dict[str, str]:
        """Read the learner's state."""
        return self._learner.load(folder, steps_taken)

    async def save_policy(self, out_dir: Path) -> str:
        """Write the merged policy."""
        sha256 = self._learner.save_policy(out_dir)
        assert sha256 is not None
        return sha256

    async def stop(self) -> None:
        """End what the workers started on their own."""
        for worker in self._started:
            await worker.close()
