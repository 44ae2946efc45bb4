"""The decisions on quarantined rows: append-only, chained by hash, signed for whoever took them.

`runs/quarantine/releases.jsonl`. Every line holds the hash of the one before it and a signature by
the key that signs bundles, so a decision that was edited, dropped or written by hand is refused by
the next data prep instead of being honoured.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from deployment.jetson.signing import SigningKey, signing_key
from tasks.artifacts import ArtifactRecord, hash_file, hash_json
from tasks.artifacts.append_log import locked_log, read_log
from tasks.gates.releases import why_bound
from tasks.tracking.promotion_ledger import this_actor

FILE = Path("quarantine") / "releases.jsonl"
FIRST = "0" * 64
MAX_TEXT = 500
_SPACE = b"rl-pipeline-quarantine\0"
Action = Literal["release", "withdraw"]


class ReleaseRefusedError(ValueError):
    """This row cannot be released from this check."""


class ReleaseFileError(ValueError):
    """The decision file was changed, or is signed by another key; nothing in it is honoured."""


@dataclass(frozen=True)
class Decision:
    """One decision to be written down."""

    action: Action
    row_sha256: str
    code: str
    row_id: str | None
    source: str
    found: str
    """What the check had found, as the quarantine says it."""
    why: str
    """The person's own words."""


def decisions_path(runs: Path) -> Path:
    """Where the decisions of a runs folder lie."""
    return runs / FILE


def decide(runs: Path, decision: Decision, actor: str | None = None) -> dict[str, Any]:
    """Write a decision down; returns its line.

    Raises:
        ReleaseRefusedError: the check cannot be waived, or no reason is given.
        ReleaseFileError: what stands in the file already cannot be relied on.
        SigningKeyError: there is no key to sign with.
    """
    if not decision.why.strip():
        raise ReleaseRefusedError("say why: --reason 'checked by hand, the prompt is meant so'")
    bound = why_bound(decision.code, decision.found)
    if bound is not None and decision.action == "release":
        raise ReleaseRefusedError(
            f"row {decision.row_id or decision.row_sha256[:10]} stays out of training "
            f"({decision.code}): {bound}"
        )
    key = signing_key(runs / "keys")
    path = decisions_path(runs)
    with locked_log(path) as log:
        lines = log.lines()
        rows = checked(path, lines.rows, lines.unreadable, key)
        body = {
            "action": decision.action,
            "row_sha256": decision.row_sha256,
            "code": decision.code,
            "row_id": decision.row_id,
            "source": decision.source,
            "found": decision.found[:MAX_TEXT],
            "why": decision.why.strip()[:MAX_TEXT],
            "actor": (actor or this_actor())[:MAX_TEXT],
            "time": time.time(),
            "previous": rows[-1]["hash"] if rows else FIRST,
        }
        sealed = hash_json(body)
        signature = key.private.sign(_SPACE + sealed.encode()).hex()
        line = {**body, "hash": sealed, "signer": key.fingerprint, "signature": signature}
        log.append(line)
    return line


def checked(
    path: Path,
    rows: Sequence[Mapping[str, Any]],
    unreadable: Sequence[int],
    key: SigningKey,
) -> list[Mapping[str, Any]]:
    """The lines of a decision file, each proven.

    Raises:
        ReleaseFileError: names the line.
    """
    if unreadable:
        raise _untrusted(path, unreadable[0], "cannot be read")
    previous = FIRST
    public = key.private.public_key()
    for number, row in enumerate(rows, start=1):
        body = {k: v for k, v in row.items() if k not in ("hash", "signer", "signature")}
        if row.get("previous") != previous:
            raise _untrusted(path, number, "does not follow the line before it")
        if row.get("hash") != hash_json(body):
            raise _untrusted(path, number, "was changed")
        if not _signed(row, public):
            raise _untrusted(
                path,
                number,
                f"is not signed by {key.fingerprint} (it says {row.get('signer')})",
            )
        previous = str(row["hash"])
    return list(rows)


def _signed(row: Mapping[str, Any], public: Ed25519PublicKey) -> bool:
    try:
        signature = bytes.fromhex(str(row.get("signature")))
        public.verify(signature, _SPACE + str(row["hash"]).encode())
    except (InvalidSignature, ValueError):
        return False
    return True


def _untrusted(path: Path, number: int, why: str) -> ReleaseFileError:
    return ReleaseFileError(
        f"{path}, line {number} {why}; no row is released on its word. Put the file back as it "
        "was, or move it away and release the rows again"
    )


def read_decisions(runs: Path) -> list[Mapping[str, Any]]:
    """All decisions, oldest first, each proven; none where there is no file.

    Raises:
        ReleaseFileError: the file cannot be relied on.
    """
    path = decisions_path(runs)
    if not path.exists():
        return []
    lines = read_log(path)
    return checked(path, lines.rows, lines.unreadable, signing_key(runs / "keys"))


def released_rows(runs: Path) -> dict[str, ArtifactRecord]:
    """The decision file as an input of data prep, proven; empty where nobody decided anything.

    Raises:
        ReleaseFileError: the file cannot be relied on.
    """
    path = decisions_path(runs)
    if not read_decisions(runs):
        return {}
    record = ArtifactRecord(kind="releases", uri=path.as_posix(), sha256=hash_file(path))
    return {"releases": record}
