"""Is this bundle whole, unchanged, and signed by the key pinned at enrolment?

Standard library only, Python 3.10. The signature is checked by `ssh-keygen -Y verify` over the very
bytes of `manifest.json` that are then read; only after that is anything in the manifest believed.

    python3 -S -E -B verify.py BUNDLE --allowed-signers /etc/rl-pipeline/allowed_signers
"""

import argparse
import base64
import hashlib
import json
import logging
import os
import re
import shutil
import stat
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path, PurePosixPath

MANIFEST = "manifest.json"
SIGNATURE = "manifest.json.sig"
NAMESPACE = "rl-pipeline-bundle"
IDENTITY = "rl-pipeline"
MAX_MANIFEST_BYTES = 16 << 20
MAX_SIGNATURE_BYTES = 1 << 16
ARMOUR_BEGIN, ARMOUR_END = "-----BEGIN SSH SIGNATURE-----", "-----END SSH SIGNATURE-----"
ARMOUR_LINE = 70
FORMAT = 1
SHA256 = re.compile(r"[0-9a-f]{64}\Z")
_CHUNK = 1 << 20

log = logging.getLogger("verify")


class BundleError(ValueError):
    """The bundle is not what was signed, or cannot be checked; nothing of it may be run."""


def _no_duplicates(pairs):
    keys = [key for key, _ in pairs]
    if len(set(keys)) != len(keys):
        raise BundleError(f"{MANIFEST} names a key twice; the bundle is refused")
    return dict(pairs)


def _read_regular(path: Path, limit: int) -> bytes:
    """Bytes of a regular file of at most `limit` bytes; a link is not followed."""
    try:
        info = path.lstat()
    except FileNotFoundError:
        raise BundleError(f"{path.name} is missing from {path.parent}; copy it again") from None
    if not stat.S_ISREG(info.st_mode) or info.st_size > limit:
        raise BundleError(f"{path.name} must be a regular file of at most {limit} bytes")
    return path.read_bytes()


def armour(blob: bytes) -> str:
    """The one text form of a signature, as `ssh-keygen -Y sign` writes it."""
    text = base64.b64encode(blob).decode()
    lines = [text[at : at + ARMOUR_LINE] for at in range(0, len(text), ARMOUR_LINE)]
    return "\n".join([ARMOUR_BEGIN, *lines, ARMOUR_END]) + "\n"


def unarmour(raw: bytes) -> bytes:
    """What a signature file holds.

    `ssh-keygen` ignores what surrounds the block; here every byte of the file counts.

    Raises:
        BundleError: not exactly one armoured block.
    """
    try:
        blob = base64.b64decode("".join(raw.decode("ascii").split("\n")[1:-2]), validate=True)
    except ValueError:
        blob = b""
    if not blob or armour(blob).encode() != raw:
        raise BundleError(f"{SIGNATURE} is no OpenSSH signature file; the bundle is refused")
    return blob


def ssh_keygen_verify(message: bytes, signature: Path, allowed_signers: Path) -> None:
    """Check an OpenSSH signature with `ssh-keygen -Y verify`.

    Raises:
        BundleError: no `ssh-keygen` here, or the signature is not by a pinned key.
    """
    program = shutil.which("ssh-keygen")
    if program is None:
        raise BundleError(
            "ssh-keygen is not installed, so the signature cannot be checked and the bundle is "
            "refused; install openssh-client"
        )
    command = [program, "-Y", "verify", "-f", str(allowed_signers), "-I", IDENTITY]
    command += ["-n", NAMESPACE, "-s", str(signature)]
    done = subprocess.run(command, input=message, capture_output=True, timeout=60, check=False)
    if done.returncode != 0:
        said = (done.stderr or done.stdout).decode(errors="replace").strip()
        raise BundleError(
            f"{SIGNATURE} is not a good signature by a key in {allowed_signers}: {said}. The "
            "bundle was changed after signing, or signed by another key; it is refused"
        )


def check_pin(bundle: Path, allowed_signers: Path) -> Path:
    """The pinned key file, which must exist and lie outside the bundle.

    Raises:
        BundleError: it does not.
    """
    pinned = allowed_signers.resolve()
    if not pinned.is_file():
        raise BundleError(
            f"no pinned key at {allowed_signers}: put the allowed_signers file of the machine that "
            "builds bundles there once (enrolment)"
        )
    if bundle.resolve() in pinned.parents:
        raise BundleError(
            f"{allowed_signers} lies inside the bundle; a bundle never brings its own trust. Name "
            "the file pinned at enrolment"
        )
    return pinned


def safe_relative(name: object) -> PurePosixPath:
    """A manifest path that can only mean a file inside the bundle.

    Raises:
        BundleError: absolute, `..`, empty, a backslash, a control character, or not a string.
    """
    if not isinstance(name, str) or not name or "\\" in name or not name.isprintable():
        raise BundleError(f"{MANIFEST} names an unsafe path {name!r}; the bundle is refused")
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or str(path) != name or name == ".":
        raise BundleError(f"{MANIFEST} names an unsafe path {name!r}; the bundle is refused")
    return path


def read_manifest(raw: bytes) -> dict:
    """The manifest's JSON, checked for shape.

    Raises:
        BundleError: not JSON, another format number, or a malformed file table.
    """
    try:
        manifest = json.loads(raw.decode(), object_pairs_hook=_no_duplicates)
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise BundleError(f"{MANIFEST} is not JSON: {error}") from None
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise BundleError(f"{MANIFEST} is not of format {FORMAT}; use the tools that made it")
    files = manifest.get("files")
    if not isinstance(files, dict) or not files:
        raise BundleError(f"{MANIFEST} has no file table; the bundle is refused")
    for name, entry in files.items():
        safe_relative(name)
        good = isinstance(entry, dict) and set(entry) == {"sha256", "size"}
        if not good or type(entry["size"]) is not int or not isinstance(entry["sha256"], str):
            raise BundleError(f"{MANIFEST} has a malformed entry for {name!r}")
        if not SHA256.match(entry["sha256"]):
            raise BundleError(f"{MANIFEST} has a malformed hash for {name!r}")
    return manifest


def _present(bundle: Path) -> set:
    """Relative paths of every file; a link, device or unlisted kind of entry is an error."""
    found = set()
    for folder, folders, names in os.walk(bundle, followlinks=False, onerror=_walk_error):
        for name in [*folders, *names]:
            path = Path(folder, name)
            mode = path.lstat().st_mode
            relative = path.relative_to(bundle).as_posix()
            if stat.S_ISREG(mode):
                found.add(relative)
            elif not stat.S_ISDIR(mode):
                raise BundleError(f"{relative} is a link or a special file; the bundle is refused")
            elif not any(path.iterdir()):
                raise BundleError(f"{relative}/ is an empty folder that nobody signed")
    return found


def _walk_error(error: OSError) -> None:
    raise BundleError(f"cannot read {error.filename}: {error.strerror}")


def file_sha256(path: Path) -> str:
    """Sha256 of a file, hex."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while True:
            chunk = file.read(_CHUNK)
            if not chunk:
                return digest.hexdigest()
            digest.update(chunk)


def check_files(bundle: Path, files: Mapping) -> None:
    """Every listed file is there with its size and hash, and nothing else is.

    Raises:
        BundleError: naming the first file that is missing, added or changed.
    """
    listed, present = set(files), _present(bundle) - {MANIFEST, SIGNATURE}
    if listed - present:
        raise BundleError(f"missing from the bundle: {', '.join(sorted(listed - present))}")
    if present - listed:
        raise BundleError(f"not in the signed manifest: {', '.join(sorted(present - listed))}")
    for name in sorted(files):
        path, entry = bundle / name, files[name]
        size = path.stat().st_size
        if size != entry["size"]:
            raise BundleError(f"{name} has {size} bytes, {entry['size']} were signed; refused")
        found = file_sha256(path)
        if found != entry["sha256"]:
            raise BundleError(
                f"{name} was changed: sha256 {found[:16]}…, signed {entry['sha256'][:16]}…; refused"
            )


def verify_bundle(bundle: Path, allowed_signers: Path, check_signature=ssh_keygen_verify) -> dict:
    """The manifest of a bundle that is whole, unchanged and signed by the pinned key.

    Raises:
        BundleError: it is not; the message says what is wrong and what to do.
    """
    if not bundle.is_dir():
        raise BundleError(f"{bundle} is not a bundle folder")
    bundle = bundle.resolve()
    pinned = check_pin(bundle, allowed_signers)
    raw = _read_regular(bundle / MANIFEST, MAX_MANIFEST_BYTES)
    unarmour(_read_regular(bundle / SIGNATURE, MAX_SIGNATURE_BYTES))
    check_signature(raw, bundle / SIGNATURE, pinned)
    manifest = read_manifest(raw)
    check_files(bundle, manifest["files"])
    return manifest


def main(argv: "list[str] | None" = None) -> int:
    """Command line; 0 when the bundle is good."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--allowed-signers", type=Path, required=True)
    options = parser.parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    try:
        manifest = verify_bundle(options.bundle, options.allowed_signers)
    except (BundleError, OSError, subprocess.TimeoutExpired) as error:
        log.error("REFUSED: %s", error)
        return 1
    log.info("good: %s, %d files, signed by a pinned key", manifest["name"], len(manifest["files"]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
