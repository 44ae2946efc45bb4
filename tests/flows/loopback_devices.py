"""Devices on loopback: a root folder, an sshd and a port each; no systemd (scope `process`)."""

import contextlib
import getpass
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

from configs.schema.devices import Device
from deployment.fleet.on_device.keep_alive import started_ticks
from deployment.jetson.on_device.settings import FIELD_FOLDER
from deployment.jetson.signing import sign
from tasks.artifacts import hash_file

RELEASE = "# R36 (release), REVISION: 4.3, GCID: 1, BOARD: generic\n"
AVAILABLE_KB = 6_000_000


def free_port() -> int:
    """A loopback port that nothing listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def make_key(path: Path) -> Path:
    """An SSH key pair at `path` and `path.pub`."""
    command = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "test", "-f", str(path)]
    subprocess.run(command, check=True, stdin=subprocess.DEVNULL)
    return path


def variant(bundle: Path, folder: Path, key, change) -> Path:
    """Another release, signed by `key`: `change(folder)` edits files before signing."""
    shutil.copytree(bundle, folder)
    change(folder)
    manifest = json.loads((folder / "manifest.json").read_bytes())
    for name in manifest["files"]:
        path = folder / name
        manifest["files"][name] = {"sha256": hash_file(path), "size": path.stat().st_size}
    raw = json.dumps(manifest).encode()
    (folder / "manifest.json").write_bytes(raw)
    (folder / "manifest.json.sig").write_text(sign(raw, key))
    return folder


def note(text: str):
    """A change that alters nothing but the release's hash."""
    return lambda folder: (folder / "NOTICE").write_text(text)


def spoil_golden(folder: Path) -> None:
    """A recorded prompt id that no tokenizer gives."""
    golden = json.loads((folder / "golden_prompts.json").read_bytes())
    golden["prompts"][0]["turns"][0]["prompt_ids"][0] += 1
    (folder / "golden_prompts.json").write_text(json.dumps(golden))


@dataclass
class LoopbackDevice:
    """One device: `start` and `stop` its sshd; `close` ends everything it runs."""

    name: str
    folder: Path
    client_key: Path
    wrapper: str | None = None
    """A Python program in front of the device's python3, for devices that misbehave."""
    limit_bytes: int | None = None
    """Largest file the device can write (RLIMIT_FSIZE)."""
    port: int = field(default_factory=free_port)
    serve_port: int = field(default_factory=free_port)
    sshd: subprocess.Popen | None = None

    def __post_init__(self) -> None:
        self.root = self.folder / "root"
        (self.root / "etc").mkdir(parents=True)
        (self.root / "proc").mkdir()
        (self.root / "etc/nv_tegra_release").write_text(RELEASE)
        self.available()
        self.host_key = make_key(self.folder / "host_key")
        shutil.copy(f"{self.client_key}.pub", self.folder / "authorized_keys")

    def config(self, **other) -> Device:
        """Its entry in the file of devices."""
        values = {
            "name": self.name,
            "host": "127.0.0.1",
            "port": self.port,
            "user": getpass.getuser(),
            "identity": str(self.client_key),
            "root": str(self.root),
            "service": "process",
            "python": sys.executable,
            "serve_port": self.serve_port,
            "l4t": "36",
        }
        return Device(**{**values, **other})

    def start(self) -> "LoopbackDevice":
        """Start its sshd and wait until it listens."""
        if os.geteuid() == 0:
            Path("/run/sshd").mkdir(exist_ok=True)
        path = self.folder / "sshd_config"
        path.write_text(self._sshd_config())
        command = [shutil.which("sshd"), "-D", "-e", "-f", str(path)]
        if self.limit_bytes is not None:
            command = ["prlimit", f"--fsize={self.limit_bytes}", *command]
        with (self.folder / "sshd.log").open("ab") as log:
            self.sshd = subprocess.Popen(command, stdout=log, stderr=log)
        end_s = time.monotonic() + 15
        while True:
            try:
                socket.create_connection(("127.0.0.1", self.port), timeout=1).close()
                return self
            except OSError:
                if time.monotonic() > end_s or self.sshd.poll() is not None:
                    raise AssertionError((self.folder / "sshd.log").read_text()) from None
                time.sleep(0.05)

    def _sshd_config(self) -> str:
        tools = self.folder / "bin"
        tools.mkdir(exist_ok=True)
        python, real = tools / "python3", sys._base_executable
        python.unlink(missing_ok=True)
        if self.wrapper is None:
            python.symlink_to(real)
        else:
            python.write_text(f"#!{real} -SEB\nREAL = {real!r}\n{self.wrapper}")
            python.chmod(0o755)
        # set here, since a user's shell may set a PATH of its own first
        run = f'PATH={tools}:/usr/bin:/bin:/usr/sbin:/sbin exec /bin/sh -c "$SSH_ORIGINAL_COMMAND"'
        lines = [
            f"Port {self.port}",
            "ListenAddress 127.0.0.1",
            f"HostKey {self.host_key}",
            f"AuthorizedKeysFile {self.folder}/authorized_keys",
            f"PidFile {self.folder}/sshd.pid",
            "StrictModes no",
            "UsePAM no",
            "PasswordAuthentication no",
            "KbdInteractiveAuthentication no",
            "PermitRootLogin prohibit-password",
            "MaxSessions 20",
            "MaxStartups 50",
            f"ForceCommand {run}",
        ]
        return "\n".join(lines) + "\n"

    def available(self, kb: int = AVAILABLE_KB) -> None:
        """Say how much memory is free there."""
        (self.root / "proc/meminfo").write_text(f"MemAvailable: {kb} kB\n")

    def sessions(self) -> list[int]:
        """Process ids of its sshd's sessions."""
        assert self.sshd is not None
        return [pid for pid in descendants(self.sshd.pid) if _is_sshd(pid)]

    def cut(self) -> int:
        """Kill every open connection; returns how many processes that were."""
        found = self.sessions()
        for pid in found:
            _kill(pid)
        return len(found)

    def stop(self) -> None:
        """Take its sshd down, open connections included; what it serves goes on."""
        if self.sshd is not None:
            self.cut()
            self.sshd.kill()
            self.sshd.wait()
            self.sshd = None

    def close(self) -> None:
        """End everything."""
        self.stop()
        for path in self.root.glob("opt/rl-pipeline/*/run/supervisor.json"):
            value = json.loads(path.read_bytes())
            if started_ticks(value["pid"]) == value["started_ticks"]:
                os.kill(value["pid"], signal.SIGTERM)
                end_s = time.monotonic() + 20
                while started_ticks(value["pid"]) is not None and time.monotonic() < end_s:
                    time.sleep(0.05)
                _kill(value["pid"])

    @property
    def app(self) -> Path:
        """Where the agent lies."""
        return self.root / "opt/rl-pipeline/agent"

    def current(self) -> str | None:
        """The release that `current` names, 12 digits."""
        path = self.app / "current"
        return os.path.basename(os.readlink(path)) if path.is_symlink() else None

    def health(self) -> dict:
        """What its endpoint says, asked past sshd; {} where nothing answers."""
        import http.client

        connection = http.client.HTTPConnection("127.0.0.1", self.serve_port, timeout=5)
        try:
            connection.request("GET", "/health")
            return json.loads(connection.getresponse().read())
        except OSError:
            return {}
        finally:
            connection.close()

    def serves(self) -> str | None:
        """The release its endpoint serves, 64 digits."""
        found = self.health()
        return found.get("release") if found.get("status") == "ok" else None

    def ask(self, prompt: str) -> str:
        """What its agent answers."""
        import http.client

        connection = http.client.HTTPConnection("127.0.0.1", self.serve_port, timeout=60)
        body = json.dumps({"messages": [{"role": "user", "content": prompt}], "temperature": 0})
        headers = {"Content-Type": "application/json"}
        try:
            connection.request("POST", "/v1/chat/completions", body, headers)
            reply = json.loads(connection.getresponse().read())
            return reply["choices"][0]["message"]["content"]
        finally:
            connection.close()


def descendants(pid: int) -> list[int]:
    """Every process below `pid`."""
    parents: dict[int, int] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            parents[int(path.parent.name)] = int(path.read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
    found, todo = [], [pid]
    while todo:
        above = todo.pop()
        below = [child for child, parent in parents.items() if parent == above]
        found += below
        todo += below
    return found


def _is_sshd(pid: int) -> bool:
    try:
        return b"sshd" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


def _kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def device_calls(device: LoopbackDevice) -> list[int]:
    """Processes of the device's side that run on this device now."""
    assert device.sshd is not None
    found = []
    for pid in descendants(device.sshd.pid):
        try:
            command = Path(f"/proc/{pid}/cmdline").read_bytes()
        except OSError:
            continue
        if command.startswith(b"python3\0") and b"request.pop" in command:
            found.append(pid)
    return found


def write_field_log(root: Path, rows: list[dict], tail: bytes = b"") -> Path:
    """Rows in a device's field log, as its agent keeps them; `tail` is a torn last line."""
    folder = root / FIELD_FOLDER
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    lines = b"".join(json.dumps(row).encode() + b"\n" for row in rows)
    (folder / "agent-000001.jsonl").write_bytes(lines + tail)
    return folder


LIAR = """
import json, subprocess, sys
head = sys.stdin.buffer.readline()
request = json.loads(head)
if request["op"] in ("activate", "settle"):
    release = request["args"].get("release", "")
    said = {"release": release, "before": None, "changed": True, "tokens_per_s": 99.0,
            "golden": "all of them agree", "returned_to": None}
    print(json.dumps({"result": said}))
    sys.exit(0)
done = subprocess.Popen(["python3", *sys.argv[1:]], executable=REAL, stdin=subprocess.PIPE)
done.stdin.write(head)
while chunk := sys.stdin.buffer.read(1 << 16):
    done.stdin.write(chunk)
done.stdin.close()
sys.exit(done.wait())
"""
"""A device's python3 that claims to have activated whatever it was told, and has not."""
