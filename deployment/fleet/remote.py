"""Calls on a device: sends the device's side along, writes the request, reads lines of JSON."""

import contextlib
import hashlib
import json
import subprocess
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from configs.schema.deploy import DeployConfig
from configs.schema.devices import Device
from deployment.fleet.errors import (
    BY_KIND,
    ConnectionLostError,
    DeployError,
    DeviceFailedError,
    TransferError,
    WrongDeviceError,
)
from deployment.fleet.ssh import SSH_FAILED, Shell, failure, remote_python

FLEET, JETSON = "deployment.fleet.on_device", "deployment.jetson.on_device"
MODULES = (
    (JETSON, "verify"),
    (JETSON, "l4t"),
    (JETSON, "api_key"),
    (JETSON, "settings"),
    (JETSON, "runtime"),
    (JETSON, "preflight"),
    (FLEET, "places"),
    (FLEET, "journal"),
    (FLEET, "receive"),
    (FLEET, "keep_alive"),
    (FLEET, "service"),
    (FLEET, "probe"),
    (FLEET, "activate"),
    (FLEET, "state"),
    (FLEET, "field_rows"),
    (FLEET, "main"),
)
"""The device's side, each after what it imports."""
_BOOT = """
import json, sys, types
assert sys.version_info >= (3, 10), "Python 3.10 or newer is needed"
request = json.loads(sys.stdin.buffer.readline())
for package, name, source in request.pop("modules"):
    full = package + "." + name
    module = types.ModuleType(full)
    module.SOURCE = source
    sys.modules[full] = module
    sys.modules.setdefault(package, types.ModuleType(package))
    exec(compile(source, name + ".py", "exec"), module.__dict__)
    setattr(sys.modules[package], name, module)
sys.exit(sys.modules["deployment.fleet.on_device.main"].run(request))
"""
WAIT_FOR_LOCK_S = 5.0
CALL_LIMIT_S = 900.0
CHUNK = 1 << 18
MAX_LINE_BYTES = 32 << 20
Say = Callable[[str], None]
Progress = Callable[[int, int], None]
"""Bytes sent, bytes in all."""


@cache
def device_side() -> list[list[str]]:
    """`[package, name, source]` of every module the device needs."""
    return [
        [package, name, files(package).joinpath(f"{name}.py").read_text(encoding="utf-8")]
        for package, name in MODULES
    ]


def demands_of(config: DeployConfig, device: Device) -> dict[str, Any]:
    """What a release must show on this device."""
    floor = device.min_tokens_per_s
    return {
        "health_timeout_s": config.health_timeout_s,
        "min_tokens_per_s": config.min_tokens_per_s if floor is None else floor,
        "keep_releases": config.keep_releases,
    }


@dataclass
class Remote:
    """The device's side of one connection."""

    shell: Shell
    say: Say = lambda text: None

    @property
    def device(self) -> Device:
        """Whom it talks to."""
        return self.shell.device

    def call(self, op: str, *, limit_s: float = CALL_LIMIT_S, **args: Any) -> dict[str, Any]:
        """Carry one operation out and return its result.

        Raises:
            DeployError: named by what went wrong; `ConnectionLostError` where it may be tried
                again.
        """
        process = self._start(op, args)
        timer = _limit(process, limit_s)
        try:
            _close(process)
            return self._result(process, op)
        finally:
            timer.cancel()
            _end(process)

    def client_key(self) -> str | None:
        """The key the device's agent wants, None where it wants none. Not to be shown or kept."""
        return self.call("client_key", limit_s=60).get("key")

    def send(self, path: Path, sha256: str, agent: str, unpacked: int, tell: Progress) -> int:
        """Bring a file to the device from where it stands there; returns the bytes sent.

        Raises:
            DeployError: `ConnectionLostError` where it may be tried again.
        """
        size = path.stat().st_size
        common = {"agent": agent, "wait_s": WAIT_FOR_LOCK_S, "sha256": sha256, "size": size}
        there = self.call("arrived", unpacked=unpacked, **common)
        offset = int(there["have"])
        if offset and there["sha256"] != _prefix_sha256(path, offset):
            self.say("what lies there is not the beginning of this archive; sending it anew")
            offset = 0
        if offset:
            self.say(f"going on at byte {offset:,} of {size:,}")
        if offset < size:
            self._stream(path, offset, size, common, tell)
        return size - offset

    def _stream(
        self, path: Path, offset: int, size: int, common: Mapping[str, Any], tell: Progress
    ) -> None:
        process = self._start("append", {**common, "offset": offset})
        timer = _limit(process, CALL_LIMIT_S + size / 50_000)
        try:
            sent = offset
            with path.open("rb") as file:
                file.seek(offset)
                while (chunk := file.read(CHUNK)) and _write(process, chunk):
                    sent += len(chunk)
                    tell(sent, size)
            _close(process)
            have = int(self._result(process, "append")["have"])
        finally:
            timer.cancel()
            _end(process)
        if have != size:
            raise ConnectionLostError(f"{self.device.name}: {have:,} of {size:,} bytes arrived")

    def _start(self, op: str, args: Mapping[str, Any]) -> "subprocess.Popen[bytes]":
        device = self.device
        about = {
            "root": device.root,
            "service": device.service,
            "python": device.python,
            "port": device.serve_port,
        }
        request = {"modules": device_side(), "op": op, "device": about, "args": dict(args)}
        process = self.shell.popen(remote_python(device, _BOOT))
        _write(process, json.dumps(request).encode() + b"\n")
        return process

    def _result(self, process: "subprocess.Popen[bytes]", op: str) -> dict[str, Any]:
        """Read to the last line; what the device's side says on the way goes to `say`."""
        outcome: dict[str, Any] | None = None
        assert process.stdout is not None and process.stderr is not None
        while line := process.stdout.readline(MAX_LINE_BYTES):
            told = _line(line)
            if "say" in told:
                self.say(str(told["say"])[:500])
            elif told:
                outcome = told
        said = process.stderr.read().decode(errors="replace")
        status = process.wait()
        if outcome is not None and isinstance(outcome.get("result"), dict):
            result: dict[str, Any] = outcome["result"]
            return result
        if outcome is not None and isinstance(outcome.get("error"), dict):
            raise self._error(outcome["error"])
        raise self._no_answer(status, said, op)

    def _error(self, error: Mapping[str, Any]) -> DeployError:
        kind, message = str(error.get("kind")), str(error.get("message"))[:4000]
        return BY_KIND.get(kind, DeviceFailedError)(f"{self.device.name}: {message}")

    def _no_answer(self, status: int, said: str, op: str) -> DeployError:
        if status == SSH_FAILED:
            return failure(self.device, said)
        last = said.strip()[-600:]
        name = self.device.name
        if status == 127 or "python3: not found" in last:
            return WrongDeviceError(f"{name}: no python3 there (3.10 or newer is needed): {last}")
        if "Python 3.10 or newer" in last:
            return WrongDeviceError(f"{name}: Python 3.10 or newer is needed there")
        if "sudo:" in last:
            return WrongDeviceError(
                f"{name}: sudo asks for a password ({last}); allow the user python3 without one in "
                "sudoers, or set `user: root`"
            )
        if status in (-9, 137) or status < 0:
            return ConnectionLostError(f"{name}: {op} was killed there (status {status}) {last}")
        return DeviceFailedError(f"{name}: {op} ended with status {status}: {last or 'no words'}")


def _line(raw: bytes) -> dict[str, Any]:
    try:
        value = json.loads(raw)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def _write(process: "subprocess.Popen[bytes]", data: bytes) -> bool:
    """Write to the device; False where it does not listen any more (its answer says why)."""
    try:
        if process.stdin is not None:
            process.stdin.write(data)
            process.stdin.flush()
    except (BrokenPipeError, ValueError):
        return False
    return True


def _close(process: "subprocess.Popen[bytes]") -> None:
    with contextlib.suppress(BrokenPipeError):
        if process.stdin is not None:
            process.stdin.close()


def _limit(process: "subprocess.Popen[bytes]", limit_s: float) -> threading.Timer:
    """End our side of a call that takes too long; the device's side goes on to its own end."""
    timer = threading.Timer(limit_s, process.terminate)
    timer.daemon = True
    timer.start()
    return timer


def _end(process: "subprocess.Popen[bytes]") -> None:
    if process.poll() is None:
        process.terminate()
        process.wait(timeout=30)
    for pipe in (process.stdin, process.stdout, process.stderr):
        if pipe is not None:
            with contextlib.suppress(BrokenPipeError):
                pipe.close()


def _prefix_sha256(path: Path, length: int) -> str:
    digest = hashlib.sha256()
    left = length
    with path.open("rb") as file:
        while left > 0 and (chunk := file.read(min(CHUNK, left))):
            digest.update(chunk)
            left -= len(chunk)
    if left:
        raise TransferError(f"{path} became shorter while it was being sent")
    return digest.hexdigest()
