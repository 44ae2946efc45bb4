"""`python -m tasks.stage_process REQUEST.json`: runs one stage function in a fresh process.

The record goes to `request.result`, atomically. What goes wrong is written to `request.error` as
`{type, message}` before Python prints its traceback to the stage's log and exits with 1, so that
the parent can name it. Nothing is seeded here: a stage seeds itself from its config.
"""

import importlib
import logging
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

from pydantic import BaseModel, ConfigDict

from configs.schema import PipelineConfig
from tasks.artifacts import ArtifactRecord, write_json
from tasks.artifacts.progress import Reporter
from tasks.process_tree import die_with_parent
from tasks.stages import masked

StageCall = Callable[..., ArtifactRecord]


class StageRequest(BaseModel):
    """What a stage process is asked to do; paths are relative to the working directory."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    stage: str
    entry: str
    """`module:function`."""
    slice: tuple[str, ...]
    config: dict[str, Any]
    """The whole resolved config, as JSON data."""
    inputs: dict[str, ArtifactRecord]
    out_dir: str
    result: str
    error: str
    facts: dict[str, Any] = {}
    """What only the run knows and no result depends on: ids, git state."""


def resolve_entry(entry: str) -> StageCall:
    """The function a `module:function` string names."""
    module, _, name = entry.partition(":")
    call: StageCall = getattr(importlib.import_module(module), name)
    return call


def run_request(request: StageRequest) -> ArtifactRecord:
    """Call the stage function with the settings that reach it."""
    config = masked(PipelineConfig.model_validate(request.config), request.slice)
    out_dir = Path(request.out_dir)
    return resolve_entry(request.entry)(
        config, dict(request.inputs), out_dir, Reporter(out_dir), dict(request.facts)
    )


def _note_errors(path: Path) -> None:
    """Have every uncaught error written to `path` before it is printed."""

    def note(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        try:
            write_json(path, {"type": kind.__name__, "message": str(error)})
        except OSError as failure:
            logging.getLogger(__name__).error("could not write %s: %s", path, failure)
        sys.__excepthook__(kind, error, trace)

    sys.excepthook = note


def main(argv: list[str]) -> int:
    """Run the request in `argv[0]`; `argv[1]` is the parent's pid, with which we die."""
    if len(argv) > 1:
        # started by the reaper, whose pid its child cannot know beforehand: 0 means "whoever"
        die_with_parent(int(argv[1]) or os.getppid())
    logging.basicConfig(
        stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(name)s %(message)s"
    )
    request = StageRequest.model_validate_json(Path(argv[0]).read_bytes())
    _note_errors(Path(request.error))
    record = run_request(request)
    write_json(Path(request.result), record.model_dump(mode="json"))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
