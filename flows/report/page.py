"""`report.html`: one run on one self-contained page, made from the run's own files.

The page needs no network and runs no script; it opens from a file. It only reads: a figure that a
stage did not leave is said to be missing, never guessed and never shown as 0. What a model wrote is
escaped, and its characters that do not print are shown as marks.
"""

from pathlib import Path
from typing import Any

from flows.report.cost import cost_section
from flows.report.curves import rl_section, sft_section
from flows.report.data import RunFiles
from flows.report.edge import edge_section
from flows.report.frontier import frontier_section
from flows.report.lineage import lineage_section
from flows.report.matrices import matrices_section
from flows.report.pages import page_template
from flows.report.promotion import promotion_section
from flows.report.sections import data_section, headline, heldout_section, quant_section
from flows.report.side_by_side import side_by_side_section
from flows.report.transcripts import transcripts
from tasks.artifacts import write_atomic

SECTIONS = (
    ("result", "Result"),
    ("promotion", "Promotion"),
    ("heldout", "Held-out"),
    ("rl", "RL"),
    ("sft", "SFT"),
    ("quant", "Quantisation"),
    ("side", "Side by side"),
    ("edge", "Device"),
    ("transcripts", "Transcripts"),
    ("cost", "Cost"),
    ("data", "Data"),
    ("lineage", "Lineage"),
)
_TEMPLATE = Path(__file__).with_name("report_template.html.j2")


class RunFolderError(FileNotFoundError):
    """There is no run where the report was asked for."""


def write_report(run_dir: Path) -> Path:
    """Write `run_dir/report.html` and return its path.

    Raises:
        RunFolderError: `run_dir` is no folder.
        ArtifactWriteError: the disk refused.
    """
    if not run_dir.is_dir():
        raise RunFolderError(
            f"run={run_dir} is no folder; give a run's folder, such as runs/latest"
        )
    return write_atomic(run_dir / "report.html", render(RunFiles(run_dir)))


def render(files: RunFiles) -> str:
    """The page as text."""
    values: dict[str, Any] = {
        "head": headline(files),
        "promotion": promotion_section(files),
        "heldout": heldout_section(files),
        "rl": rl_section(files),
        "sft": sft_section(files),
        "quant": quant_section(files),
        "frontier": frontier_section(files),
        "matrices": matrices_section(files),
        "side": side_by_side_section(files),
        "edge": edge_section(files),
        "transcripts": transcripts(files),
        "cost": cost_section(files),
        "data": data_section(files),
        "lineage": lineage_section(files),
    }
    # `problems` comes last: reading the sections above is what finds them
    return page_template(_TEMPLATE).render(**values, sections=SECTIONS, problems=files.problems)
