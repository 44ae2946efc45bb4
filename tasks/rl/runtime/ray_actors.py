"""What runs in Ray's processes: a rollout worker, a learner rank, a grader.

Each begins in a call of its own, not in its constructor: what goes wrong there reaches the driver
as the error it is.
"""

import os
import shutil
import socket
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from configs.schema import PipelineConfig
from tasks.environments.row import Row
from tasks.models.ranks import RankGroup
from tasks.rl.errors import EngineUnavailableError
from tasks.rl.grader import Grader
from tasks.rl.learner import Learner, StepReport
from tasks.rl.prompt_queue import Ticket
from tasks.rl.rollout_worker import Harvest, RolloutWorker, grade_groups
from tasks.rl.runtime.ray_freight import Depot, Parcel
from tasks.rl.sentinel import ProbeResult
from tasks.rl.types import Group
from tasks.rl.weight_sync import Receipt, SyncProof
from tasks.sampling.types import Rollout

KEPT_PUBLISHES = 2
"""Copies of publishes on a machine that does not share the driver's disk."""
CANARY_ROWS = 64
COLLECTIVE_INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "TP_SOCKET_IFNAME")


@dataclass(frozen=True)
class Briefing:
    """What every process needs to begin."""

    config: PipelineConfig
    rows: tuple[Row, ...]
    snapshot: Path
    snapshot_sha256: str
    parcel: Parcel | None
    """The snapshot's files, for who does not share the driver's disk."""
    seen: Path
    """The driver's beacon."""


class RolloutActor:
    """One rollout worker; a Ray actor of coroutines, so plays, grading and a sync overlap."""

    def __init__(self) -> None:
        self._copies: deque[Path] = deque()

    async def begin(self, briefing: Briefing, threads: int) -> bool:
        """Load the engine; returns whether this machine shares the driver's disk."""
        self._depot = Depot(briefing.seen)
        snapshot = self._depot.incoming(briefing.snapshot, briefing.parcel)
        self._worker = RolloutWorker(briefing.config, snapshot, briefing.rows, threads=threads)
        return self._depot.shared

    async def play(self, tickets: Sequence[Ticket], samples: int, temperature: float) -> Harvest:
        """Sample episodes."""
        return await self._worker.play(tickets, samples, temperature)

    async def grade(self, rollouts: Sequence[Rollout]) -> list[Group]:
        """Grade episodes."""
        return self._worker.grade(rollouts)

    async def probe(self) -> list[ProbeResult]:
        """Known-answer probes."""
        return self._worker.probe()

    async def sync(self, receipt: Receipt, parcel: Parcel | None) -> SyncProof:
        """Load and prove weights; they come in `parcel` where the learner's disk is another."""
        if parcel is not None:
            copy = self._depot.incoming(receipt.folder, parcel)
            receipt = replace(receipt, folder=copy)
            self._copies.append(copy)
        proof = await self._worker.sync(receipt)
        while len(self._copies) > KEPT_PUBLISHES:
            shutil.rmtree(self._copies.popleft(), ignore_errors=True)
        return proof

    async def close(self) -> None:
        """End the engine's own processes, where it has any."""
        await self._worker.close()


class GraderActor:
    """A grader in a process of its own."""

    def __init__(self, config: PipelineConfig, rows: Sequence[Row]) -> None:
        self._grader = Grader({row.id: row for row in rows}, config.rl.reward)

    def grade(self, rollouts: Sequence[Rollout]) -> list[Group]:
        """Grade episodes."""
        return grade_groups(self._grader, rollouts)

    def probe(self) -> list[ProbeResult]:
        """Known-answer probes."""
        return self._grader.probes()


class LearnerActor:
    """One rank of the learner. Every rank gets the same calls, in the same order."""

    def rendezvous(self) -> tuple[str, int]:
        """An address and a free port of this machine where the ranks can meet."""
        address = _node_address()
        with socket.create_server((address, 0)) as server:
            return address, server.getsockname()[1]

    def begin(self, briefing: Briefing, threads: int, group: RankGroup | None) -> bool:
        """Load the rank; returns whether this machine shares the driver's disk."""
        self._depot = Depot(briefing.seen)
        if group is not None:
            interface = interface_of(_node_address())
            os.environ.update(dict.fromkeys(COLLECTIVE_INTERFACES, interface))
        self._learner = Learner(
            briefing.config,
            self._depot.incoming(briefing.snapshot, briefing.parcel),
            briefing.snapshot_sha256,
            briefing.rows[:CANARY_ROWS],
            threads=threads,
            group=group,
        )
        return self._depot.shared

    def train(
        self, groups: Sequence[Group], kl_coefficient: float, lr_scale: float, tightness: float
    ) -> StepReport:
        """Train on one batch."""
        return self._learner.train(groups, kl_coefficient, lr_scale, tightness)

    def publish(self, root: Path, attempt: int) -> tuple[Receipt | None, Parcel | None]:
        """Write weights; the first rank gives the receipt, and its files where they lie apart."""
        receipt = self._learner.publish(self._depot.outgoing(root), attempt)
        return receipt, None if receipt is None else self._depot.parcel(receipt.folder)

    def save(self, folder: Path) -> tuple[dict[str, str], Parcel | None]:
        """Write this rank's state."""
        written = self._depot.outgoing(folder)
        hashes = self._learner.save(written)
        return hashes, self._depot.parcel(written)

    def load(self, folder: Path, steps_taken: int, parcel: Parcel | None) -> dict[str, str]:
        """Read this rank's state."""
        return self._learner.load(self._depot.incoming(folder, parcel), steps_taken)

    def save_policy(self, out_dir: Path) -> tuple[str | None, Parcel | None]:
        """Write the merged policy; the first rank gives its hash."""
        written = self._depot.outgoing(out_dir)
        sha256 = self._learner.save_policy(written)
        return sha256, None if sha256 is None else self._depot.parcel(written)


def _node_address() -> str:
    import ray

    return str(ray.util.get_node_ip_address())


def interface_of(address: str) -> str:
    """Name of the network interface that has `address`.

    Raises:
        EngineUnavailableError: none has; ranks could not reach each other.
    """
    import psutil

    interfaces = psutil.net_if_addrs()
    for name, addresses in interfaces.items():
        if any(a.address == address for a in addresses):
            return name
    raise EngineUnavailableError(
        f"this Ray node calls itself {address}, which none of {', '.join(interfaces)} here has; "
        "start it with --node-ip-address of one that the other nodes reach"
    )
