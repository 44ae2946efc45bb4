import pickle
import shutil
import stat
import subprocess

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from deployment.jetson.errors import SigningKeyError
from deployment.jetson.on_device.verify import IDENTITY, NAMESPACE, BundleError, ssh_keygen_verify
from deployment.jetson.signing import (
    KEY_VARIABLE,
    pin_line,
    public_blob,
    sign,
    signing_key,
    verify,
)

MESSAGE = b'{"a": 1}\n'
needs_ssh_keygen = pytest.mark.skipif(
    shutil.which("ssh-keygen") is None, reason="openssh-client is not installed"
)
BOTH = [pytest.param(ssh_keygen_verify, marks=needs_ssh_keygen), verify]


@pytest.fixture
def key(tmp_path):
    return signing_key(tmp_path / "keys", {})


@pytest.fixture
def signature(tmp_path, key):
    path = tmp_path / "m.sig"
    path.write_text(sign(MESSAGE, key.private))
    return path


@pytest.mark.parametrize("check", BOTH)
def test_a_good_signature_is_accepted(check, key, signature):
    check(MESSAGE, signature, key.allowed_signers)


@pytest.mark.parametrize("check", BOTH)
def test_a_changed_byte_is_refused(check, key, signature):
    with pytest.raises(BundleError):
        check(MESSAGE.replace(b"1", b"2"), signature, key.allowed_signers)


@pytest.mark.parametrize("check", BOTH)
def test_another_key_is_refused(check, key, tmp_path):
    (tmp_path / "other.sig").write_text(sign(MESSAGE, Ed25519PrivateKey.generate()))
    with pytest.raises(BundleError, match=r"signed by another key|a key that is not in"):
        check(MESSAGE, tmp_path / "other.sig", key.allowed_signers)


@pytest.mark.parametrize("check", BOTH)
def test_another_namespace_is_refused(check, key, tmp_path):
    """A signature the same key made for another purpose (git, say) is no bundle signature."""
    (tmp_path / "git.sig").write_text(sign(MESSAGE, key.private, "git"))
    with pytest.raises(BundleError):
        check(MESSAGE, tmp_path / "git.sig", key.allowed_signers)


@pytest.mark.parametrize("check", BOTH)
@pytest.mark.parametrize(
    "line",
    [
        "",
        "# {line}",
        "somebody-else {rest}",
        'rl-pipeline namespaces="git" {key}',
        'rl-pipeline cert-authority,namespaces="rl-pipeline-bundle" {key}',
        "rl-pipeline ssh-ed25519 AAAA",
    ],
)
def test_a_pin_that_does_not_name_the_key_is_no_trust(check, line, key, signature, tmp_path):
    whole = pin_line(key.private.public_key()).strip()
    parts = whole.split(" ")
    text = line.format(line=whole, rest=" ".join(parts[1:]), key=" ".join(parts[2:]))
    (tmp_path / "pin").write_text(text + "\n")
    with pytest.raises(BundleError):
        check(MESSAGE, signature, tmp_path / "pin")


@pytest.mark.parametrize("check", BOTH)
def test_a_second_pinned_key_is_accepted(check, key, signature):
    other = pin_line(Ed25519PrivateKey.generate().public_key())
    key.allowed_signers.write_text(other + key.allowed_signers.read_text())
    check(MESSAGE, signature, key.allowed_signers)


@pytest.mark.parametrize("check", BOTH)
@pytest.mark.parametrize("cut", [0, 1, 60, 200])
def test_a_cut_signature_is_refused(check, cut, key, signature):
    signature.write_text(signature.read_text()[:cut])
    with pytest.raises(BundleError):
        check(MESSAGE, signature, key.allowed_signers)


@needs_ssh_keygen
def test_our_bytes_are_those_of_ssh_keygen(key, tmp_path):
    (tmp_path / "m").write_bytes(MESSAGE)
    private = key.allowed_signers.parent / "signing_key"
    command = ["ssh-keygen", "-Y", "sign", "-f", private, "-n", NAMESPACE, tmp_path / "m"]
    subprocess.run(command, check=True, capture_output=True)
    assert (tmp_path / "m.sig").read_text() == sign(MESSAGE, key.private)


@needs_ssh_keygen
def test_fingerprint_is_that_of_ssh_keygen(key):
    private = key.allowed_signers.parent / "signing_key"
    shown = subprocess.run(["ssh-keygen", "-l", "-f", private], check=True, capture_output=True)
    assert key.fingerprint in shown.stdout.decode()


def test_no_ssh_keygen_is_a_clear_refusal(monkeypatch, key, signature):
    monkeypatch.setenv("PATH", "/nonexistent")
    with pytest.raises(BundleError, match="install openssh-client"):
        ssh_keygen_verify(MESSAGE, signature, key.allowed_signers)


def test_key_is_made_once_and_is_private(tmp_path):
    first, second = (signing_key(tmp_path / "keys", {}) for _ in range(2))
    assert public_blob(first.private.public_key()) == public_blob(second.private.public_key())
    assert stat.S_IMODE((tmp_path / "keys" / "signing_key").stat().st_mode) == 0o600
    assert first.allowed_signers.read_text().startswith(f"{IDENTITY} namespaces=")
    assert sorted(p.name for p in (tmp_path / "keys").iterdir()) == [
        "allowed_signers",
        "signing_key",
    ]


def test_variable_names_the_key(tmp_path, key):
    path = key.allowed_signers.parent / "signing_key"
    named = signing_key(tmp_path / "unused", {KEY_VARIABLE: str(path)})
    assert named.fingerprint == key.fingerprint
    assert not (tmp_path / "unused").exists()


def test_a_pin_of_another_key_is_never_overwritten(tmp_path, key):
    foreign = pin_line(Ed25519PrivateKey.generate().public_key())
    key.allowed_signers.write_text(foreign)
    with pytest.raises(SigningKeyError, match="is not the key pinned") as caught:
        signing_key(tmp_path / "keys", {})
    assert key.allowed_signers.read_text() == foreign
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


def test_key_that_others_can_read_is_refused(tmp_path, key):
    (tmp_path / "keys" / "signing_key").chmod(0o644)
    with pytest.raises(SigningKeyError, match="chmod 600"):
        signing_key(tmp_path / "keys", {})


@pytest.mark.parametrize("content", [b"", b"no key", b"-----BEGIN OPENSSH PRIVATE KEY-----\n"])
def test_file_that_is_no_key(tmp_path, content):
    path = tmp_path / "k"
    path.write_bytes(content)
    path.chmod(0o600)
    with pytest.raises(SigningKeyError, match="ssh-keygen -t ed25519"):
        signing_key(tmp_path, {KEY_VARIABLE: str(path)})


def test_missing_named_key_is_not_made(tmp_path):
    with pytest.raises(SigningKeyError, match="cannot read"):
        signing_key(tmp_path, {KEY_VARIABLE: str(tmp_path / "absent")})
    assert list(tmp_path.iterdir()) == []
