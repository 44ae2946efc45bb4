"""Drives a rollout: one shell a device, a wave at a time, every outcome in the books."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from configs.schema.deploy import DeployConfig
from configs.schema.devices import Device
from deployment.fleet.books import DeviceBooks
from deployment.fleet.cargo import Cargo
from deployment.fleet.device import DeviceResult, Visit
from deployment.fleet.errors import DeployError
from deployment.fleet.rollout import Rollout
from deployment.fleet.ssh import Shell


@dataclass(frozen=True)
class FleetEvent:
    """Something that happened on a device."""

    device: str
    kind: str
    """`say`, `sent` (text is `done/size`, bytes), `wave`, `result`."""
    text: str


Listener = Callable[[FleetEvent], None]


@dataclass(frozen=True)
class FleetResult:
    """What became of a rollout, one result a device, in the file's order."""

    release: str
    results: tuple[DeviceResult, ...]

    @property
    def ok(self) -> bool:
        """Whether every device serves the release."""
        return all(result.ok for result in self.results)

    def counts(self) -> dict[str, int]:
        """How many devices by outcome."""
        found: dict[str, int] = {}
        for result in self.results:
            found[result.outcome] = found.get(result.outcome, 0) + 1
        return found


def visit(
    device: Device,
    known_hosts: Path,
    config: DeployConfig,
    listener: Listener,
    work: Callable[[Visit], DeviceResult],
    failed: Callable[[DeployError], DeviceResult],
) -> DeviceResult:
    """Open a shell and do `work`; what keeps the shell from opening is a result too."""

    def say(text: str) -> None:
        listener(FleetEvent(device.name, "say", text))

    def sent(done: int, size: int) -> None:
        listener(FleetEvent(device.name, "sent", f"{done}/{size}"))

    try:
        with Shell(device, known_hosts) as shell:
            return work(Visit(shell, config, say, sent))
    except DeployError as error:
        return failed(error)


def deploy_fleet(
    devices: Sequence[Device],
    known_hosts: Path,
    cargo: Cargo,
    config: DeployConfig,
    books: DeviceBooks,
    *,
    keep_going: bool = False,
    listener: Listener = lambda event: None,
) -> FleetResult:
    """Deploy a bundle: the first device alone, then waves; each outcome is booked as it comes.

    Ctrl-C starts no further wave; devices under way are brought to an end first.
    """
    by_name = {device.name: device for device in devices}
    rollout = Rollout(tuple(by_name), config.wave_size, keep_going)
    results: dict[str, DeviceResult] = {}

    def one(name: str) -> DeviceResult:
        def failed(error: DeployError) -> DeviceResult:
            reason, kind = str(error), type(error).__name__
            return DeviceResult(name, "deploy", "failed", cargo.release, reason=reason, error=kind)

        device = by_name[name]
        result = visit(device, known_hosts, config, listener, lambda v: v.deploy(cargo), failed)
        books.enter(result, cargo.agent, cargo.source)
        listener(FleetEvent(name, "result", result.outcome))
        return result

    with ThreadPoolExecutor(max_workers=config.wave_size) as pool:
        while wave := rollout.next_wave():
            listener(FleetEvent("", "wave", ", ".join(wave)))
            for result in pool.map(one, wave):
                results[result.device] = result
                rollout.record(result.device, result.outcome)
    left = {
        name: DeviceResult(
            name,
            "deploy",
            "not_tried",
            cargo.release,
            reason="an earlier device failed; correct that, or go on with --keep-going",
        )
        for name, outcome in rollout.finished().items()
        if outcome == "not_tried"
    }
    return FleetResult(cargo.release, tuple({**results, **left}[name] for name in by_name))
