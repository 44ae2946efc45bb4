"""The RL stage in a process of its own, so that a test can kill it: argument 1 is a JSON file."""

import json
import sys
from pathlib import Path

from configs.schema import PipelineConfig
from tasks.artifacts.progress import Reporter
from tasks.artifacts.record import ArtifactRecord
from tasks.rl.stage import run


def main(order: Path) -> None:
    """Run what the file says; the record goes to `record.json` in the stage's folder."""
    what = json.loads(order.read_text())
    out = Path(what["out"])
    inputs = {name: ArtifactRecord.model_validate(r) for name, r in what["inputs"].items()}
    config = PipelineConfig.model_validate(what["config"])
    record = run(config, inputs, out, Reporter(out))
    (out / "record.json").write_text(record.model_dump_json())


if __name__ == "__main__":
    main(Path(sys.argv[1]))
