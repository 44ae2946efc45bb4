"""Ed25519 keys and OpenSSH signatures (SSHSIG), as `ssh-keygen -Y sign` and `-Y verify` make them.

Format: OpenSSH `PROTOCOL.sshsig`. The private key never enters a bundle; `allowed_signers`, which
lies beside it, is what a device is given once, at enrolment.
"""

import base64
import binascii
import contextlib
import hashlib
import os
import re
import struct
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization as ser
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from deployment.jetson.errors import SigningKeyError
from deployment.jetson.on_device.verify import IDENTITY, NAMESPACE, BundleError, armour, unarmour
from tasks.artifacts import write_atomic
from tasks.artifacts.atomic import fsync_folder

KEY_VARIABLE = "RL_PIPELINE_SIGNING_KEY"
KEY_NAME = "signing_key"
PIN_NAME = "allowed_signers"
KEY_TYPE = b"ssh-ed25519"
_MAGIC = b"SSHSIG"
_HASH = b"sha512"
_OPTION = re.compile(r'namespaces="([^"]*)"\Z', re.IGNORECASE)


def _string(value: bytes) -> bytes:
    return struct.pack(">I", len(value)) + value


def _strings(blob: bytes) -> list[bytes]:
    """SSH length-prefixed strings that fill `blob` exactly."""
    parts = []
    while blob:
        if len(blob) < 4 or len(blob) - 4 < (size := struct.unpack(">I", blob[:4])[0]):
            raise BundleError("the signature is cut off; the bundle is refused")
        parts.append(blob[4 : 4 + size])
        blob = blob[4 + size :]
    return parts


def _to_sign(message: bytes, namespace: bytes) -> bytes:
    digest = hashlib.sha512(message).digest()
    return _MAGIC + _string(namespace) + _string(b"") + _string(_HASH) + _string(digest)


def public_blob(key: Ed25519PublicKey) -> bytes:
    """The public key in SSH wire form."""
    raw = key.public_bytes(ser.Encoding.Raw, ser.PublicFormat.Raw)
    return _string(KEY_TYPE) + _string(raw)


def sign(message: bytes, key: Ed25519PrivateKey, namespace: str = NAMESPACE) -> str:
    """The armoured SSHSIG of `message`; the same bytes every time (ed25519 is deterministic)."""
    space = namespace.encode()
    signature = _string(KEY_TYPE) + _string(key.sign(_to_sign(message, space)))
    blob = _MAGIC + struct.pack(">I", 1) + _string(public_blob(key.public_key()))
    blob += _string(space) + _string(b"") + _string(_HASH) + _string(signature)
    return armour(blob)


def _unpack(armoured: bytes) -> tuple[bytes, bytes, bytes]:
    """(public key blob, namespace, raw signature) of an armoured SSHSIG."""
    blob = unarmour(armoured)
    head = _MAGIC + struct.pack(">I", 1)
    parts = _strings(blob[len(head) :])
    if not blob.startswith(head) or len(parts) != 5 or parts[3] != _HASH:
        raise BundleError("the signature is of another version or hash; the bundle is refused")
    inner = _strings(parts[4])
    if len(inner) != 2 or inner[0] != KEY_TYPE or len(inner[1]) != 64:
        raise BundleError("the signature is not ed25519; the bundle is refused")
    return parts[0], parts[1], inner[1]


def _pinned_blobs(allowed_signers: str, namespace: str) -> list[bytes]:
    """Keys that may sign `namespace` as `IDENTITY`; a line this code cannot judge is no trust."""
    blobs = []
    for line in allowed_signers.splitlines():
        principals, _, rest = line.strip().partition(" ")
        if IDENTITY not in principals.split(",") or principals.startswith("#"):
            continue
        options, _, key = rest.partition(f"{KEY_TYPE.decode()} ")
        limit = _OPTION.match(options.strip())
        if options.strip() and (limit is None or namespace not in limit[1].split(",")):
            continue
        with contextlib.suppress(binascii.Error):
            blobs.append(base64.b64decode(key.split(" ")[0], validate=True))
    return [blob for blob in blobs if blob]


def verify(message: bytes, signature: Path, allowed_signers: Path) -> None:
    """Check an SSHSIG without `ssh-keygen`, by the same rules.

    Raises:
        BundleError: not a good signature by a pinned key.
    """
    blob, namespace, raw = _unpack(signature.read_bytes())
    if namespace != NAMESPACE.encode():
        raise BundleError(f"the signature is for {namespace!r}, not {NAMESPACE!r}; refused")
    if blob not in _pinned_blobs(allowed_signers.read_text(encoding="utf-8"), NAMESPACE):
        raise BundleError(
            f"the bundle is signed by a key that is not in {allowed_signers}; it is refused"
        )
    key = Ed25519PublicKey.from_public_bytes(_strings(blob)[1])
    try:
        key.verify(raw, _to_sign(message, namespace))
    except InvalidSignature:
        raise BundleError(
            "the manifest was changed after it was signed; the bundle is refused"
        ) from None


@dataclass(frozen=True)
class SigningKey:
    """A private key and the file that pins its public half."""

    private: Ed25519PrivateKey
    allowed_signers: Path

    @property
    def fingerprint(self) -> str:
        """`SHA256:…`, as `ssh-keygen -l` shows it."""
        digest = hashlib.sha256(public_blob(self.private.public_key())).digest()
        return "SHA256:" + base64.b64encode(digest).decode().rstrip("=")


def pin_line(key: Ed25519PublicKey) -> str:
    """The `allowed_signers` line of a key."""
    encoded = base64.b64encode(public_blob(key)).decode()
    return f'{IDENTITY} namespaces="{NAMESPACE}" {KEY_TYPE.decode()} {encoded} rl-pipeline\n'


def _read_key(path: Path) -> Ed25519PrivateKey:
    try:
        data, mode = path.read_bytes(), path.stat().st_mode
    except OSError as error:
        raise SigningKeyError(
            f"cannot read the signing key {path}: {error.strerror}; point {KEY_VARIABLE} at an "
            "OpenSSH ed25519 private key, or unset it to have one made"
        ) from None
    if mode & 0o077:
        raise SigningKeyError(f"{path} can be read by others; run: chmod 600 {path}")
    try:
        key = ser.load_ssh_private_key(data, password=None)
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise SigningKeyError(
            f"{path} is not an OpenSSH private key without passphrase ({error}); make one with: "
            f"ssh-keygen -t ed25519 -N '' -f {path}"
        ) from None
    if not isinstance(key, Ed25519PrivateKey):
        raise SigningKeyError(f"{path} holds another kind of key; ed25519 is expected")
    return key


def _make_key(path: Path) -> None:
    """A new private key at `path`, 0600; one that another process put there first is kept."""
    data = Ed25519PrivateKey.generate().private_bytes(
        ser.Encoding.PEM, ser.PrivateFormat.OpenSSH, ser.NoEncryption()
    )
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.link(temporary, path)
        except FileExistsError:
            return
        finally:
            Path(temporary).unlink(missing_ok=True)
        fsync_folder(path.parent)
    except OSError as error:
        raise SigningKeyError(
            f"cannot make a signing key at {path}: {error.strerror}; choose a folder that can be "
            f"written, or point {KEY_VARIABLE} at a key"
        ) from error


def signing_key(key_dir: Path, environ: Mapping[str, str] | None = None) -> SigningKey:
    """The key in the file `RL_PIPELINE_SIGNING_KEY` names, else one made once in `key_dir`.

    `allowed_signers` beside the key pins it; an existing one is never overwritten.

    Raises:
        SigningKeyError: unreadable, readable by others, not ed25519, or not the pinned key.
    """
    named = (os.environ if environ is None else environ).get(KEY_VARIABLE)
    path = Path(named) if named else key_dir / KEY_NAME
    if not named and not path.exists():
        _make_key(path)
    private = _read_key(path)
    pin = path.parent / PIN_NAME
    if not pin.exists():
        write_atomic(pin, pin_line(private.public_key()))
    elif public_blob(private.public_key()) not in _pinned_blobs(pin.read_text(), NAMESPACE):
        raise SigningKeyError(
            f"{path} is not the key pinned in {pin}; devices enrolled with it would refuse the "
            f"bundle. Sign with the pinned key, or add this line to {pin} and enrol the devices "
            f"again: {pin_line(private.public_key()).strip()}"
        )
    return SigningKey(private, pin)
