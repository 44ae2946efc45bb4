"""What `rl-pipeline doctor` prints."""

from collections.abc import Sequence
from pathlib import Path

from rich.markup import escape
from rich.table import Table

from configs.load import ConfigError, load_config, profiles
from flows.commands.console import MARKS, console, findings_table
from flows.doctor.engine import examine_engine
from flows.doctor.examine import examine_machine, examine_profile
from flows.doctor.findings import worst
from flows.doctor.probes import machine_facts
from tasks.artifacts.provenance import project_root


def show_machine(runs: Path) -> bool:
    """Print the machine's findings; False where one of them stops every run."""
    findings = examine_machine(project_root(), runs, machine_facts(runs))
    console().print(findings_table(findings, "this machine"))
    return worst(findings) != "fail"


def show_profile(config: str, overrides: Sequence[str], runs: Path) -> bool:
    """Print whether this profile can run here, with the reasons where not."""
    loaded = load_config(config, overrides)
    facts = machine_facts(runs)
    findings = [*examine_profile(loaded, facts, runs), *examine_engine(loaded, facts, runs)]
    out = console()
    out.print(findings_table(findings, f"\nprofile {loaded.profile}"))
    reasons = [f for f in findings if f.status == "fail"]
    if not reasons:
        out.print(f"\n[green]{escape(loaded.profile)} can run here[/]: rl-pipeline run -c {config}")
        return True
    out.print(f"\n[bold red]{escape(loaded.profile)} is refused here[/]")
    for finding in reasons:
        out.print(f"  {escape(finding.name)}: {escape(finding.looked_at)}")
    return False


def show_profiles(runs: Path) -> None:
    """Print which of the project's profiles this machine can run."""
    facts = machine_facts(runs)
    table = Table(title="\nprofiles", title_justify="left", box=None, padding=(0, 2, 0, 0))
    for heading in ("", "profile", "why not, or what to mind"):
        table.add_column(heading, overflow="fold")
    for name, path in profiles().items():
        try:
            findings = examine_profile(load_config(path), facts, runs)
        except ConfigError as error:
            table.add_row(MARKS["fail"], name, escape(str(error)))
            continue
        status = worst(findings)
        noted = [f"{f.name}: {f.looked_at}" for f in findings if f.status == status != "pass"]
        table.add_row(MARKS[worst(findings)], name, escape("; ".join(noted)))
    console().print(table)
