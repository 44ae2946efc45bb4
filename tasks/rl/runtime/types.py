"""What the loop asks of wherever generator and learner run."""

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from tasks.rl.learner import StepReport
from tasks.rl.prompt_queue import Ticket
from tasks.rl.rollout_worker import Harvest
from tasks.rl.sentinel import ProbeResult
from tasks.rl.types import Group
from tasks.rl.weight_sync import Receipt, SyncProof
from tasks.sampling.types import Rollout


class Runtime(Protocol):
    """Rollout workers 0…N−1 and one learner; every call may take long and is awaited.

    `play`, `grade` and `probe` of one worker may run many at a time. Any call to a worker raises
    `WorkerLostError` where the worker died, any call to the learner `LearnerLostError`.
    """

    @property
    def workers(self) -> int:
        """How many rollout workers there are."""
        ...

    @property
    def shares_device(self) -> bool:
        """True = generator and learner take turns on one device, so nobody is ever idle."""
        ...

    async def start(self) -> None:
        """Bring everything up."""
        ...

    async def play(
        self, worker: int, tickets: Sequence[Ticket], samples: int, temperature: float
    ) -> Harvest:
        """Sample episodes; returns when those of these tickets are done, whoever else plays."""
        ...

    async def grade(self, worker: int, rollouts: Sequence[Rollout]) -> list[Group]:
        """Grade episodes."""
        ...

    async def probe(self, worker: int) -> list[ProbeResult]:
        """Have the grader answer known-answer probes."""
        ...

    async def sync(self, worker: int, receipt: Receipt) -> SyncProof:
        """Give a worker published weights and prove them; may come while episodes are played,
        which then go on as `rl.engine.on_publish` says."""
        ...

    async def revive(self, worker: int) -> None:
        """Replace a worker that was lost; the new one holds the snapshot's weights, unproven."""
        ...

    async def train(
        self,
        groups: Sequence[Group],
        kl_coefficient: float,
        lr_scale: float = 1.0,
        tightness: float = 1.0,
    ) -> StepReport:
        """Train on one batch, with the learning rate of each optimiser step times `lr_scale` and
        the bounds of the loss times `tightness`."""
        ...

    async def publish(self, root: Path, attempt: int) -> Receipt:
        """Write the learner's weights for the workers."""
        ...

    async def save(self, folder: Path) -> dict[str, str]:
        """Write the learner's state."""
        ...

    async def load(self, folder: Path, steps_taken: int) -> dict[str, str]:
        """Read the learner's state."""
        ...

    async def save_policy(self, out_dir: Path) -> str:
        """Write the merged policy; returns its hash."""
        ...

    async def stop(self) -> None:
        """Take everything down."""
        ...
