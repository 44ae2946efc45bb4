"""Five devices over sshd on loopback, one failing in each of six ways; then the same with the flag.

For each way a new release goes out twice: first without `--keep-going` (the waves must stop at the
failing device), then with it (four on the new release, the failing one on its old, all serving).
"""

import contextlib
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from configs.schema.deploy import DeployConfig
from deployment.fleet import device as device_module
from deployment.fleet.books import DeviceBooks
from deployment.fleet.cargo import loaded
from deployment.fleet.enrol import enrol, offered
from deployment.fleet.fleet import FleetEvent, FleetResult, deploy_fleet
from deployment.jetson.signing import signing_key
from tasks.artifacts import hash_file
from tests.figures.record import record
from tests.flows.loopback_devices import (
    LIAR,
    LoopbackDevice,
    device_calls,
    make_key,
    note,
    variant,
)
from tests.unit.deployment.jetson.conftest import facts, package, stages

__all__ = ["facts", "package", "stages"]

pytestmark = [pytest.mark.faults, pytest.mark.needs("sshd"), pytest.mark.timeout(3600)]

CONFIG = DeployConfig(wave_size=2, health_timeout_s=120, min_tokens_per_s=1)
PROMPT, ANSWER = "34*7-52=?", "186"
SLOW = 1e9


@dataclass
class World:
    """Five enrolled devices, and what is deployed to them."""

    devices: list[LoopbackDevice]
    known_hosts: Path
    runs: Path
    pin: Path
    foreign_pin: Path
    floors: dict[str, float] = field(default_factory=dict)

    def deploy(
        self, bundle: Path, *, keep_going: bool, listener: Callable[[FleetEvent], None]
    ) -> FleetResult:
        """One rollout."""
        entries = [d.config(min_tokens_per_s=self.floors.get(d.name)) for d in self.devices]
        with loaded(bundle, self.pin) as cargo:
            return deploy_fleet(
                entries,
                self.known_hosts,
                cargo,
                CONFIG,
                DeviceBooks(self.runs),
                keep_going=keep_going,
                listener=listener,
            )


Way = Callable[[World, LoopbackDevice, str], "contextlib.AbstractContextManager[Listener]"]
Listener = Callable[[FleetEvent], None]


def _quiet(event: FleetEvent) -> None:
    pass


@contextlib.contextmanager
def cut_connection(world: World, failing: LoopbackDevice, new: str) -> Iterator[Listener]:
    """Its sshd dies in the middle of the transfer and stays away."""

    def cut(event: FleetEvent) -> None:
        if event.device == failing.name and event.kind == "sent":
            failing.stop()

    yield cut
    failing.start()


@contextlib.contextmanager
def full_disk(world: World, failing: LoopbackDevice, new: str) -> Iterator[Listener]:
    """Its files cannot grow beyond what is there."""
    failing.stop()
    failing.limit_bytes = 60_000
    failing.start()
    yield _quiet
    failing.stop()
    failing.limit_bytes = None
    failing.start()


@contextlib.contextmanager
def killed_install(world: World, failing: LoopbackDevice, new: str) -> Iterator[Listener]:
    """`kill -9` of its side as soon as `current` names the new release."""
    over, killed = threading.Event(), []

    def kill() -> None:
        while not over.is_set():
            if failing.current() == new[:12] and (pids := device_calls(failing)):
                for pid in pids:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, 9)
                        killed.append(pid)
                return
            time.sleep(0.002)

    thread = threading.Thread(target=kill)
    thread.start()
    yield _quiet
    over.set()
    thread.join()
    assert killed, "nothing was killed"


@contextlib.contextmanager
def bad_bundle(world: World, failing: LoopbackDevice, new: str) -> Iterator[Listener]:
    """For this device the bundle is signed by a stranger: it pins another key."""
    pin = failing.root / "etc/rl-pipeline/allowed_signers"
    shutil.copy(world.foreign_pin, pin)
    yield _quiet
    shutil.copy(world.pin, pin)


@contextlib.contextmanager
def liar(world: World, failing: LoopbackDevice, new: str) -> Iterator[Listener]:
    """Its side claims to have activated the release, and has not."""
    failing.stop()
    failing.wrapper = LIAR
    failing.start()
    yield _quiet
    failing.stop()
    failing.wrapper = None
    failing.start()


@contextlib.contextmanager
def too_slow(world: World, failing: LoopbackDevice, new: str) -> Iterator[Listener]:
    """It misses its floor of tokens per second, after the switch."""
    world.floors[failing.name] = SLOW
    yield _quiet
    del world.floors[failing.name]


WAYS: dict[str, tuple[Way, str]] = {
    "cut connection": (cut_connection, "ConnectionLostError"),
    "full disk": (full_disk, "DiskFullError"),
    "killed install": (killed_install, "ConnectionLostError"),
    "bad bundle": (bad_bundle, "BundleRefusedError"),
    "lies about its version": (liar, "WrongReleaseError"),
    "too slow": (too_slow, "TooSlowError"),
}


@pytest.fixture
def world(tmp_path, package, tmp_path_factory, monkeypatch):
    monkeypatch.setattr(device_module, "FIRST_PAUSE_S", 0.05)
    key, devices = make_key(tmp_path / "client"), []
    stranger = signing_key(tmp_path_factory.mktemp("stranger"), {})
    try:
        for number in range(1, 6):
            folder = tmp_path / f"d{number}"
            folder.mkdir()
            devices.append(LoopbackDevice(f"d{number}", folder, key).start())
            config = devices[-1].config()
            (host_key,) = offered(config).values()
            enrol(config, tmp_path / "known_hosts", host_key, package.pin)
        known, runs = tmp_path / "known_hosts", tmp_path / "runs"
        yield World(devices, known, runs, package.pin, stranger.allowed_signers)
    finally:
        for device in devices:
            device.close()


def _problems(world: World, expected: dict[str, str]) -> list[str]:
    """Devices that do not serve what they should, asked past sshd; and books that say otherwise."""
    found, books = [], DeviceBooks(world.runs)
    for device in world.devices:
        serves, wanted = device.serves(), expected[device.name]
        if serves != wanted:
            found.append(f"{device.name} serves {str(serves)[:12]}, not {wanted[:12]}")
        elif device.ask(PROMPT) != ANSWER:
            found.append(f"{device.name} answers wrongly")
        elif device.current() != wanted[:12]:
            found.append(f"{device.name}: current names {device.current()}")
        elif (books.record(device.name) or {}).get("release") != wanted:
            found.append(f"{device.name}: the books say otherwise")
    return found


def _outcomes(result: FleetResult) -> list[str]:
    return [r.outcome for r in result.results]


@pytest.mark.figure("deploy_fleet")
def test_one_failing_device_of_five_in_each_of_six_ways(world, package, facts, tmp_path):
    signer = signing_key(facts.key_dir, {}).private
    bundle, held, notes = package.bundle, 0, []
    first = world.deploy(bundle, keep_going=False, listener=_quiet)
    assert first.ok, first
    serving = dict.fromkeys((d.name for d in world.devices), first.release)
    started_s = time.monotonic()
    for number, (name, (way, error)) in enumerate(WAYS.items()):
        failing = world.devices[1 + number % 2]  # in the wave after the canary
        bundle = variant(package.bundle, tmp_path / f"r{number}", signer, note(name))
        new, old = hash_file(bundle / "manifest.json"), serving[failing.name]
        other = world.devices[2 - number % 2]

        with way(world, failing, new) as listener:
            stopped = world.deploy(bundle, keep_going=False, listener=listener)
        after_stop = {**serving, world.devices[0].name: new, other.name: new}
        problems = _problems(world, after_stop)
        expected = ["deployed", "failed", "deployed"]
        if number % 2:
            expected = ["deployed", "deployed", "failed"]
        if _outcomes(stopped) != [*expected, "not_tried", "not_tried"]:
            problems.append(f"without the flag: {_outcomes(stopped)}")

        with way(world, failing, new) as listener:
            went_on = world.deploy(bundle, keep_going=True, listener=listener)
        serving = {**dict.fromkeys(serving, new), failing.name: old}
        problems += _problems(world, serving)
        failed = [r for r in went_on.results if r.outcome == "failed"]
        if [(r.device, r.error) for r in failed] != [(failing.name, error)]:
            problems.append(f"failed: {[(r.device, r.error, r.reason) for r in failed]}")
        held += not problems
        notes.append(f"{name}: {'; '.join(problems) or error}")
    record(
        "deploy_fleet",
        value=held / len(WAYS),
        met=held == len(WAYS),
        note="; ".join(notes),
        details={"seconds": round(time.monotonic() - started_s, 1), "deployments": 2 * len(WAYS)},
    )
    assert held == len(WAYS), "\n".join(notes)
