"""The policy's own rollouts, as the RL stage leaves them, for importance matrix and parity."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quantize.errors import RolloutsError

IMATRIX, PARITY = "imatrix", "parity"


@dataclass(frozen=True)
class RolloutTokens:
    """One rollout: its ids, and which of them the policy sampled."""

    token_ids: tuple[int, ...]
    action_mask: tuple[bool, ...]


def read_rollouts(path: Path) -> dict[str, list[RolloutTokens]]:
    """Rollouts by split, in file order. Ids are kept as sampled, never re-tokenised.

    Raises:
        RolloutsError: no file, or a line that is no rollout (with its number).
    """
    if not path.is_file():
        raise RolloutsError(f"there are no rollouts at {path}; run the rl stage")
    found: dict[str, list[RolloutTokens]] = {IMATRIX: [], PARITY: []}
    for number, raw in enumerate(path.read_bytes().split(b"\n"), start=1):
        if not raw.strip():
            continue
        try:
            line = json.loads(raw)
        except json.JSONDecodeError as error:
            raise RolloutsError(f"{path}, line {number}: not JSON ({error})") from error
        split, rollout = _parse(line, f"{path}, line {number}")
        found.setdefault(split, []).append(rollout)
    return found


def _parse(line: Any, where: str) -> tuple[str, RolloutTokens]:
    if not isinstance(line, Mapping):
        raise RolloutsError(f"{where}: expected an object, not {type(line).__name__}")
    missing = {"token_ids", "action_mask", "split"} - set(line)
    if missing:
        raise RolloutsError(f"{where}: no {', '.join(sorted(missing))}")
    ids, mask = line["token_ids"], line["action_mask"]
    if not ids or len(ids) != len(mask):
        raise RolloutsError(
            f"{where}: {len(ids)} token_ids and {len(mask)} entries in action_mask; expected "
            "equally many, at least one"
        )
    return str(line["split"]), RolloutTokens(tuple(map(int, ids)), tuple(map(bool, mask)))


def take(
    rollouts: Mapping[str, list[RolloutTokens]], split: str, count: int, max_length: int
) -> list[RolloutTokens]:
    """The first `count` rollouts of a split, those that fit `max_length` tokens.

    Raises:
        RolloutsError: there is none.
    """
    fitting = [r for r in rollouts.get(split, []) if len(r.token_ids) <= max_length]
    if not fitting:
        raise RolloutsError(
            f"rollouts.jsonl has no rollout of split {split!r} with at most {max_length} tokens; "
            "the rl stage writes them at its end"
        )
    return fitting[:count]
