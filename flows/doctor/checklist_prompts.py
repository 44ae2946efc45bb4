"""The pre-flight row about what SFT really saw, against what RL and evaluation will see."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from configs.schema import PipelineConfig
from flows.doctor.findings import Finding
from tasks.artifacts import ArtifactRecord, hash_file
from tasks.artifacts.append_log import read_log
from tasks.artifacts.store import StageFolder

Records = Mapping[str, ArtifactRecord]
_PROMPTING = ("system_prompt", "tools")
FROM = "newest run"


@dataclass(frozen=True)
class MadeWith:
    """Settings an earlier snapshot was made with."""

    where: str
    """Whose settings they are, for people."""
    settings: Mapping[str, Any]
    """A run's resolved config, as it wrote it down."""


def changed_files(record: ArtifactRecord, folder: str) -> list[str]:
    """Files of a stage's output that are not as the stage left them, or were not there.

    Weights are left out: they are hashed by content elsewhere. Empty where the stage left no list.
    """
    home = record.path
    try:
        key = json.loads((home / ".stage" / "finished.json").read_bytes())["key"]
    except (OSError, ValueError, KeyError, TypeError):
        return []
    mark = StageFolder(home.parents[1], home.parent.name, str(key)).read_mark()
    if mark is None:
        return [".stage/finished.json"]
    left = {n: f["sha256"] for n, f in mark.files.items() if _small(n, folder)}
    found = {
        path.relative_to(home).as_posix(): hash_file(path)
        for path in sorted((home / folder).rglob("*"))
        if path.is_file() and _small(path.relative_to(home).as_posix(), folder)
    }
    return sorted(n for n in left.keys() | found.keys() if left.get(n) != found.get(n))


def _small(name: str, folder: str) -> bool:
    return name.startswith(f"{folder}/") and not name.endswith(".safetensors")


def prompt_settings(
    config: PipelineConfig, records: Records, made_with: tuple[MadeWith, ...]
) -> Finding:
    """System prompt and tools: those of SFT, of its demonstrations, and of what RL starts from."""
    name = "system prompt and tools same as SFT"
    now = f"system prompt {_short(config.system_prompt)}, tools {', '.join(config.tools) or 'none'}"
    if other := _other_systems(records, config.system_prompt):
        return Finding(
            name,
            "fail",
            f"{now}; {other}",
            "take the system messages out of the demonstrations, or set system_prompt to theirs",
        )
    for made in made_with:
        if differing := _differing(config, made):
            kept = made.where != FROM
            return Finding(
                name,
                "fail" if kept else "warn",
                f"{now}; {made.where} was trained with {differing}",
                "RL would go on from a snapshot that never saw this prompt: set it back, or "
                "nightly.start_from=base"
                if kept
                else "the next run trains SFT anew with it; rows below are about the newest run",
            )
    if unused := _unused_systems(records, config.system_prompt):
        return Finding(
            name,
            "warn",
            f"{now}; {unused} training rows came with a system message of their own",
            "it is not used: every conversation gets system_prompt, in SFT, RL and on the device",
        )
    compared = [m.where for m in made_with]
    if "data" in records:
        compared.append("its demonstrations")
    if not compared:
        return Finding(
            name,
            "open",
            f"{now}; one setting for SFT, RL, evaluation and device",
            "check again after a run: its demonstrations are read then",
        )
    return Finding(name, "pass", f"{now}; same as {', '.join(compared)}")


def _differing(config: PipelineConfig, made: MadeWith) -> str:
    """What the earlier snapshot had otherwise, with its value; empty where nothing."""
    plain = config.model_dump(mode="json", include=set(_PROMPTING))
    return ", ".join(
        f"{key}={_short(made.settings.get(key))}"
        for key in _PROMPTING
        if made.settings.get(key) != plain[key]
    )


def _short(value: Any) -> str:
    if value is None:
        return "none"
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 50 else text[:47] + "…"


def _other_systems(records: Records, prompt: str | None) -> str:
    """Demonstrations that begin with another system message; empty where there are none."""
    if "data" not in records:
        return ""
    lines = read_log(records["data"].path / "demonstrations.jsonl").rows
    firsts = [_first(line) for line in lines]
    others = [m["content"] for m in firsts if m.get("role") == "system" and m["content"] != prompt]
    return f"{len(others)} demonstrations say {_short(others[0])} instead" if others else ""


def _first(line: Mapping[str, Any]) -> Mapping[str, Any]:
    messages = line.get("messages")
    return messages[0] if isinstance(messages, list) and messages else {}


def _unused_systems(records: Records, prompt: str | None) -> int:
    if "data" not in records:
        return 0
    rows = read_log(records["data"].path / "train.jsonl").rows
    given = [(row.get("meta") or {}).get("system") for row in rows]
    return sum(system is not None and system != prompt for system in given)


def read_made_with(runs: Path, run_id: str, where: str) -> MadeWith | None:
    """The settings a run wrote down; None where they are gone."""
    try:
        body = json.loads((runs / run_id / "config.json").read_bytes())
    except (OSError, ValueError):
        return None
    return MadeWith(where, body) if isinstance(body, dict) else None


def earlier_settings(
    config: PipelineConfig, runs: Path, newest: str | None
) -> tuple[MadeWith, ...]:
    """Settings of the newest run, and of the champion where a night would start from it.

    Raises:
        LedgerError: the promotion ledger cannot be relied on.
    """
    found = [read_made_with(runs, newest, FROM)] if newest is not None else []
    if config.nightly.start_from != "base":
        from tasks.tracking.promotion_ledger import PromotionLedger, model_name

        champion = PromotionLedger(runs, model_name(config.profile)).champion()
        if champion is not None:
            found.append(read_made_with(runs, champion.run_id, f"champion {champion.name}"))
    return tuple(made for made in found if made is not None)
