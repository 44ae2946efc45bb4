"""Runs the pipeline from this process: environment, lock, Prefect server, then the flow.

Prefect is imported only after its home is set, so that nothing is written to the user's home.
"""

import contextlib
import os
import signal
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from configs.schema import PipelineConfig
from deployment.service_files import services_environment
from flows.prefect_server import TemporaryServer, prefect_environment
from flows.run_id import new_run_id
from flows.run_lock import RunLock, RunLockedError
from flows.services.databases import DatabaseUnusableError
from flows.services.store import prepare_databases
from tasks.artifacts import write_json
from tasks.events import Event, Listener, ignore
from tasks.supervise import QUIET_ENVIRONMENT

AGAIN = "`rl-pipeline run` again reuses finished stages and goes on from the last checkpoint"


class RunInterruptedError(KeyboardInterrupt):
    """Ctrl-C or SIGTERM; everything the run started has ended."""


def run_pipeline(
    config: PipelineConfig,
    *,
    force: Sequence[str] = (),
    stop_after: str | None = None,
    nightly: bool = False,
    on_event: Listener | None = None,
    runs_dir: Path = Path("runs"),
) -> Path:
    """Run the pipeline and return the path of its `summary.json`.

    Raises:
        RunLockedError: another run uses `runs_dir`.
        NightSkippedError: a night did not start; `nightly` only.
        StageFailedError: a stage ended without a result.
        RunInterruptedError: the run was told to stop.
    """
    started_s = time.monotonic()
    run_id, listener = new_run_id(config.profile), on_event or ignore
    run_dir = runs_dir / run_id
    with contextlib.ExitStack() as stack:
        lock = stack.enter_context(_lock(config, runs_dir, run_id, nightly=nightly))
        stack.enter_context(_interruptible())
        if lock.leftovers_ended:
            ended = f"ended {lock.leftovers_ended} processes that a killed run had left"
            listener(Event("warning", message=ended))
        config_path = write_json(run_dir / "config.json", config.model_dump(mode="json"))
        _check_databases(runs_dir, listener)
        stack.enter_context(_prefect(runs_dir / "prefect", run_id))
        try:
            parameters = {
                "profile": str(config_path),
                "force": list(force),
                "stop_after": stop_after,
                "nightly": nightly,
            }
            _run_flow(parameters, runs_dir, run_id, listener, started_s)
        except BaseException as error:
            if _is_interrupt(error):
                raise RunInterruptedError(f"run {run_id} was stopped; {AGAIN}") from error
            raise
    return run_dir / "summary.json"


def _check_databases(runs_dir: Path, listener: Listener) -> None:
    """Before a server of our own migrates one: newer ones are refused, older ones backed up.

    Where services run, `up` has looked. A database that is locked now cannot be looked at, and the
    run goes on without it as ever.

    Raises:
        DatabaseNewerError, BackupError, MlflowMigrationError: nothing was migrated.
    """
    if "PREFECT_API_URL" in os.environ or services_environment(runs_dir):
        return
    try:
        prepare_databases(runs_dir, lambda _, what: listener(Event("warning", message=what)))
    except DatabaseUnusableError as error:
        listener(Event("warning", message=str(error)))


def _is_interrupt(error: BaseException) -> bool:
    from prefect.exceptions import TerminationSignal

    return isinstance(error, KeyboardInterrupt | TerminationSignal)


def _lock(config: PipelineConfig, runs_dir: Path, run_id: str, *, nightly: bool) -> RunLock:
    """The run's lock, held; a night that finds another run at work is skipped."""
    try:
        return RunLock(runs_dir, run_id).acquire()
    except RunLockedError as error:
        if not nightly:
            raise
        from flows.nightly.run import locked_out

        raise locked_out(config, runs_dir, error) from error


def _run_flow(
    parameters: dict[str, Any], runs_dir: Path, run_id: str, listener: Listener, started_s: float
) -> None:
    """Call the flow; the time until its body starts is Prefect's."""
    from flows.pipeline import rl_pipeline
    from flows.run import LAUNCH, Launch
    from flows.run_ends import NightSkippedError

    launch = Launch(
        run_id, runs_dir, listener, started_s, time.monotonic() - started_s, locked=True
    )
    token = LAUNCH.set(launch)
    try:
        state = rl_pipeline(**parameters, return_state=True)
    finally:
        LAUNCH.reset(token)
    if state.is_cancelled():
        raise NightSkippedError(state.message)
    state.result()


@contextlib.contextmanager
def _interruptible() -> Iterator[None]:
    """SIGTERM and SIGHUP interrupt as Ctrl-C does (main thread only)."""

    def interrupt(signum: int, frame: FrameType | None) -> None:
        raise RunInterruptedError(f"stopped by {signal.Signals(signum).name}; {AGAIN}")

    previous = {}
    with contextlib.suppress(ValueError):  # not the main thread: the caller handles signals
        for signum in (signal.SIGTERM, signal.SIGHUP):
            previous[signum] = signal.signal(signum, interrupt)
    try:
        yield
    finally:
        for signum, handler in previous.items():
            signal.signal(signum, handler)


@contextlib.contextmanager
def _prefect(home: Path, run_id: str) -> Iterator[None]:
    """Prefect's environment: a server that is there, or one for the time of this run.

    There is the one in PREFECT_API_URL, or the one that `rl-pipeline up` started for this folder.
    """
    services = {} if "PREFECT_API_URL" in os.environ else services_environment(home.parent)
    configured = os.environ.get("PREFECT_API_URL") or services.get("PREFECT_API_URL")
    changed = {**QUIET_ENVIRONMENT, **services} if configured else prefect_environment(home)
    with contextlib.ExitStack() as stack:
        before = dict(os.environ)
        stack.callback(_restore_environment, before)
        os.environ.update({k: v for k, v in changed.items() if k not in before})
        server = None if configured else stack.enter_context(TemporaryServer(home, run_id))
        if server is not None:
            os.environ["PREFECT_API_URL"] = server.url
        stack.enter_context(settings_from_environment())
        import flows.pipeline  # noqa: F401 - seconds of importing, while the server starts

        if server is not None:
            server.wait()
        yield


def _restore_environment(before: dict[str, str]) -> None:
    for name in set(os.environ) - set(before):
        del os.environ[name]
    os.environ.update(before)


@contextlib.contextmanager
def settings_from_environment() -> Iterator[None]:
    """Have Prefect, imported now or before, take its settings from the environment as it is."""
    from prefect.context import SettingsContext, get_settings_context
    from prefect.settings import Settings

    with SettingsContext(profile=get_settings_context().profile, settings=Settings()):
        yield
