"""`python -m tests.figures.run SUITE [--name FIGURE] [pytest arguments]`: measure and gather.

Prints a short table and writes `runs/<suite>/latest.json`. The exit code is pytest's: a figure
that misses its target is reported as missed, an error in measuring it fails.
"""

import subprocess
import sys

from rich.console import Console
from rich.table import Table

from tests.figures.catalogue import FIGURES, Suite
from tests.figures.record import forget, gather


def show(suite: Suite) -> None:
    """The table of a suite."""
    table = Table(box=None, padding=(0, 2, 0, 0))
    for heading in ("figure", "value", "unit", "target", "met", "note"):
        table.add_column(heading, overflow="fold")
    for name, body in gather(suite).items():
        value = "–" if body["value"] is None else f"{body['value']:.4g}"
        met = "[green]yes[/]" if body["met"] else "[red]no[/]"
        table.add_row(name, value, body["unit"], body["target"], met, body["note"])
    console = Console()
    console.print(table)
    console.print(f"written to runs/{suite}/latest.json")


def main(argv: list[str]) -> int:
    """Run the suite's tests, then gather."""
    suite: Suite = "faults" if argv[0] == "faults" else "bench"
    names = [f.name for f in FIGURES if f.suite == suite]
    rest, chosen = argv[1:], None
    if rest[:1] == ["--name"]:
        chosen, rest = rest[1], rest[2:]
        if chosen not in names:
            print(f"no figure {chosen!r} in {suite}; there are {', '.join(names)}")
            return 2
    forget(suite, [chosen] if chosen else names)
    only = ["--figure", chosen] if chosen else []
    command = [sys.executable, "-m", "pytest", "-m", suite, "-s", *only, *rest]
    code = subprocess.run(command, check=False).returncode
    show(suite)
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
