"""Generator and learner as Ray actors: on this machine, or on a cluster the config names."""

import asyncio
import itertools
import logging
import os
from collections.abc import Awaitable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from configs.schema import PipelineConfig
from configs.schema.rl_runtimes import RayRuntime
from tasks.environments.row import Row
from tasks.models.ranks import RankGroup
from tasks.rl.errors import EngineUnavailableError, LearnerLostError, WorkerLostError
from tasks.rl.learner import StepReport
from tasks.rl.prompt_queue import Ticket
from tasks.rl.rollout_worker import Harvest
from tasks.rl.runtime import ray_cluster
from tasks.rl.runtime.ray_actors import Briefing, GraderActor, LearnerActor, RolloutActor
from tasks.rl.runtime.ray_freight import Parcel, beacon, pack, unpack
from tasks.rl.sentinel import ProbeResult
from tasks.rl.types import Group
from tasks.rl.weight_sync import Receipt, SyncProof
from tasks.sampling.errors import EngineDiedError
from tasks.sampling.types import PolicyVersion, Rollout

logger = logging.getLogger(__name__)
T = TypeVar("T")
ACTOR_ENVIRONMENT = (
    "DS_ACCELERATOR", "HF_HUB_OFFLINE", "TORCH_EXTENSIONS_DIR", "DO_NOT_TRACK", "PYTHONPATH",
)  # fmt: skip
PLAYS_AT_ONCE = 1000
"""Calls one rollout worker takes at a time; the admission rule allows far fewer."""
GRADER_RESTARTS = 3
CLOSE_TIMEOUT_S = 10.0
"""Time a rollout worker gets to end its engine before it is ended itself."""


class RayDriver:
    """`Runtime` over N rollout actors, M learner ranks that work as one, and graders."""

    shares_device = False

    def __init__(
        self,
        config: PipelineConfig,
        snapshot: Path,
        snapshot_sha256: str,
        rows: Sequence[Row],
        folder: Path,
    ) -> None:
        """`folder`: the run's own, where a process that shares this machine's disk finds files."""
        assert isinstance(config.rl.runtime, RayRuntime)
        self._config = config
        self._settings = config.rl.runtime
        self._snapshot = (snapshot.resolve(), snapshot_sha256)
        self._rows = tuple(rows)
        self._folder = folder.resolve()
        self._group: Any = None
        self._briefing: Briefing | None = None
        self._learners: list[Any] = []
        self._workers: list[Any] = []
        self._graders: list[Any] = []
        self._turn = itertools.count()
        self._learner_shares = True
        self._worker_shares: dict[int, bool] = {}
        self._publish: tuple[PolicyVersion, Parcel] | None = None

    @property
    def workers(self) -> int:
        """Rollout actors."""
        return self._settings.rollout_workers

    async def start(self) -> None:
        """Start or join Ray, reserve a place for every process, then begin all of them at once.

        Raises:
            EngineUnavailableError: no cluster, no room, or not up in time; it says what to set.
        """
        settings = self._settings
        await ray_cluster.connect(settings)
        import ray

        self._group = await ray_cluster.reserve(settings)
        snapshot, sha256 = self._snapshot
        seen = beacon(self._folder)
        apart = sum(node["Alive"] for node in ray.nodes()) > 1
        parcel = pack(snapshot) if apart else None
        self._briefing = Briefing(self._config, self._rows, snapshot, sha256, parcel, seen)
        self._learners = [self._learner_actor(i) for i in range(settings.learner_ranks)]
        self._workers = [self._rollout_actor(i) for i in range(settings.rollout_workers)]
        self._graders = [self._grader_actor(i) for i in range(settings.grader_workers)]
        begun = [self._begin_learners(), *(self._begin_worker(i) for i in range(self.workers))]
        try:
            await asyncio.wait_for(asyncio.gather(*begun), settings.start_timeout_s)
        except TimeoutError:
            raise EngineUnavailableError(
                f"rl.runtime.start_timeout_s={settings.start_timeout_s:g}: learner and "
                f"{settings.rollout_workers} rollout worker(s) were not up by then; raise the "
                "timeout, or look into Ray's logs of the node that was slow"
            ) from None

    def _actor(self, cls: type, bundle_index: int, threads: int, **options: Any) -> Any:
        """Start an actor in its place of the placement group."""
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        bundle = ray_cluster.bundles_of(self._settings)[bundle_index]
        variables = {name: os.environ[name] for name in ACTOR_ENVIRONMENT if name in os.environ}
        return ray.remote(cls).options(
            num_cpus=bundle["CPU"],
            num_gpus=bundle.get("GPU", 0.0),
            runtime_env={"env_vars": {**variables, "OMP_NUM_THREADS": str(threads)}},
            scheduling_strategy=PlacementGroupSchedulingStrategy(
                self._group, placement_group_bundle_index=bundle_index
            ),
            **options,
        )

    def _learner_actor(self, rank: int) -> Any:
        return self._actor(LearnerActor, rank, self._settings.learner_threads).remote()

    def _rollout_actor(self, worker: int) -> Any:
        index = self._settings.learner_ranks + worker
        threads = self._settings.rollout_threads
        return self._actor(RolloutActor, index, threads, max_concurrency=PLAYS_AT_ONCE).remote()

    def _grader_actor(self, grader: int) -> Any:
        """Grading has no state: Ray may start a grader anew and ask it again."""
        settings = self._settings
        index = settings.learner_ranks + settings.rollout_workers + grader
        restarts = {"max_restarts": GRADER_RESTARTS, "max_task_retries": GRADER_RESTARTS}
        return self._actor(GraderActor, index, 1, **restarts).remote(self._config, self._rows)

    async def _begin_learners(self) -> None:
        ranks, threads = len(self._learners), self._settings.learner_threads
        groups: list[RankGroup | None] = [None]
        if ranks > 1:
            address, port = await _of_learner(self._learners[0].rendezvous.remote())
            groups = [RankGroup(rank, ranks, address, port) for rank in range(ranks)]
        shares = await asyncio.gather(
            *(
                _of_learner(actor.begin.remote(self._briefing, threads, group))
                for actor, group in zip(self._learners, groups, strict=True)
            )
        )
        self._learner_shares = shares[0]

    async def _begin_worker(self, worker: int) -> None:
        threads = self._settings.rollout_threads
        begun = self._workers[worker].begin.remote(self._briefing, threads)
        self._worker_shares[worker] = await _of_worker(worker, begun)

    async def revive(self, worker: int) -> None:
        """Start another actor in a lost one's place, on whichever node Ray gives that place now.

        Raises:
            WorkerLostError: none came up within `rl.runtime.start_timeout_s`.
        """
        import ray

        ray.kill(self._workers[worker])
        self._workers[worker] = self._rollout_actor(worker)
        timeout_s = self._settings.start_timeout_s
        try:
            await asyncio.wait_for(self._begin_worker(worker), timeout_s)
        except TimeoutError:
            bundle = ray_cluster.rollout_bundle(self._settings)
            raise WorkerLostError(
                worker,
                f"no replacement came up within rl.runtime.start_timeout_s={timeout_s:g}; it needs "
                f"{' and '.join(f'{v:g} {k}' for k, v in bundle.items())} free on one node",
            ) from None

    async def play(
        self, worker: int, tickets: Sequence[Ticket], samples: int, temperature: float
    ) -> Harvest:
        """Sample episodes."""
        played = self._workers[worker].play.remote(tickets, samples, temperature)
        harvest: Harvest = await _of_worker(worker, played)
        return harvest

    async def grade(self, worker: int, rollouts: Sequence[Rollout]) -> list[Group]:
        """Grade episodes, beside the worker or with the next grader.

        Raises:
            EngineUnavailableError: a grader died again and again.
        """
        groups: list[Group]
        if self._graders:
            grader = self._graders[next(self._turn) % len(self._graders)]
            groups = await _of_grader(grader.grade.remote(rollouts))
        else:
            groups = await _of_worker(worker, self._workers[worker].grade.remote(rollouts))
        return groups

    async def probe(self, worker: int) -> list[ProbeResult]:
        """Known-answer probes, answered by who grades."""
        results: list[ProbeResult]
        if self._graders:
            grader = self._graders[worker % len(self._graders)]
            results = await _of_grader(grader.probe.remote())
        else:
            results = await _of_worker(worker, self._workers[worker].probe.remote())
        return results

    async def sync(self, worker: int, receipt: Receipt) -> SyncProof:
        """Load and prove weights."""
        parcel = None
        if not (self._learner_shares and self._worker_shares[worker]):
            parcel = await self._parcel(receipt)
        synced = self._workers[worker].sync.remote(receipt, parcel)
        proof: SyncProof = await _of_worker(worker, synced)
        return proof

    async def _parcel(self, receipt: Receipt) -> Parcel:
        """The files of a publish; packed here once where the learner wrote them to this disk."""
        if self._publish is None or self._publish[0] != receipt.version:
            self._publish = (receipt.version, await asyncio.to_thread(pack, receipt.folder))
        return self._publish[1]

    async def train(
        self,
        groups: Sequence[Group],
        kl_coefficient: float,
        lr_scale: float = 1.0,
        tightness: float = 1.0,
    ) -> StepReport:
        """Train on one batch."""
        reports: list[StepReport] = await self._every_rank(
            "train", groups, kl_coefficient, lr_scale, tightness
        )
        return reports[0]

    async def publish(self, root: Path, attempt: int) -> Receipt:
        """Write weights."""
        (receipt, parcel), *_ = await self._every_rank("publish", root.resolve(), attempt)
        assert isinstance(receipt, Receipt)
        if parcel is not None:
            self._publish = (receipt.version, parcel)
        return receipt

    async def save(self, folder: Path) -> dict[str, str]:
        """Write the learner's state."""
        hashes: dict[str, str] = {}
        for written, parcel in await self._every_rank("save", folder.resolve()):
            hashes |= written
            await _fetch(parcel, folder)
        return hashes

    async def load(self, folder: Path, steps_taken: int) -> dict[str, str]:
        """Read the learner's state."""
        apart = self._briefing is not None and self._briefing.parcel is not None
        parcel = await asyncio.to_thread(pack, folder) if apart else None
        hashes: dict[str, str] = {}
        for read in await self._every_rank("load", folder.resolve(), steps_taken, parcel):
            hashes |= read
        return hashes

    async def save_policy(self, out_dir: Path) -> str:
        """Write the merged policy."""
        (sha256, parcel), *_ = await self._every_rank("save_policy", out_dir.resolve())
        await _fetch(parcel, out_dir)
        return str(sha256)

    async def _every_rank(self, method: str, *arguments: Any) -> list[Any]:
        """The same call to every rank of the learner; their answers by rank."""
        calls = [getattr(actor, method).remote(*arguments) for actor in self._learners]
        return await asyncio.gather(*(_of_learner(call) for call in calls))

    async def stop(self) -> None:
        """End the actors, give their places back, and end Ray where it was started here."""
        import ray

        closing = [asyncio.ensure_future(_done(w.close.remote())) for w in self._workers]
        if closing:  # an engine may have processes of its own, which Ray would leave behind
            _, late = await asyncio.wait(closing, timeout=CLOSE_TIMEOUT_S)
            failed = [c.exception() for c in closing if c.done() and not c.cancelled()]
            for error in filter(None, failed):
                logger.info("a rollout worker ended without closing its engine: %s", error)
            for task in late:
                task.cancel()
        if self._briefing is not None:
            self._briefing.seen.unlink(missing_ok=True)
        ray.shutdown()  # ends this job's actors and its placement group wherever they are


async def _done(answer: Awaitable[None]) -> None:
    await answer


async def _fetch(parcel: Parcel | None, folder: Path) -> None:
    if parcel is not None:
        await asyncio.to_thread(unpack, parcel, folder)


async def _of_worker(worker: int, answer: Awaitable[T]) -> T:
    """An answer of a rollout worker.

    Raises:
        WorkerLostError: the process or its machine is gone.
    """
    try:
        return await answer
    except _losses() as error:
        raise WorkerLostError(worker, _reason(error)) from None
    except EngineDiedError as error:  # a process of its own: replaced with its worker
        raise WorkerLostError(worker, str(error)) from None


async def _of_learner(answer: Awaitable[T]) -> T:
    """An answer of a learner rank.

    Raises:
        LearnerLostError: the process or its machine is gone.
    """
    try:
        return await answer
    except _losses() as error:
        raise LearnerLostError(
            f"a learner process is gone: {_reason(error)}; run again to go on from the last "
            "checkpoint"
        ) from None


async def _of_grader(answer: Awaitable[T]) -> T:
    try:
        return await answer
    except _losses() as error:
        raise EngineUnavailableError(
            f"a grader died {GRADER_RESTARTS + 1} times: {_reason(error)}; set "
            "rl.runtime.grader_workers=0 to grade beside the rollout workers, and look for the "
            "answer that kills it in their log"
        ) from None


def _losses() -> tuple[type[Exception], ...]:
    """Ray's ways to say that a process, or what it held, is gone with its machine."""
    from ray import exceptions

    return (
        exceptions.RayActorError, exceptions.WorkerCrashedError, exceptions.NodeDiedError,
        exceptions.ObjectLostError,
    )  # fmt: skip


def _reason(error: Exception) -> str:
    """Ray's explanation in one line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(lines)[:300]
