"""A Ray to work on: started here, on loopback only, or the one an address names.

Started here it asks for a token of this run and listens on loopback; its own default listens
everywhere. A cluster's ports and token are its owner's to set.
"""

import asyncio
import os
import secrets
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from configs.schema.rl_runtimes import RayRuntime
from tasks.rl.errors import EngineUnavailableError, RayImportedEarlyError

OBJECT_STORE_BYTES = 256 * 1024 * 1024
LOOPBACK = ("127.0.0.1", "::1")
LOOPBACK_SWITCH = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
"""Off, Ray knows this machine by its loopback address, and every server of it binds to that. To ask
for 127.0.0.1 as the node's address is not enough: Ray replaces it by the machine's outer one."""
AUTHENTICATION = "RAY_AUTH_MODE"
Bundle = Mapping[str, float]
"""What one process reserves: CPUs and GPUs."""


def learner_bundle(settings: RayRuntime) -> Bundle:
    """What a learner rank reserves."""
    return _bundle(settings.learner_threads, settings.gpus_per_learner)


def rollout_bundle(settings: RayRuntime) -> Bundle:
    """What a rollout worker reserves."""
    return _bundle(settings.rollout_threads, settings.gpus_per_rollout)


def grader_bundle() -> Bundle:
    """What a grader reserves."""
    return _bundle(1, 0.0)


def _bundle(cpus: int, gpus: float) -> Bundle:
    return {"CPU": float(cpus)} | ({"GPU": gpus} if gpus else {})


def bundles_of(settings: RayRuntime) -> list[Bundle]:
    """Learner ranks first, then rollout workers, then graders."""
    return [
        *[learner_bundle(settings)] * settings.learner_ranks,
        *[rollout_bundle(settings)] * settings.rollout_workers,
        *[grader_bundle()] * settings.grader_workers,
    ]


def shortage(needed: Sequence[Bundle], nodes: Sequence[Mapping[str, float]]) -> str | None:
    """What `nodes` lack for `needed` for certain, and what to set; None where nothing is known to.

    A bundle has to fit one node whole, and all of them have to fit all nodes together.
    """
    lacking = []
    for kind in sorted({kind for bundle in needed for kind in bundle}):
        largest = max(bundle.get(kind, 0.0) for bundle in needed)
        on_one = max((node.get(kind, 0.0) for node in nodes), default=0.0)
        total = sum(bundle.get(kind, 0.0) for bundle in needed)
        there = sum(node.get(kind, 0.0) for node in nodes)
        if largest > on_one:
            lacking.append(f"{largest:g} {kind} on one node (the largest has {on_one:g})")
        elif total > there:
            lacking.append(f"{total:g} {kind} in all (there are {there:g})")
    if not lacking:
        return None
    return (
        f"the cluster of {len(nodes)} node(s) is too small: {'; '.join(lacking)} needed. Join "
        "nodes, or lower rl.runtime.rollout_workers, learner_ranks, grader_workers, "
        "rollout_threads, learner_threads, gpus_per_rollout or gpus_per_learner"
    )


async def connect(settings: RayRuntime) -> None:
    """Start Ray here, or join the cluster of the config.

    Raises:
        EngineUnavailableError: nobody answers at the address, it refuses the token, or a Ray
            started here would listen beyond loopback.
        RayImportedEarlyError: a Ray started here could not be given its settings any more.
    """
    if settings.address is not None:
        await _answers(settings.address, settings.start_timeout_s)
    else:
        _keep_to_ourselves()
    import ray  # after that: Ray reads such settings once, at import

    if settings.address is not None:
        ray.init(address=settings.address, log_to_driver=False)
        return
    ray.init(
        num_cpus=int(sum(b["CPU"] for b in bundles_of(settings))),
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


def _keep_to_ourselves() -> None:
    """Have a Ray started here listen on loopback, and refuse who does not know this run's token.

    Raises:
        RayImportedEarlyError: this process imported Ray with other settings. Its servers would get
            the new ones and the process itself keep the old: it fails as `InvalidAuthToken`.
    """
    unread = [] if os.environ.get(LOOPBACK_SWITCH) == "0" else [f"{LOOPBACK_SWITCH}=0"]
    unread += [] if AUTHENTICATION in os.environ else [f"{AUTHENTICATION}=token"]
    if unread and "ray" in sys.modules:
        raise RayImportedEarlyError(
            f"rl.runtime.address=null starts Ray with {' '.join(unread)}, which Ray reads when it "
            "is imported, and this process has imported it before (TRL and vLLM do): import those "
            "in a process of their own, or export the variables before Python starts"
        )
    os.environ[LOOPBACK_SWITCH] = "0"
    os.environ.setdefault(AUTHENTICATION, "token")
    os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")


async def _answers(address: str, timeout_s: float) -> None:
    """Have a process of its own ask the cluster for its health: Ray's own call goes on for minutes
    where nobody answers, and cannot be interrupted.

    Raises:
        EngineUnavailableError: no answer in time, or a refusal.
    """
    command = [sys.executable, "-m", "ray.scripts.scripts", "health-check"]
    command += [] if address == "auto" else ["--address", address]
    started_s = time.monotonic()
    process = await asyncio.create_subprocess_exec(
        *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )
    try:
        said, _ = await asyncio.wait_for(process.communicate(), timeout_s)
    except TimeoutError:
        process.kill()
        await process.wait()
        said, reason = b"", f"no Ray answered within rl.runtime.start_timeout_s={timeout_s:g}"
    else:
        if process.returncode == 0:
            return
        lines = said.decode(errors="replace").strip().splitlines()
        after_s = time.monotonic() - started_s
        reason = f"refused after {after_s:.0f} s: {lines[-1] if lines else 'without a word'}"
    raise EngineUnavailableError(
        f"rl.runtime.address={address}: {reason}; check that `ray start --head` runs there, that "
        "its port is open to this machine, and that RAY_AUTH_MODE and RAY_AUTH_TOKEN (or "
        "RAY_AUTH_TOKEN_PATH) are the cluster's"
    )


async def reserve(settings: RayRuntime) -> Any:
    """A placement group with one bundle for every process, in the order of `bundles_of`.

    Raises:
        EngineUnavailableError: the cluster has not got, or does not free, what the config needs.
    """
    import ray
    from ray.util.placement_group import placement_group, remove_placement_group

    needed = bundles_of(settings)
    lacking = shortage(needed, [n["Resources"] for n in ray.nodes() if n["Alive"]])
    if lacking is not None:
        raise EngineUnavailableError(lacking)
    group = placement_group([dict(b) for b in needed], strategy=settings.placement.upper())
    try:
        await asyncio.wait_for(_done(group.ready()), settings.start_timeout_s)
    except TimeoutError:
        remove_placement_group(group)
        raise EngineUnavailableError(
            f"rl.runtime.start_timeout_s={settings.start_timeout_s:g}: the cluster has "
            f"{_amounts(needed)} in all, and did not free it in time; other jobs hold it "
            "(`ray status` tells which): end them, or raise the timeout"
        ) from None
    return group


async def _done(reference: Any) -> None:
    await reference


def _amounts(bundles: Sequence[Bundle]) -> str:
    total: Counter[str] = Counter()
    for bundle in bundles:
        total.update(dict(bundle))
    return " and ".join(f"{amount:g} {kind}" for kind, amount in sorted(total.items()))
