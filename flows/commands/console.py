"""What every command shares: the console, how errors and findings are shown, exit codes."""

import functools
import logging
import sys
from collections.abc import Callable, Iterable
from contextvars import ContextVar
from typing import ParamSpec

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from flows.doctor.findings import Finding

BAD_INPUT, FAILED, INTERRUPTED = 2, 1, 130
OUR_PACKAGES = frozenset({"flows", "tasks", "configs", "quantize", "deployment"})
SHOWN_BASES = (ValueError, LookupError, OSError, RuntimeError, ArithmeticError, TypeError)
"""Standard classes our named errors derive from; anything not ours is raised again."""
MARKS = {
    "pass": "[green]pass[/]",
    "warn": "[yellow]warn[/]",
    "fail": "[bold red]fail[/]",
    "open": "[dim]open[/]",
}
DEBUG: ContextVar[bool] = ContextVar("rl_pipeline_debug", default=False)
"""Whether `--debug` was given: tracebacks are then shown."""
Arguments = ParamSpec("Arguments")


def console(*, stderr: bool = False) -> Console:
    """A console on standard output or error as they are now; 100 columns without a terminal."""
    stream = sys.stderr if stderr else sys.stdout
    return Console(file=stream, width=None if stream.isatty() else 100, highlight=False)


class _StderrHandler(logging.Handler):
    """Writes to standard error as it is at that moment, so that a live picture stays whole."""

    def emit(self, record: logging.LogRecord) -> None:
        """Write one line."""
        sys.stderr.write(self.format(record) + "\n")


def log_to_stderr(debug: bool) -> None:
    """Show warnings of every library, or all there is to say with `--debug`."""
    handler = _StderrHandler(level=logging.DEBUG if debug else logging.WARNING)
    handler.setFormatter(logging.Formatter("%(levelname)s %(name)s %(message)s"))
    logging.basicConfig(level=logging.INFO if debug else logging.WARNING, handlers=[handler])


def is_ours(error: BaseException) -> bool:
    """Whether an error's class is one of this project's."""
    return type(error).__module__.partition(".")[0] in OUR_PACKAGES


def exit_code(error: BaseException) -> int:
    """2 for input that cannot be used, 1 for work that failed."""
    is_input = isinstance(error, ValueError | LookupError | FileNotFoundError | TypeError)
    return BAD_INPUT if is_input else FAILED


def reports_errors(command: Callable[Arguments, None]) -> Callable[Arguments, None]:
    """Show our named errors in words, without a traceback, and exit with the right code."""

    @functools.wraps(command)
    def wrapped(*args: Arguments.args, **kwargs: Arguments.kwargs) -> None:
        try:
            command(*args, **kwargs)
        except KeyboardInterrupt:
            show_interrupted()
            raise typer.Exit(INTERRUPTED) from None
        except SHOWN_BASES as error:
            if DEBUG.get() or not is_ours(error):
                raise
            show_error(error)
            raise typer.Exit(exit_code(error)) from error

    return wrapped


def show_interrupted() -> None:
    """Say that nothing was lost."""
    console(stderr=True).print(
        "\n[yellow]interrupted[/]: finished stages are kept, and a stage half-way goes on from its "
        "checkpoint. Next: the same command again"
    )


def show_error(error: BaseException) -> None:
    """An error as a person needs it: what, where, what is allowed, what to do."""
    from configs.problems import ConfigError

    out = console(stderr=True)
    if isinstance(error, ConfigError):
        show_config_error(error, out)
        return
    text = error.args[0] if isinstance(error, KeyError) and error.args else error
    out.print(f"[bold red]error[/] {escape(str(text))}", soft_wrap=True)
    log_path = getattr(error, "log_path", None)
    if log_path and str(log_path) not in str(text):
        out.print(f"  log: {escape(str(log_path))}")
    out.print("[dim]  rl-pipeline --debug … shows the traceback[/]")


def show_config_error(error: "BaseException", out: Console) -> None:
    """Each problem on lines of its own: key, value, origin, what is allowed, what was meant."""
    from configs.problems import MISSING, shorten

    source = getattr(error, "source", "")
    problems = getattr(error, "problems", ())
    plural = "s" if len(problems) != 1 else ""
    head = f"{len(problems)} problem{plural} in the config"
    out.print(f"[bold red]error[/] {head}{f' {escape(source)}' if source else ''}")
    for problem in problems:
        value = "" if problem.value is MISSING else escape(shorten(problem.value))
        key = escape(problem.key)
        out.print(f"  [bold]{key}[/]{' = ' if key and value else ''}{value}")
        for label, text in (
            ("from", problem.origin),
            ("", problem.expected),
            ("next", problem.suggestion),
        ):
            if text:
                out.print(
                    f"      [dim]{label}{': ' if label else ''}[/]{escape(text)}", soft_wrap=True
                )
    out.print("[dim]  rl-pipeline config rl.optimiser explains keys[/]")


def findings_table(findings: Iterable[Finding], title: str) -> Table:
    """Findings as a table: status, what, what it looked at, and below that what to do."""
    table = Table(title=title, title_justify="left", box=None, padding=(0, 2, 0, 0))
    for heading in ("", "what", "looked at → what to do"):
        table.add_column(heading, overflow="fold")
    for finding in findings:
        remedy = f"\n[yellow]→ {escape(finding.remedy)}[/]" if finding.remedy else ""
        table.add_row(
            MARKS[finding.status], escape(finding.name), f"{escape(finding.looked_at)}{remedy}"
        )
    return table
