"""Generator and learner as Ray actors: on this machine, or on a cluster the config names.

Started here, Ray listens on loopback only and asks for a token of this run; its own default listens
everywhere.
"""

import asyncio
import os
import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from configs.schema import PipelineConfig
from configs.schema.rl_runtimes import RayRuntime
from tasks.environments.row import Row
from tasks.rl.errors import EngineUnavailableError
from tasks.rl.learner import Learner, StepReport
from tasks.rl.prompt_queue import Ticket
from tasks.rl.rollout_worker import Harvest, RolloutWorker
from tasks.rl.sentinel import ProbeResult
from tasks.rl.types import Group
from tasks.rl.weight_sync import Receipt, SyncProof
from tasks.sampling.types import Rollout

OBJECT_STORE_BYTES = 256 * 1024 * 1024
LOOPBACK = ("127.0.0.1", "::1")
LOOPBACK_SWITCH = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
"""Off, Ray knows this machine by its loopback address, and every server of it binds to that. To ask
for 127.0.0.1 as the node's address is not enough: Ray replaces it by the machine's outer one."""
ACTOR_ENVIRONMENT = (
    "DS_ACCELERATOR", "HF_HUB_OFFLINE", "TORCH_EXTENSIONS_DIR", "DO_NOT_TRACK", "PYTHONPATH",
)  # fmt: skip


class RayDriver:
    """`Runtime` over one learner actor and N rollout actors."""

    shares_device = False

    def __init__(
        self, config: PipelineConfig, snapshot: Path, snapshot_sha256: str, rows: Sequence[Row]
    ) -> None:
        assert isinstance(config.rl.runtime, RayRuntime)
        self._config = config
        self._settings = config.rl.runtime
        self._arguments = (snapshot.resolve(), snapshot_sha256, list(rows))
        self._learner: Any = None
        self._workers: list[Any] = []

    @property
    def workers(self) -> int:
        """Rollout actors."""
        return self._settings.rollout_workers

    async def start(self) -> None:
        """Start or join Ray, then both sides at once."""
        settings = self._settings
        _keep_to_ourselves(settings)
        import ray  # after that: Ray reads such settings once, at import

        _connect(settings, cpus=settings.rollout_workers + 1)
        snapshot, sha256, rows = self._arguments
        environment = {name: os.environ[name] for name in ACTOR_ENVIRONMENT if name in os.environ}
        options = {"num_cpus": 1, "max_restarts": 0}
        self._learner = (
            ray.remote(Learner)
            .options(runtime_env=_environment(environment, settings.learner_threads), **options)
            .remote(self._config, snapshot, sha256, rows[:64], threads=settings.learner_threads)
        )
        self._workers = [
            ray.remote(RolloutWorker)
            .options(runtime_env=_environment(environment, settings.rollout_threads), **options)
            .remote(self._config, snapshot, rows, threads=settings.rollout_threads)
            for _ in range(settings.rollout_workers)
        ]
        ready = [actor.__ray_ready__.remote() for actor in (self._learner, *self._workers)]
        try:
            await asyncio.wait_for(asyncio.gather(*ready), settings.start_timeout_s)
        except TimeoutError:
            raise EngineUnavailableError(
                f"rl.runtime.start_timeout_s={settings.start_timeout_s}: learner and "
                f"{settings.rollout_workers} rollout worker(s) were not up by then; the cluster "
                "needs one free CPU for each: free some, lower rl.runtime.rollout_workers, or "
                "raise the timeout"
            ) from None

    async def play(
        self, worker: int, tickets: Sequence[Ticket], samples: int, temperature: float
    ) -> Harvest:
        """Sample episodes."""
        harvest: Harvest = await self._workers[worker].play.remote(tickets, samples, temperature)
        return harvest

    async def grade(self, worker: int, rollouts: Sequence[Rollout]) -> list[Group]:
        """Grade episodes."""
        groups: list[Group] = await self._workers[worker].grade.remote(rollouts)
        return groups

    async def probe(self, worker: int) -> list[ProbeResult]:
        """Known-answer probes."""
        results: list[ProbeResult] = await self._workers[worker].probe.remote()
        return results

    async def sync(self, worker: int, receipt: Receipt) -> SyncProof:
        """Load and prove weights."""
        proof: SyncProof = await self._workers[worker].sync.remote(receipt)
        return proof

    async def train(self, groups: Sequence[Group], kl_coefficient: float) -> StepReport:
        """One optimiser step."""
        report: StepReport = await self._learner.train.remote(groups, kl_coefficient)
        return report

    async def publish(self, root: Path, attempt: int) -> Receipt:
        """Write weights."""
        receipt: Receipt = await self._learner.publish.remote(root.resolve(), attempt)
        return receipt

    async def save(self, folder: Path) -> dict[str, str]:
        """Write the learner's state."""
        hashes: dict[str, str] = await self._learner.save.remote(folder.resolve())
        return hashes

    async def load(self, folder: Path, steps_taken: int) -> dict[str, str]:
        """Read the learner's state."""
        hashes: dict[str, str] = await self._learner.load.remote(folder.resolve(), steps_taken)
        return hashes

    async def save_policy(self, out_dir: Path) -> str:
        """Write the merged policy."""
        sha256: str = await self._learner.save_policy.remote(out_dir.resolve())
        return sha256

    async def stop(self) -> None:
        """End the actors, and Ray where it was started here."""
        import ray

        ray.shutdown()


def _keep_to_ourselves(settings: RayRuntime) -> None:
    """Have a Ray started here listen on loopback, and refuse who does not know this run's token."""
    if settings.address is None:
        os.environ[LOOPBACK_SWITCH] = "0"
        os.environ.setdefault("RAY_AUTH_MODE", "token")
        os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")


def _connect(settings: RayRuntime, cpus: int) -> None:
    import ray

    if settings.address is not None:
        ray.init(address=settings.address, log_to_driver=False)
        return
    ray.init(
        num_cpus=cpus,
        include_dashboard=False,
        _node_ip_address="127.0.0.1",
        object_store_memory=OBJECT_STORE_BYTES,
        log_to_driver=False,
    )
    address = ray.util.get_node_ip_address()
    if address not in LOOPBACK:
        ray.shutdown()
        raise EngineUnavailableError(
            f"rl.runtime.address=null starts Ray on loopback only, and it listens at {address}: "
            f"it is not the locked version, or was imported before {LOOPBACK_SWITCH}=0 was set"
        )


def _environment(variables: dict[str, str], threads: int) -> dict[str, Any]:
    return {"env_vars": {**variables, "OMP_NUM_THREADS": str(threads)}}
