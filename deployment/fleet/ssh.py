"""The system's OpenSSH client: one shared connection a device, host keys enforced, no questions.

The user's own SSH configuration is left out, so that what holds here is what stands here.
"""

import contextlib
import os
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from configs.schema.devices import Device
from deployment.fleet.errors import (
    ConnectionLostError,
    DeployError,
    LoginRefusedError,
    NoSuchHostError,
    UnreachableError,
    WrongHostKeyError,
)

CONNECT_TIMEOUT_S = 10
ALIVE_EVERY_S, ALIVE_MISSED = 5, 4
"""A connection that says nothing for 20 s is given up."""
SSH_FAILED = 255
"""Exit status of `ssh` itself; a remote command's own is passed on."""

_SIGNS: tuple[tuple[str, type[DeployError], str], ...] = (
    (
        "could not resolve hostname",
        NoSuchHostError,
        "no such host; correct `host` in the file of devices, or the name server",
    ),
    (
        "host identification has changed",
        WrongHostKeyError,
        "another machine answers than the one that was enrolled, or it was installed anew. If "
        "that is so, enrol it again with --replace-host-key and its new fingerprint",
    ),
    (
        "host key verification failed",
        WrongHostKeyError,
        "its host key is not pinned; enrol it: rl-pipeline devices enrol NAME --fingerprint …",
    ),
    (
        "host key is known",
        WrongHostKeyError,
        "its host key is not pinned; enrol it: rl-pipeline devices enrol NAME --fingerprint …",
    ),
    (
        "permission denied",
        LoginRefusedError,
        "the login was refused; put the public half of `identity` into the device's "
        "authorized_keys, or correct `user` and `identity`",
    ),
    (
        "too many authentication failures",
        LoginRefusedError,
        "the login was refused; name the key to use as `identity`",
    ),
    (
        "unprotected private key",
        LoginRefusedError,
        "the SSH key can be read by others; run: chmod 600 on it",
    ),
    ("connection refused", UnreachableError, "nothing listens there; is sshd running?"),
    ("connection timed out", UnreachableError, "no answer; is the device on, and on this network?"),
    ("operation timed out", UnreachableError, "no answer; is the device on, and on this network?"),
    ("no route to host", UnreachableError, "there is no way to it from this network"),
    ("network is unreachable", UnreachableError, "there is no way to it from this network"),
)


def failure(device: Device, said: str) -> DeployError:
    """The named error for what `ssh` wrote when it failed."""
    low = said.lower()
    last = said.strip().splitlines()[-1].strip() if said.strip() else "ssh said nothing"
    where = f"{device.name} ({device.user}@{device.host}:{device.port})"
    for sign, error, remedy in _SIGNS:
        if sign in low:
            return error(f"{where}: {remedy} [{last}]")
    return ConnectionLostError(f"{where}: the connection broke: {last}")


def check_identity(device: Device, environ: Mapping[str, str] | None = None) -> Path | None:
    """The SSH key to use, which must be there and readable by its owner alone.

    Raises:
        LoginRefusedError: it is not.
    """
    try:
        path = device.identity_path(environ)
    except KeyError as error:
        raise LoginRefusedError(
            f"{device.name}: identity {device.identity}: the variable {error.args[0]} is not set; "
            "point it at the SSH key's file"
        ) from None
    if path is None:
        return None
    if not path.is_file():
        raise LoginRefusedError(
            f"{device.name}: identity {device.identity}: no key file there; make one with "
            "ssh-keygen -t ed25519, and put its public half on the device"
        )
    if path.stat().st_mode & 0o077:
        raise LoginRefusedError(
            f"{device.name}: identity {device.identity}: others can read the key; run: chmod 600"
        )
    return path


class Shell:
    """A shared connection to one device, for the time of a `with`."""

    def __init__(self, device: Device, known_hosts: Path) -> None:
        self.device = device
        self._known_hosts = known_hosts
        self._identity = check_identity(device)
        if shutil.which("ssh") is None:
            raise UnreachableError("ssh is not installed here; install openssh-client")
        self._folder = tempfile.mkdtemp(prefix="rlp-")  # a socket's path must be short

    def __enter__(self) -> "Shell":
        return self

    def __exit__(self, *exc: object) -> None:
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):
            subprocess.run(
                [*self._base(), "-O", "exit", self._target()],
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=10,
                check=False,
            )
        shutil.rmtree(self._folder, ignore_errors=True)

    def popen(self, command: str) -> "subprocess.Popen[bytes]":
        """Start a command on the device; its input, output and errors are pipes."""
        return subprocess.Popen(
            [*self._base(), self._target(), command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C here must not cut what runs there
        )

    @contextlib.contextmanager
    def tunnel(self, port: int) -> Iterator[Path]:
        """A socket here that leads to a loopback port of the device.

        Raises:
            DeployError: the connection does not stand.
        """
        path = Path(self._folder, f"t{port}")
        path.unlink(missing_ok=True)
        forward = f"{path}:127.0.0.1:{port}"
        options = ["-o", "ExitOnForwardFailure=yes", "-o", "StreamLocalBindMask=0177"]
        process = subprocess.Popen(
            [*self._base(shared=False), *options, "-N", "-L", forward, self._target()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        try:
            self._await_socket(process, path)
            yield path
        finally:
            process.terminate()
            process.communicate(timeout=10)
            path.unlink(missing_ok=True)

    def _await_socket(self, process: "subprocess.Popen[bytes]", path: Path) -> None:
        for _ in range(CONNECT_TIMEOUT_S * 20):
            if path.exists():
                return
            with contextlib.suppress(subprocess.TimeoutExpired):
                _, said = process.communicate(timeout=0.05)
                raise failure(self.device, said.decode(errors="replace"))
        raise UnreachableError(f"{self.device.name}: the tunnel did not open in time")

    def _target(self) -> str:
        return f"{self.device.user}@{self.device.host}"

    def _base(self, *, shared: bool = True) -> list[str]:
        settings = {
            "BatchMode": "yes",
            "StrictHostKeyChecking": "yes",
            "UserKnownHostsFile": _quoted(self._known_hosts.resolve()),
            "GlobalKnownHostsFile": "/dev/null",
            "HostKeyAlias": self.device.name,
            "UpdateHostKeys": "no",
            "CheckHostIP": "no",
            "ConnectTimeout": str(CONNECT_TIMEOUT_S),
            "ServerAliveInterval": str(ALIVE_EVERY_S),
            "ServerAliveCountMax": str(ALIVE_MISSED),
            "ForwardAgent": "no",
            "ForwardX11": "no",
            "LogLevel": "ERROR",
            "ControlMaster": "auto" if shared else "no",
            "ControlPath": str(Path(self._folder, "c")) if shared else "none",
            "ControlPersist": "60" if shared else "no",
        }
        if self._identity is not None:
            settings |= {"IdentityFile": _quoted(self._identity), "IdentitiesOnly": "yes"}
        options = [f"-o{key}={value}" for key, value in settings.items()]
        return ["ssh", "-F", "none", "-T", "-p", str(self.device.port), *options]


def _quoted(path: Path) -> str:
    """A path for an option of `ssh`, which splits at spaces and expands `%`."""
    return f'"{str(path).replace("%", "%%")}"'


def remote_python(device: Device, program: str) -> str:
    """The command that runs a Python program on the device."""
    command = ["python3", "-S", "-E", "-B", "-c", program]
    return shlex.join([*(["sudo", "-n"] if device.sudo else []), *command])


def known_names(known_hosts: Path) -> dict[str, tuple[str, ...]]:
    """Pinned host keys, `type base64`, by device name."""
    try:
        lines = known_hosts.read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        return {}
    found: dict[str, tuple[str, ...]] = {}
    for line in lines:
        parts = line.split()
        if len(parts) >= 3 and not line.startswith("#"):
            found[parts[0]] = (*found.get(parts[0], ()), " ".join(parts[1:3]))
    return found


def scan_host_keys(device: Device, environ: Mapping[str, str] | None = None) -> Sequence[str]:
    """The host keys that whoever answers there shows, `type base64` each; believed by nobody yet.

    Raises:
        NoSuchHostError, UnreachableError: nobody answers.
    """
    command = ["ssh-keyscan", "-T", str(CONNECT_TIMEOUT_S), "-p", str(device.port), device.host]
    env = dict(os.environ if environ is None else environ)
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=60, check=False, env=env
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise UnreachableError(f"{device.name}: ssh-keyscan failed: {error}") from None
    lines = [line.split() for line in done.stdout.splitlines() if not line.startswith("#")]
    keys = sorted(" ".join(parts[1:3]) for parts in lines if len(parts) >= 3)
    if not keys:
        if "name or service not known" in done.stderr.lower():
            raise failure(device, "Could not resolve hostname")
        raise UnreachableError(
            f"{device.name}: no host key from {device.host}:{device.port}; is sshd running there? "
            f"{done.stderr.strip()[-200:]}"
        )
    return keys
