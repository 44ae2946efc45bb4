"""The key that clients of the agent must send, kept in a file that only its owner can read.

Standard library only, Python 3.10.
"""

import hmac
import os
import secrets
import stat
from pathlib import Path

LEAST_LENGTH, MOST_LENGTH = 16, 512


class ApiKeyError(ValueError):
    """The key file is missing, readable by others, or holds no key; the agent does not start."""


def read_key(path: Path) -> str:
    """The key in a file.

    Raises:
        ApiKeyError: naming the file, what is wrong with it and what to do.
    """
    try:
        info = path.stat()
        if not stat.S_ISREG(info.st_mode):
            raise ApiKeyError(f"{path} is not a regular file")
        if info.st_mode & 0o077:
            raise ApiKeyError(
                f"{path} has mode {stat.S_IMODE(info.st_mode):04o} and can be read or changed by "
                f"others; run: chmod 600 {path}, and make a new key if others may have seen it"
            )
        raw = path.read_bytes()[: MOST_LENGTH + 2]
    except FileNotFoundError:
        raise ApiKeyError(
            f"there is no API key at {path}; make one: "
            f"(umask 077; head -c 32 /dev/urandom | base64 | tr -d '=+/' > {path})"
        ) from None
    except OSError as error:
        raise ApiKeyError(f"cannot read the API key {path}: {error.strerror}") from None
    key = raw.decode("ascii", errors="replace").strip()
    if not LEAST_LENGTH <= len(key) <= MOST_LENGTH or not key.isascii() or not key.isprintable():
        raise ApiKeyError(
            f"{path} holds no key: one line of {LEAST_LENGTH} to {MOST_LENGTH} printable ASCII "
            "characters is expected"
        )
    if any(character.isspace() for character in key):
        raise ApiKeyError(f"{path} holds more than one word; a key has no spaces")
    return key


def make_key(path: Path) -> None:
    """Write a random key, mode 0600; one that is there already is kept.

    Raises:
        ApiKeyError: the file cannot be made.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        return
    except OSError as error:
        raise ApiKeyError(f"cannot make an API key at {path}: {error.strerror}") from None
    with os.fdopen(handle, "w") as file:
        file.write(secrets.token_urlsafe(32) + "\n")
        file.flush()
        os.fsync(file.fileno())


def allows(authorization: "str | None", key: str) -> bool:
    """Whether an `Authorization` header carries the key; takes as long for any wrong one."""
    sent = (authorization or "").encode("utf-8", errors="replace")
    return hmac.compare_digest(sent, f"Bearer {key}".encode())
