"""What the report reads: one run's files and, through its records, the stage folders.

A file that is missing or cannot be read becomes `None` and a sentence in `RunFiles.problems`; the
page says so. Nothing here guesses a value.
"""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from configs.schema.quantize import recipe_of
from tasks.artifacts.progress import read_metrics

QUANT_ORDER = ("F16", "Q8_0", "Q5_K_M", "Q4_K_M", "IQ2_M")


def dig(value: Any, *keys: str) -> Any:
    """`value[k1][k2]…`; None where any part is missing or no mapping."""
    for key in keys:
        if not isinstance(value, dict):
            return None
        value = value.get(key)
    return value


def table(value: Any, *keys: str) -> dict[str, Any]:
    """A mapping inside `value`, empty where there is none."""
    found = dig(value, *keys)
    return found if isinstance(found, dict) else {}


def rows(value: Any, *keys: str) -> list[dict[str, Any]]:
    """The mappings of a list inside `value`, empty where there is none."""
    found = dig(value, *keys) if keys else value
    return [row for row in found if isinstance(row, dict)] if isinstance(found, list) else []


def strings(value: Any, *keys: str) -> list[str]:
    """The texts of a list inside `value`, empty where there is none."""
    found = dig(value, *keys)
    return [text for text in found if isinstance(text, str)] if isinstance(found, list) else []


@dataclass
class RunFiles:
    """One run's folder, opened for reading."""

    run_dir: Path
    problems: list[str] = field(default_factory=list)
    """What was there and could not be read."""

    def __post_init__(self) -> None:
        self.summary = self._mapping(self.run_dir / "summary.json")
        self.records = self._mapping(self.run_dir / "records.json")
        self.config = self._mapping(self.run_dir / "config.json")

    def record(self, stage: str) -> dict[str, Any]:
        """The record a stage returned, empty where it did not run."""
        return table(self.records, stage)

    def ran(self, stage: str) -> bool:
        """Whether the run has a record of the stage."""
        return bool(self.record(stage))

    def folder(self, stage: str) -> Path | None:
        """The stage's output folder; None where it did not run or is gone."""
        uri = self.record(stage).get("uri")
        if not isinstance(uri, str) or not uri:
            return None
        # relative to the working directory of the run; the report may be made from elsewhere
        for base in (Path(), *self.run_dir.resolve().parents):
            path = base / uri
            if path.is_dir():
                return path
            if path.is_file():
                return path.parent
        self._complain(f"{stage}: {uri} is in the records but not on disk")
        return None

    def json(self, stage: str, name: str) -> dict[str, Any]:
        """A JSON object out of a stage's folder, empty where there is none."""
        folder = self.folder(stage)
        return self._mapping(folder / name) if folder else {}

    def own_json(self, folder: str, name: str) -> dict[str, Any]:
        """A JSON object out of the run's own folder, empty where there is none."""
        return self._mapping(self.run_dir / folder / name)

    def lines(self, stage: str, name: str) -> list[dict[str, Any]]:
        """The objects of a JSONL file of a stage's folder; lines that do not parse are counted."""
        folder = self.folder(stage)
        path = folder / name if folder else None
        if path is None or not path.is_file():
            return []
        found, bad = [], 0
        for raw in path.read_bytes().split(b"\n"):
            if not raw.strip():
                continue
            try:
                line = json.loads(raw)
            except ValueError:
                bad += 1
                continue
            bad += not isinstance(line, dict)
            found += [line] if isinstance(line, dict) else []
        if bad:
            self._complain(f"{stage}: {bad} lines of {name} could not be read")
        return found

    def metrics(self, stage: str) -> list[dict[str, Any]]:
        """Metric lines of a stage in step order; of a step taken twice the later one counts."""
        folder = self.folder(stage)
        path = folder / "metrics.jsonl" if folder else None
        if path is None or not path.is_file():
            return []
        by_step: dict[float, dict[str, Any]] = {}
        for line in read_metrics(path):
            if isinstance(line, dict) and isinstance(line.get("step"), int):
                merged = {**table(by_step.get(line["step"]), "values"), **table(line, "values")}
                by_step[line["step"]] = {**line, "values": merged}
        return [by_step[step] for step in sorted(by_step)]

    def _mapping(self, path: Path) -> dict[str, Any]:
        if not path.is_file():
            return {}
        try:
            value = json.loads(path.read_bytes())
        except (ValueError, OSError) as error:
            self._complain(f"{path.name} could not be read: {error}")
            return {}
        if not isinstance(value, dict):
            self._complain(f"{path.name} holds no JSON object")
            return {}
        return value

    def _complain(self, sentence: str) -> None:
        if sentence not in self.problems:
            self.problems.append(sentence)


def _quant_place(name: str) -> tuple[int, str]:
    """Large types first; a repaired one stands behind the type it comes from; unknown ones last."""
    recipe = recipe_of(name)
    place = QUANT_ORDER.index(recipe) if recipe in QUANT_ORDER else len(QUANT_ORDER)
    return place, name


def quantised(files: RunFiles) -> dict[str, dict[str, Any]]:
    """Facts of every GGUF file, largest type first: the stage's own under the run's summary."""
    made = table(files.json("quantize", "parity.json"), "quant")
    told = table(files.summary, "quant")
    names = sorted(set(made) | set(told), key=_quant_place)
    return {
        name: {
            **table(made, name),
            **{key: value for key, value in table(told, name).items() if value is not None},
        }
        for name in names
    }
