"""Switches an agent to a release, proves it, and goes back where it does not prove itself."""

from collections.abc import Callable
from pathlib import Path

from deployment.fleet.on_device import probe
from deployment.fleet.on_device.journal import read_journal, write_journal
from deployment.fleet.on_device.places import DeviceError, Places, release_hash
from deployment.fleet.on_device.receive import check_bundle
from deployment.fleet.on_device.service import Service
from deployment.jetson.on_device.preflight import PreflightError, available_bytes

Say = Callable[[str], None]


class Demands:
    """What a release must show."""

    def __init__(self, health_timeout_s: float, min_tokens_per_s: float, keep: int) -> None:
        self.health_timeout_s = health_timeout_s
        self.min_tokens_per_s = min_tokens_per_s
        self.keep = keep


def settle(places: Places, service: Service, demands: Demands, say: Say) -> "str | None":
    """Where an earlier call was killed half-way: go back to the good release, and name it.

    None where nothing was left half-way.

    Raises:
        DeviceError: there is a good release, and it does not serve.
    """
    journal = read_journal(places)
    if journal["trying"] is None:
        return None
    say(f"an earlier deployment of {journal['trying']} was killed half-way; going back")
    return _go_back(places, service, demands, journal["good"]) or "none"


def _go_back(
    places: Places, service: Service, demands: Demands, good: "str | None"
) -> "str | None":
    """Serve `good` again, and forget that another was tried."""
    if good is None or not places.release(good).is_dir():
        places.link("current", None)
        service.stop()
        write_journal(places, None, None)
        return None
    if places.linked("current") != good:
        places.link("current", good)
    release = places.release(good)
    if not probe.matches(release, probe.served(service.port, places.root)):
        service.restart()
    wanted = release_hash(release) or ""
    probe.wait_served(
        service.port, places.root, wanted, demands.health_timeout_s, lambda: not service.alive()
    )
    write_journal(places, good, None)
    return good


def activate(
    places: Places, service: Service, sha12: str, demands: Demands, say: Say
) -> "dict[str, object]":
    """Serve the release `sha12`, which lies in `releases/`.

    Returns `{"release", "before", "changed", "tokens_per_s", "golden"}`.

    Raises:
        DeviceError: it did not prove itself; what served before serves again, and the error says
            so (`returned_to`), or that nothing serves.
    """
    settle(places, service, demands, say)
    release = places.release(sha12)
    if not release.is_dir():
        raise DeviceError("no_release", f"release {sha12} is not on this device; deploy it")
    say("checking the release on disk")
    check_bundle(release, places.pin)
    good = read_journal(places)["good"]
    found = probe.served(service.port, places.root)
    if good == sha12 and places.linked("current") == sha12 and probe.matches(release, found):
        golden = probe.replay(release, service.port, demands.health_timeout_s)
        speed = _fast_enough(release, service, places, demands)
        return _proved(release, sha12, speed, golden, changed=False)
    _prepare(places, service, release, good, demands, say)
    write_journal(places, good, sha12)
    try:
        speed, golden = _try(places, service, release, demands, say)
    except DeviceError as error:
        words = service.last_words() if error.kind == "unhealthy" else ""
        raise _returned(places, service, demands, good, error, words) from None
    if good is not None and good != sha12:
        places.link("previous", good)
    write_journal(places, sha12, None)
    places.prune(demands.keep)
    return _proved(release, good, speed, golden, changed=True)


def _proved(
    release: Path, before: "str | None", speed: float, golden: str, *, changed: bool
) -> "dict[str, object]":
    return {
        "release": release_hash(release),
        "before": before,
        "changed": changed,
        "tokens_per_s": speed,
        "golden": golden,
    }


def _prepare(
    places: Places, service: Service, release: Path, good: "str | None", demands: Demands, say: Say
) -> None:
    """Everything that can be found out while the old release still serves.

    The new one is started beside it and asked its golden prompts where memory allows both.
    """
    say("preflight: L4T, memory, runtime")
    running = good is not None and probe.served(service.port, places.root)["answers"]
    held = probe.planned_bytes(places.release(good), margin=False) if good and running else 0
    probe.preflight(places, release, service.python, held)
    try:
        room = available_bytes(places.root) >= probe.planned_bytes(release, margin=True)
    except PreflightError as error:
        raise DeviceError("preflight", str(error)) from None
    if running and room:
        say("golden prompts beside the running release")
        probe.rehearse(release, service.python, demands.health_timeout_s)


def _try(
    places: Places, service: Service, release: Path, demands: Demands, say: Say
) -> "tuple[float, str]":
    """Switch, then health, identity, golden prompts, speed."""
    say("switching")
    places.link("current", release.name)
    service.restart()
    say("waiting for the new release to be healthy")
    wanted = release_hash(release) or ""
    probe.wait_served(
        service.port, places.root, wanted, demands.health_timeout_s, lambda: not service.alive()
    )
    say("golden prompts and speed")
    golden = probe.replay(release, service.port, demands.health_timeout_s)
    return _fast_enough(release, service, places, demands), golden


def _fast_enough(release: Path, service: Service, places: Places, demands: Demands) -> float:
    speed = probe.speed(release, service.port, places.root)
    if speed < demands.min_tokens_per_s:
        raise DeviceError(
            "slow",
            f"{speed:.1f} tokens/s, at least {demands.min_tokens_per_s:g} are asked "
            "(min_tokens_per_s); look at the power mode (nvpmodel -q) and at what else runs",
        )
    return speed


def _returned(
    places: Places,
    service: Service,
    demands: Demands,
    good: "str | None",
    error: DeviceError,
    words: str,
) -> DeviceError:
    """Go back, and tell both what was wrong and what serves now."""
    tail = f"; it said:\n{words}" if words else ""
    try:
        back = _go_back(places, service, demands, good)
    except DeviceError as worse:
        return DeviceError(
            "nothing_serves",
            f"{error.message}{tail}. Going back to {good} failed too: {worse.message}. Nothing "
            "serves on this device",
        )
    if back is None:
        why = "there was no release to go back to, nothing serves"
        return DeviceError(error.kind, f"{error.message}{tail}; {why}")
    places.prune(demands.keep)
    return DeviceError(error.kind, f"{error.message}{tail}; {back} serves again")
