"""Options that several commands share: one name, one help, one default."""

from pathlib import Path
from typing import Annotated

import typer

RUNS = Path("runs")
DEFAULT_PROFILE = "calculator"

Profile = Annotated[
    str, typer.Option("--config", "-c", help="YAML file, or the name of a profile in configs/.")
]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[KEY=VALUE]...", help="Overrides, as in rl.steps=20.", show_default=False
    ),
]
Runs = Annotated[Path, typer.Option("--runs", envvar="RL_PIPELINE_RUNS", help="Folder of runs.")]
