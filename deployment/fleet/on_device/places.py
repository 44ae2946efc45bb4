"""Where an agent lies on a device, its links, and the one kind of error that goes back.

Layout, the same that `install.sh` makes: `ROOT/opt/rl-pipeline/NAME/releases/SHA12`, `current` and
`previous` links beside it; `fleet.json`, `incoming/` and `run/` are ours.
"""

import hashlib
import os
import re
import shutil
from pathlib import Path

SHA12 = re.compile(r"[0-9a-f]{12}\Z")
NAME = re.compile(r"[a-z0-9][a-z0-9_-]*\Z")
PIN = "etc/rl-pipeline/allowed_signers"
APPS = "opt/rl-pipeline"


class DeviceError(RuntimeError):
    """What the device could not do; `kind` is a word the asking side knows."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(kind, message)
        self.kind = kind
        self.message = message

    def __str__(self) -> str:
        return self.message


class Places:
    """Paths of one agent below the device's root."""

    def __init__(self, root: str, agent: str) -> None:
        if not NAME.match(agent):
            raise DeviceError("request", f"agent {agent!r} is not a name")
        self.root = Path(root)
        if not self.root.is_dir():
            raise DeviceError("request", f"root {root} is not a folder on the device")
        self.agent = agent
        self.app = self.root / APPS / agent
        self.releases = self.app / "releases"
        self.incoming = self.app / "incoming"
        self.run = self.app / "run"
        self.journal = self.app / "fleet.json"
        self.lock = self.app / ".lock"
        self.pin = self.root / PIN

    def release(self, sha12: str) -> Path:
        """Folder of a release.

        Raises:
            DeviceError: not twelve hexadecimal digits.
        """
        if not SHA12.match(sha12):
            raise DeviceError("request", f"release {sha12!r} is not 12 hexadecimal digits")
        return self.releases / sha12

    def linked(self, name: str) -> "str | None":
        """The release that the link `current` or `previous` names, where it is there."""
        try:
            sha12 = os.path.basename(os.readlink(self.app / name))
        except OSError:
            return None
        return sha12 if SHA12.match(sha12) and (self.releases / sha12).is_dir() else None

    def link(self, name: str, sha12: "str | None") -> None:
        """Have `name` point at a release, in one step; None takes the link away."""
        path = self.app / name
        if sha12 is None:
            path.unlink(missing_ok=True)
        else:
            temporary = self.app / f".{name}.{os.getpid()}"
            temporary.unlink(missing_ok=True)
            temporary.symlink_to(os.path.join("releases", self.release(sha12).name))
            os.replace(temporary, path)
        sync_folder(self.app)

    def prune(self, keep: int, spare: "tuple[str, ...]" = ()) -> "list[str]":
        """Take releases away until `keep` are left; linked ones and `spare` always stay."""
        wanted = {self.linked("current"), self.linked("previous"), *spare}
        entries = list(self.releases.iterdir())
        found = sorted(
            (p for p in entries if SHA12.match(p.name)),
            key=lambda p: (p.name in wanted, p.stat().st_mtime_ns),
            reverse=True,
        )
        gone = [p for p in entries if not SHA12.match(p.name)]
        gone += [p for p in found[keep:] if p.name not in wanted]
        for path in gone:
            shutil.rmtree(path, ignore_errors=True)
        return [p.name for p in gone]


def release_hash(folder: Path) -> "str | None":
    """Sha256 of a release's manifest, None where there is none."""
    try:
        return hashlib.sha256((folder / "manifest.json").read_bytes()).hexdigest()
    except OSError:
        return None


def sync_folder(folder: Path) -> None:
    """Make renames inside `folder` survive a power cut."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_whole(path: Path, data: bytes, mode: int = 0o644) -> None:
    """Put `data` at `path`: the old file or the whole new one, never a part."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode)
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, mode)
        os.replace(temporary, path)
        sync_folder(path.parent)
    finally:
        temporary.unlink(missing_ok=True)
