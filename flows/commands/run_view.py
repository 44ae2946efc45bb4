"""What `rl-pipeline run` and `plan` do: settings in, the run watched, the summary out."""

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from configs.load import ResolvedConfig, resolve_config
from configs.schema import PipelineConfig
from flows.commands.console import DEBUG, console
from flows.commands.live import RunView
from flows.commands.summary_view import show_summary
from flows.doctor.examine import examine_profile
from flows.doctor.probes import machine_facts
from flows.run_ends import NightSkippedError
from tasks.stages import STAGES

MARK = {"HIT": "[green]HIT[/]", "RUN": "[cyan]RUN[/]"}


class UnknownStageError(ValueError):
    """An option names a stage there is not."""


def check_stage_names(option: str, names: Sequence[str]) -> None:
    """Refuse names of stages there are not.

    Raises:
        UnknownStageError: names the option, the value and the choices.
    """
    for name in names:
        if name not in STAGES:
            raise UnknownStageError(
                f"{option} {name}: no such stage; choose from {', '.join(STAGES)}"
            )


class ProfileRefusedError(ValueError):
    """This machine cannot run this profile."""


@dataclass(frozen=True)
class RunOptions:
    """What `rl-pipeline run` was given."""

    config: str
    overrides: Sequence[str] = ()
    force: Sequence[str] = ()
    stop_after: str | None = None
    runs: Path = Path("runs")
    anyway: bool = False
    """Start although `doctor` refuses the profile."""
    nightly: bool = False
    """Be a night, as the schedule starts one."""


def run_and_show(options: RunOptions) -> None:
    """Run the pipeline with a live picture and print its summary.

    Raises:
        ConfigError: a key or value cannot be used.
        ProfileRefusedError: the machine lacks what the profile needs.
        StageFailedError: a stage ended without a result.
    """
    check_stage_names("--force", options.force)
    check_stage_names("--stop-after", [options.stop_after] if options.stop_after else [])
    resolved = resolve_config(options.config, options.overrides)
    out = console()
    show_notes(resolved, out)
    if not options.anyway:
        refuse_what_cannot_run(resolved.config, options)

    if not DEBUG.get():
        os.environ.setdefault("PREFECT_LOGGING_LEVEL", "CRITICAL")  # the picture says it all

    from flows.launch import run_pipeline

    try:
        with RunView(out) as view:
            summary_path = run_pipeline(
                resolved.config,
                force=tuple(options.force),
                stop_after=options.stop_after,
                nightly=options.nightly,
                on_event=view,
                runs_dir=options.runs,
            )
    except NightSkippedError as skipped:
        out.print(f"[yellow]skipped[/] {escape(str(skipped))}", soft_wrap=True)
        return
    if out.is_terminal:
        for warning in view.warnings:
            out.print(f"[yellow]![/] {escape(warning)}", soft_wrap=True)
    show_summary(read_summary(summary_path), summary_path.parent, out)


def refuse_what_cannot_run(config: PipelineConfig, options: RunOptions) -> None:
    """Compare the profile with the machine before anything is started.

    Raises:
        ProfileRefusedError: lists what is missing and the remedy for each.
    """
    findings = examine_profile(config, machine_facts(options.runs), options.runs)
    failed = [finding for finding in findings if finding.status == "fail"]
    if failed:
        reasons = "\n".join(f"  {f.name}: {f.looked_at}; {f.remedy}" for f in failed)
        raise ProfileRefusedError(
            f"profile {config.profile} cannot run on this machine\n{reasons}\n"
            f"  look closer: rl-pipeline doctor -c {options.config}; start all the same: --anyway"
        )


def read_summary(path: Path) -> dict[str, Any]:
    """A run's summary.json."""
    body: dict[str, Any] = json.loads(path.read_bytes())
    return body


def show_notes(resolved: ResolvedConfig, out: Console) -> None:
    """What changed in the config without being asked for by name."""
    for note in resolved.notes:
        out.print(f"[yellow]note[/] {escape(note)}", soft_wrap=True)


def show_plan(config: str, overrides: Sequence[str], force: Sequence[str], runs: Path) -> None:
    """Print HIT or RUN for every stage, with the reason."""
    check_stage_names("--force", force)
    resolved = resolve_config(config, overrides)

    from flows.plan import plan

    out = console()
    show_notes(resolved, out)
    table = Table(box=None, padding=(0, 2, 0, 0))
    for heading in ("stage", "", "why", "key"):
        table.add_column(heading, overflow="fold")
    lines = plan(resolved.config, runs_dir=runs, force=tuple(force))
    for line in lines:
        table.add_row(line.stage, MARK[line.action], escape(line.why), (line.key or "")[:12])
    out.print(table)
    todo = sum(line.action == "RUN" for line in lines)
    out.print(
        f"\n{todo} of {len(lines)} stages to run: rl-pipeline run -c {escape(config)}"
        f"{''.join(f' {escape(o)}' for o in overrides)}"
    )
