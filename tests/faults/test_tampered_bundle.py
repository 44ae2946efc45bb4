"""A bundle changed in any way is refused by the device's verifier and by `rl-pipeline verify`.

The judges are the verifier as a device runs it (its own process, `ssh-keygen` checking the
signature), and the command, once with `ssh-keygen` and once without. Each must refuse; the
untouched bundle is shown to each of them before and after, and must be accepted.
"""

import base64
import gzip
import io
import json
import os
import random
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from typer.testing import CliRunner

from deployment.jetson.archive import write_archive
from deployment.jetson.on_device.verify import NAMESPACE
from deployment.jetson.signing import pin_line, public_blob, sign, signing_key
from flows.cli import app
from tasks.artifacts import hash_file
from tests.figures.record import record
from tests.unit.deployment.jetson.conftest import facts, package, stages  # noqa: F401

pytestmark = [pytest.mark.faults, pytest.mark.needs("ssh-keygen")]
SEED = 20
FILE_CHANGES, MANIFEST_CHANGES, SIGNATURE_CHANGES, ARCHIVE_CHANGES = 100, 30, 30, 40
TOP = "agent-tampered"


class Judges:
    """Everybody who is asked about a bundle; the verifier is the one a device already trusts."""

    def __init__(self, pin: Path, verifier: Path) -> None:
        self.pin, self.verifier = pin, verifier

    def device(self, bundle: Path) -> bool:
        """The on-device verifier accepts it."""
        command = [sys.executable, "-S", "-E", "-B", str(self.verifier), str(bundle)]
        command += ["--allowed-signers", str(self.pin)]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
        assert "Traceback" not in done.stderr
        return done.returncode == 0

    def command(self, bundle: Path) -> bool:
        """`rl-pipeline verify` accepts it."""
        arguments = ["verify", str(bundle), "--allowed-signers", str(self.pin)]
        done = CliRunner().invoke(app, arguments)
        assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
        return done.exit_code == 0

    def command_alone(self, bundle: Path) -> bool:
        """`rl-pipeline verify` accepts it where there is no `ssh-keygen`."""
        before = os.environ["PATH"]
        os.environ["PATH"] = "/nonexistent"
        try:
            return self.command(bundle)
        finally:
            os.environ["PATH"] = before

    def verdicts(self, bundle: Path) -> list[bool]:
        """One for each judge; the device judges folders only."""
        judges: list[Callable[[Path], bool]] = [self.command, self.command_alone]
        if bundle.is_dir():
            judges.append(self.device)
        return [judge(bundle) for judge in judges]


@pytest.fixture
def judges(package, tmp_path):  # noqa: F811
    """The judges, with the verifier of an installed release."""
    verifier = shutil.copy(package.bundle / "verify.py", tmp_path / "installed_verify.py")
    return Judges(package.pin, Path(verifier))


def _change_one_byte(path: Path, choice: random.Random) -> bytes:
    """Change one byte of a file to another value; the bytes before."""
    good = path.read_bytes()
    bad = bytearray(good)
    place = choice.randrange(len(bad))
    bad[place] = (bad[place] + choice.randrange(1, 256)) % 256
    path.write_bytes(bad)
    return good


def _byte_changes(bundle: Path, archive: Path, judges: Judges) -> list[str]:
    """What was accepted although one byte of it was changed."""
    choice = random.Random(SEED)
    files = sorted(p for p in bundle.rglob("*") if p.is_file())
    targets = [choice.choice(files) for _ in range(FILE_CHANGES)]
    targets += [bundle / "manifest.json"] * MANIFEST_CHANGES
    targets += [bundle / "manifest.json.sig"] * SIGNATURE_CHANGES
    targets += [archive] * ARCHIVE_CHANGES
    accepted = []
    for number, path in enumerate(targets):
        good = _change_one_byte(path, choice)
        if any(judges.verdicts(archive if path == archive else bundle)):
            accepted.append(f"change {number} of {path.name}")
        path.write_bytes(good)
    return accepted


def _resign(bundle: Path, key: Ed25519PrivateKey, change=lambda manifest: None) -> None:
    """Write the file table anew and sign with `key`."""
    manifest = json.loads((bundle / "manifest.json").read_bytes())
    names = [p.relative_to(bundle).as_posix() for p in bundle.rglob("*") if p.is_file()]
    manifest["files"] = {
        name: {"sha256": hash_file(bundle / name), "size": (bundle / name).stat().st_size}
        for name in names
        if name not in ("manifest.json", "manifest.json.sig")
    }
    change(manifest)
    raw = json.dumps(manifest).encode()
    (bundle / "manifest.json").write_bytes(raw)
    (bundle / "manifest.json.sig").write_text(sign(raw, key))


def _by_another_key(bundle: Path, _key: Ed25519PrivateKey) -> None:
    _resign(bundle, Ed25519PrivateKey.generate())


def _key_smuggled_in(bundle: Path, _key: Ed25519PrivateKey) -> None:
    """A bundle signed by the attacker that brings the attacker's `allowed_signers` with it."""
    other = Ed25519PrivateKey.generate()
    (bundle / "allowed_signers").write_text(pin_line(other.public_key()))
    _resign(bundle, other)


def _for_another_purpose(bundle: Path, key: Ed25519PrivateKey) -> None:
    """Signed by the right key, but as something else (a commit, a file)."""
    raw = (bundle / "manifest.json").read_bytes()
    (bundle / "manifest.json.sig").write_text(sign(raw, key, "git"))


def _two_files_swapped(bundle: Path, _key: Ed25519PrivateKey) -> None:
    first, second = bundle / "LICENSE", bundle / "NOTICE"
    one, other = first.read_bytes(), second.read_bytes()
    first.write_bytes(other)
    second.write_bytes(one)


def _file_added(bundle: Path, _key: Ed25519PrivateKey) -> None:
    (bundle / "sitecustomize.py").write_text("print('mine')\n")


def _file_taken(bundle: Path, _key: Ed25519PrivateKey) -> None:
    (bundle / "NOTICE").unlink()


def _file_linked(bundle: Path, _key: Ed25519PrivateKey) -> None:
    """The same bytes, but outside the bundle, where they can be changed later."""
    outside = bundle.parent / "agent.py"
    shutil.move(bundle / "agent.py", outside)
    (bundle / "agent.py").symlink_to(outside)


def _folder_linked(bundle: Path, _key: Ed25519PrivateKey) -> None:
    shutil.move(bundle / "models", bundle.parent / "models")
    (bundle / "models").symlink_to(bundle.parent / "models")


def _path_outside(bundle: Path, key: Ed25519PrivateKey) -> None:
    """Well signed, but its table names a file outside."""
    entry = {"sha256": "0" * 64, "size": 0}
    _resign(bundle, key, lambda manifest: manifest["files"].update({"../../etc/passwd": entry}))


def _signature_of_the_release_before(bundle: Path, key: Ed25519PrivateKey) -> None:
    """A good signature of another manifest."""
    raw = (bundle / "manifest.json").read_bytes()
    (bundle / "manifest.json.sig").write_text(sign(raw.replace(b"Apache", b"apache"), key))


def _key_renamed_inside_the_signature(bundle: Path, _key: Ed25519PrivateKey) -> None:
    """The attacker's signature with the pinned key's name written over his own."""
    other = Ed25519PrivateKey.generate()
    raw = (bundle / "manifest.json").read_bytes()
    lines = sign(raw, other).splitlines()
    blob = base64.b64decode("".join(lines[1:-1]))
    pinned = public_blob(_key.public_key())
    blob = blob.replace(public_blob(other.public_key()), pinned)
    text = base64.b64encode(blob).decode()
    wrapped = [text[at : at + 70] for at in range(0, len(text), 70)]
    (bundle / "manifest.json.sig").write_text("\n".join([lines[0], *wrapped, lines[-1]]) + "\n")


FORGERIES = (
    _by_another_key,
    _key_smuggled_in,
    _for_another_purpose,
    _two_files_swapped,
    _file_added,
    _file_taken,
    _file_linked,
    _folder_linked,
    _path_outside,
    _signature_of_the_release_before,
    _key_renamed_inside_the_signature,
)


def _member(name: str, data: bytes, kind: bytes = tarfile.REGTYPE, target: str = ""):
    info = tarfile.TarInfo(name)
    info.type, info.linkname, info.size = kind, target, len(data)
    return info, io.BytesIO(data)


ARCHIVE_FORGERIES = {
    "path traversal": _member(f"{TOP}/../../escaped", b"x"),
    "absolute path": _member("/tmp/escaped", b"x"),
    "symlink": _member(f"{TOP}/link", b"", tarfile.SYMTYPE, "/etc/passwd"),
    "hard link": _member(f"{TOP}/link", b"", tarfile.LNKTYPE, f"{TOP}/manifest.json"),
    "device": _member(f"{TOP}/null", b"", tarfile.CHRTYPE),
    "same name twice": _member(f"{TOP}/NOTICE", b"x"),
    "second folder": _member("other/file", b"x"),
    "added file": _member(f"{TOP}/sitecustomize.py", b"x"),
}


def _repacked(bundle: Path, out: Path, extra) -> Path:
    """The whole good bundle as an archive, and one member more."""
    with (
        out.open("wb") as raw,
        gzip.GzipFile("", "wb", 6, raw, mtime=0) as packed,
        tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as tar,
    ):
        for path in sorted(p for p in bundle.rglob("*") if p.is_file()):
            tar.add(path, f"{TOP}/{path.relative_to(bundle).as_posix()}")
        info, data = extra
        data.seek(0)
        tar.addfile(info, data)
    return out


def _openssh_alone_refuses(bundle: Path, pin: Path) -> bool:
    """`ssh-keygen -Y verify` itself, as the model card shows it."""
    command = ["ssh-keygen", "-Y", "verify", "-f", str(pin), "-I", "rl-pipeline", "-n", NAMESPACE]
    command += ["-s", str(bundle / "manifest.json.sig")]
    raw = (bundle / "manifest.json").read_bytes()
    return subprocess.run(command, input=raw, capture_output=True, check=False).returncode != 0


@pytest.mark.figure("tampered_bundle")
def test_every_tampered_bundle_is_refused(package, facts, judges, tmp_path):  # noqa: F811
    key = signing_key(facts.key_dir, {}).private
    good = Path(shutil.copytree(package.bundle, tmp_path / "good"))
    archive = write_archive(good, tmp_path / "good.tar.gz", TOP)
    assert judges.verdicts(good) == [True] * 3
    assert judges.verdicts(archive) == [True] * 2

    accepted = _byte_changes(good, archive, judges)
    tried = FILE_CHANGES + MANIFEST_CHANGES + SIGNATURE_CHANGES + ARCHIVE_CHANGES
    for forge in FORGERIES:
        bundle = Path(shutil.copytree(package.bundle, tmp_path / forge.__name__ / "bundle"))
        forge(bundle, key)
        if any(judges.verdicts(bundle)):
            accepted.append(forge.__name__)
        tried += 1
    for name, member in ARCHIVE_FORGERIES.items():
        forged = _repacked(package.bundle, tmp_path / "forged.tar.gz", member)
        if any(judges.verdicts(forged)):
            accepted.append(f"archive with {name}")
        tried += 1
    for forge in (_by_another_key, _key_smuggled_in, _key_renamed_inside_the_signature):
        assert _openssh_alone_refuses(tmp_path / forge.__name__ / "bundle", package.pin)

    assert judges.verdicts(good) == [True] * 3, "what was put back is good again"
    assert judges.verdicts(archive) == [True] * 2
    assert not Path("/tmp/escaped").exists() and not (tmp_path / "escaped").exists()
    refused = 1 - len(accepted) / tried
    record(
        "tampered_bundle",
        value=refused,
        met=not accepted,
        seeds=[SEED],
        note=f"{tried} forgeries, {FILE_CHANGES + MANIFEST_CHANGES + SIGNATURE_CHANGES} changed "
        f"bytes in files and {ARCHIVE_CHANGES} in archives among them; three judges"
        + (f"; accepted: {', '.join(accepted[:5])}" if accepted else ""),
        details={"accepted": accepted},
    )
    assert accepted == []


def test_the_test_itself_notices_an_accepted_forgery(package, judges, tmp_path):  # noqa: F811
    """A device without a pinned key of its own, given the smuggled one, would accept it."""
    bundle = Path(shutil.copytree(package.bundle, tmp_path / "bundle"))
    other = Ed25519PrivateKey.generate()
    _resign(bundle, other)
    (tmp_path / "their_signers").write_text(pin_line(other.public_key()))
    fooled = Judges(tmp_path / "their_signers", judges.verifier)
    assert fooled.verdicts(bundle) == [True] * 3
    assert judges.verdicts(bundle) == [False] * 3
