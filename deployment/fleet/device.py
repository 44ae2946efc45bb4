"""One device, one bundle: from whatever it runs now to the new release, or back to the old."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from configs.schema.deploy import DeployConfig
from configs.schema.devices import Device
from deployment.fleet import witness
from deployment.fleet.cargo import Cargo
from deployment.fleet.errors import (
    ConnectionLostError,
    DeployError,
    DeviceBusyError,
    NoReleaseError,
    NotEnrolledError,
    TransferError,
    UnreachableError,
    WrongDeviceError,
    WrongReleaseError,
)
from deployment.fleet.remote import WAIT_FOR_LOCK_S, Progress, Remote, demands_of
from deployment.fleet.rollout import Outcome
from deployment.fleet.ssh import Shell

TRANSFER_ATTEMPTS = 6
FIRST_PAUSE_S = 1.0
RECONNECTS = 4
Action = Literal["deploy", "rollback", "drill"]


@dataclass(frozen=True)
class DeviceResult:
    """What became of one device."""

    device: str
    action: Action
    outcome: Outcome
    release: str | None
    """The release it was meant to serve."""
    serving: str | None = None
    """What its endpoint serves now, as far as it could be asked."""
    previous: str | None = None
    """What it served before."""
    reason: str = ""
    error: str | None = None
    """Class of the error."""
    tokens_per_s: float | None = None
    golden: str = ""
    sent_bytes: int = 0
    seconds: float = 0.0

    @property
    def ok(self) -> bool:
        """Whether it serves what it was meant to serve."""
        return self.outcome in ("deployed", "unchanged")


@dataclass
class Visit:
    """Talking to one device, for the time of a `with` on its shell."""

    shell: Shell
    config: DeployConfig
    say: Callable[[str], None] = lambda text: None
    sent: Progress = lambda done, size: None
    pause: Callable[[float], None] = time.sleep
    sent_bytes: int = 0
    _remote: Remote = field(init=False)

    def __post_init__(self) -> None:
        self._remote = Remote(self.shell, self.say)

    @property
    def device(self) -> Device:
        """Whom it talks to."""
        return self.shell.device

    def facts(self) -> dict[str, Any]:
        """What is on the device.

        Raises:
            WrongDeviceError: another L4T major than the file of devices says.
        """
        found = self._remote.call("facts")
        expected, there = self.device.l4t, found.get("l4t")
        if expected is not None and not _l4t_matches(expected, there):
            raise WrongDeviceError(
                f"{self.device.name} runs L4T {there or 'of no known release'}, the file of "
                f"devices expects {expected}; correct `l4t`, or look which machine `host` is"
            )
        return found

    def deploy(self, cargo: Cargo) -> DeviceResult:
        """Have the device serve a bundle; what fails is in the result, never raised."""
        return self._guarded("deploy", cargo.release, lambda: self._deploy(cargo))

    def rollback(
        self, agent: str, action: Action = "rollback", target: str | None = None
    ) -> DeviceResult:
        """Have the device serve the release before, or `target` (64 digits) if it has it."""
        return self._guarded(action, target, lambda: self._rollback(agent, action, target))

    def _guarded(
        self, action: Action, release: str | None, work: Callable[[], DeviceResult]
    ) -> DeviceResult:
        start_s = time.monotonic()
        try:
            result = work()
        except DeployError as error:
            result = DeviceResult(
                self.device.name,
                action,
                "failed",
                release,
                serving=self._serving_now(error),
                reason=str(error),
                error=type(error).__name__,
            )
        seconds = time.monotonic() - start_s
        return replace(result, seconds=seconds, sent_bytes=self.sent_bytes)

    def _serving_now(self, error: DeployError) -> str | None:
        """Ask the endpoint after a failure; unknown where the device cannot be reached."""
        if isinstance(error, UnreachableError):
            return None
        try:
            return witness.served_release(self.shell)
        except DeployError:
            return None

    def _deploy(self, cargo: Cargo) -> DeviceResult:
        self.say("asking what is there")
        found = self.facts()
        if found["pin"] is None:
            raise NotEnrolledError(
                f"{self.device.name} pins no signing key; enrol it once: rl-pipeline devices enrol "
                f"{self.device.name}"
            )
        before = found["served"]["release"]
        self.bring(cargo)
        done = self._activate(cargo.agent, cargo.release)
        self.say("asking the endpoint from here")
        golden = self._confirmed(cargo, done)
        outcome: Outcome = "deployed" if done["changed"] else "unchanged"
        return DeviceResult(
            self.device.name,
            "deploy",
            outcome,
            cargo.release,
            serving=cargo.release,
            previous=before,
            reason="" if done["changed"] else "it served this release already",
            tokens_per_s=float(done["tokens_per_s"]),
            golden=golden,
        )

    def bring(self, cargo: Cargo) -> None:
        """Have the release lie there, verified, however often the connection breaks on the way.

        Raises:
            DeployError: it cannot be brought; what has arrived stays there.
        """
        args = {"agent": cargo.agent, "sha256": cargo.archive_sha256, "release": cargo.release}
        for attempt in range(1, TRANSFER_ATTEMPTS + 1):
            try:
                if self._remote.call("has", agent=cargo.agent, release=cargo.release)["has"]:
                    return
                self.say(f"sending {cargo.archive.stat().st_size:,} bytes")
                self.sent_bytes += self._remote.send(
                    cargo.archive,
                    cargo.archive_sha256,
                    cargo.agent,
                    cargo.unpacked_bytes,
                    self.sent,
                )
                limits = {"unpacked": cargo.unpacked_bytes, "wait_s": WAIT_FOR_LOCK_S}
                self._remote.call("place", **args, **limits)
            except (ConnectionLostError, TransferError, UnreachableError, DeviceBusyError) as error:
                if attempt == 1 and isinstance(error, DeviceBusyError):
                    raise  # not by us: an earlier call of ours needs a broken connection first
                if attempt == TRANSFER_ATTEMPTS:
                    raise ConnectionLostError(
                        f"{error}; given up after {attempt} attempts. What has arrived is kept: "
                        "deploying again goes on from there"
                    ) from error
                self.say(f"{error}; trying again")
                self.pause(FIRST_PAUSE_S * 2 ** (attempt - 1))
            else:
                return

    def _activate(self, agent: str, release: str) -> dict[str, Any]:
        """Activate, and where the connection breaks meanwhile, find out how it ended there."""
        demands = demands_of(self.config, self.device)
        args = {"agent": agent, "release": release, "demands": demands}
        try:
            return self._remote.call("activate", wait_s=WAIT_FOR_LOCK_S, **args)
        except ConnectionLostError as error:
            self.say(f"{error}; asking how it ended")
            self._settled(agent, demands, error)
            good = self.facts()["agents"].get(agent, {}).get("good")
            if good == release[:12]:
                return self._remote.call("activate", wait_s=WAIT_FOR_LOCK_S, **args)
            raise ConnectionLostError(
                f"{error}; the installation did not end, {good or 'nothing'} serves again"
            ) from error

    def _settled(self, agent: str, demands: dict[str, Any], error: DeployError) -> None:
        """Wait for what runs there to end; what was killed half-way is put right.

        Raises:
            ConnectionLostError: the device cannot be reached.
        """
        wait_s = 3 * float(demands["health_timeout_s"])
        for attempt in range(RECONNECTS):
            self.pause(FIRST_PAUSE_S * 2**attempt)
            try:
                self._remote.call("settle", agent=agent, demands=demands, wait_s=wait_s)
                return
            except (ConnectionLostError, UnreachableError) as again:
                error = again
        raise ConnectionLostError(
            f"{error}; what the device serves is not known: rl-pipeline devices status"
        )

    def _confirmed(self, cargo: Cargo, done: dict[str, Any]) -> str:
        """Ask the endpoint; where it is not as reported, order the device back.

        Raises:
            WrongReleaseError, UnhealthyReleaseError: it is not.
        """
        try:
            key = self._remote.client_key()
            return witness.confirm(self.shell, cargo.release, cargo.golden, key)
        except DeployError as error:
            before = done.get("before")
            if isinstance(error, UnreachableError | ConnectionLostError) or not before:
                raise
            self.say(f"{error}; ordering {before} back")
            try:
                self._activate(cargo.agent, str(before))
            except DeployError as worse:
                raise type(error)(f"{error}. Ordered back to {before}: {worse}") from error
            raise type(error)(f"{error}. Ordered back to {before}") from error

    def _rollback(self, agent: str, action: Action, target: str | None) -> DeviceResult:
        found = self.facts()["agents"].get(agent)
        if found is None:
            raise NoReleaseError(f"{self.device.name} has no agent {agent}; deploy one first")
        wanted = target or found["previous"]
        if wanted is None:
            raise NoReleaseError(
                f"{self.device.name} has no release before {str(found['current'])[:12]}; a second "
                "deployment makes one"
            )
        done = self._activate(agent, wanted)
        witness.confirm(self.shell, wanted, None)
        if done["release"] != wanted:
            raise WrongReleaseError(f"{self.device.name} went to {done['release']}, not {wanted}")
        return DeviceResult(
            self.device.name,
            action,
            "deployed" if done["changed"] else "unchanged",
            wanted,
            serving=wanted,
            previous=found["current"],
            tokens_per_s=float(done["tokens_per_s"]),
            golden=str(done["golden"]),
        )


def _l4t_matches(expected: str, there: str | None) -> bool:
    """Whether a release is the expected one, as far as that is spelt out."""
    if there is None:
        return False
    wanted = expected.split(".")
    return there.split(".")[: len(wanted)] == wanted
