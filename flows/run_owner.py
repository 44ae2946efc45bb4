"""Whose process a run is: written when it opens, so that a dead owner is told from a slow one."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from tasks.artifacts import write_json
from tasks.tracking.reconcile import owner_lives
from tasks.tracking.tracker import owner_tags

OWNER_NAME = "owner.json"


@dataclass(frozen=True)
class Owner:
    """The process of one run."""

    run_id: str
    flow_run_id: str | None
    tags: dict[str, str]
    """Host, pid and the process's own start, as MLflow's runs carry them."""

    @property
    def lives(self) -> bool:
        """Whether that very process runs; one on another machine is taken as alive."""
        return owner_lives(self.tags)


def sign(run_dir: Path, flow_run_id: str | None) -> Path:
    """Write down that this process does the run."""
    return write_json(run_dir / OWNER_NAME, asdict(Owner(run_dir.name, flow_run_id, owner_tags())))


def owners(runs_dir: Path) -> list[Owner]:
    """The owners of all runs, by run id; a file that cannot be read is passed over."""
    found = []
    for path in sorted(runs_dir.glob(f"*/{OWNER_NAME}")):
        if path.parent.is_symlink():
            continue
        try:
            found.append(Owner(**json.loads(path.read_bytes())))
        except (OSError, ValueError, TypeError):
            continue
    return found
