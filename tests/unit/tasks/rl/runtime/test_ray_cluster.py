"""What a cluster has to have, and what is said where it has not, or is not there at all."""

import asyncio
import pickle
import socket
import subprocess
import sys
import time

import psutil
import pytest

from configs.schema.rl_runtimes import RayRuntime
from tasks.artifacts.provenance import module_environment
from tasks.rl.errors import EngineUnavailableError
from tasks.rl.runtime.ray_cluster import (
    AUTHENTICATION,
    LOOPBACK_SWITCH,
    bundles_of,
    connect,
    shortage,
)

GPU_NODE = {"CPU": 16.0, "GPU": 8.0, "memory": 1e11, "node:10.0.0.1": 1.0}


def test_every_process_has_a_bundle_in_the_order_of_places():
    settings = RayRuntime(
        learner_ranks=2, learner_threads=4, gpus_per_learner=1,
        rollout_workers=3, rollout_threads=2, gpus_per_rollout=0.5, grader_workers=1,
    )  # fmt: skip
    learner, rollout = {"CPU": 4.0, "GPU": 1.0}, {"CPU": 2.0, "GPU": 0.5}
    assert bundles_of(settings) == [learner, learner, rollout, rollout, rollout, {"CPU": 1.0}]
    assert bundles_of(RayRuntime()) == [{"CPU": 1.0}, {"CPU": 1.0}]


@pytest.mark.parametrize(
    ("needed", "nodes", "lacking"),
    [
        ([{"CPU": 1.0}] * 2, [{"CPU": 2.0}], None),
        ([{"CPU": 1.0}] * 2, [{"CPU": 1.0}, {"CPU": 1.0}], None),
        ([{"CPU": 1.0}] * 3, [{"CPU": 1.0}, {"CPU": 1.0}], "3 CPU in all (there are 2)"),
        ([{"CPU": 2.0}], [{"CPU": 1.0}] * 2, "2 CPU on one node (the largest has 1)"),
        ([{"CPU": 1.0}], [], "1 CPU on one node (the largest has 0)"),
        ([{"CPU": 1.0, "GPU": 1.0}] * 8, [GPU_NODE], None),
        ([{"CPU": 1.0, "GPU": 1.0}] * 9, [GPU_NODE], "9 GPU in all (there are 8)"),
        ([{"CPU": 1.0, "GPU": 1.0}], [{"CPU": 64.0}], "1 GPU on one node (the largest has 0)"),
        ([{"CPU": 1.0, "GPU": 0.5}] * 16, [GPU_NODE], None),
    ],
)
def test_a_cluster_that_is_too_small_is_told_what_it_lacks(needed, nodes, lacking):
    said = shortage(needed, nodes)
    if lacking is None:
        assert said is None
    else:
        assert lacking in said and "rl.runtime.rollout_workers" in said


def join(address: str, timeout_s: float) -> tuple[str, float]:
    """What connecting says, and after how many seconds."""
    started_s = time.monotonic()
    settings = RayRuntime(address=address, start_timeout_s=timeout_s)
    with pytest.raises(EngineUnavailableError) as caught:
        asyncio.run(connect(settings))
    return str(caught.value), time.monotonic() - started_s


def test_an_address_where_nobody_answers_is_an_error_in_time():
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        said, took_s = join(address, 4)
    assert said.startswith(
        f"rl.runtime.address={address}: no Ray answered within rl.runtime.start_timeout_s=4"
    )
    assert "RAY_AUTH_TOKEN" in said
    assert 4 <= took_s < 30
    asking = [p.cmdline() for p in psutil.Process().children(recursive=True)]
    assert not [c for c in asking if "health-check" in c]


CONNECTS = """
import asyncio, pickle, sys
IMPORT
from configs.schema.rl_runtimes import RayRuntime
from tasks.rl.errors import RayImportedEarlyError
from tasks.rl.runtime.ray_cluster import connect
async def twice():
    for _ in range(2):
        try:
            await connect(RayRuntime())
        except RayImportedEarlyError as error:
            sys.stdout.buffer.write(pickle.dumps(error))
            return
        import ray
        assert ray.get(ray.remote(lambda: 6 * 7).remote()) == 42
        ray.shutdown()
    sys.stdout.buffer.write(pickle.dumps("connected twice"))
asyncio.run(twice())
"""


@pytest.mark.parametrize(
    ("first", "exported", "unread"),
    [
        ("import ray", {}, [f"{LOOPBACK_SWITCH}=0", f"{AUTHENTICATION}=token"]),
        ("import ray", {LOOPBACK_SWITCH: "0"}, [f"{AUTHENTICATION}=token"]),
        ("import ray", {LOOPBACK_SWITCH: "1", AUTHENTICATION: "token"}, [f"{LOOPBACK_SWITCH}=0"]),
        ("import ray", {LOOPBACK_SWITCH: "0", AUTHENTICATION: "token"}, []),
        ("", {}, []),
    ],
)
def test_a_ray_that_was_imported_first_is_named_before_it_fails(first, exported, unread):
    """A fresh process: what Ray read at import cannot be taken back."""
    plain = {k: v for k, v in module_environment().items() if not k.startswith("RAY_")}
    done = subprocess.run(
        [sys.executable, "-c", CONNECTS.replace("IMPORT", first)],
        env=plain | exported, capture_output=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr.decode()
    said = pickle.loads(done.stdout)
    if not unread:
        assert said == "connected twice"
        return
    assert type(said).__name__ == "RayImportedEarlyError" and isinstance(said, RuntimeError)
    assert f"rl.runtime.address=null starts Ray with {' '.join(unread)}, which" in str(said)
    assert "export the variables before Python starts" in str(said)
