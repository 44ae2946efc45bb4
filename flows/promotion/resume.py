"""Resumes a suspended flow run with a person's answer."""

import contextlib
import os
import time
from pathlib import Path
from uuid import UUID

import psutil

from deployment.service_files import services_environment
from tasks.tracking.promotion_ledger import Entry

GONE_WITHIN_S = 60.0
FLOW_RUN_VARIABLE = "PREFECT__FLOW_RUN_ID"
"""Environment variable by which a worker tells a process which flow run it is."""
_POLL_S = 0.5
_NOTICED_S = 2.0
"""Until the worker has noticed that the process ended."""


def resume_waiting(flow_run_id: str, entry: Entry, runs_dir: Path) -> str | None:
    """Hand the answer to the flow run that waits; returns why it could not be, None where it was.

    The ledger holds the answer already; a flow run that is not resumed changes nothing of it.
    """
    url = os.environ.get("PREFECT_API_URL") or services_environment(runs_dir).get("PREFECT_API_URL")
    if url is None:
        return _problem(flow_run_id, "no Prefect server runs here (PREFECT_API_URL is not set)")
    os.environ["PREFECT_API_URL"] = url
    import httpx
    from prefect.exceptions import FlowPauseTimeout, NotPausedError, PrefectException
    from prefect.flow_runs import resume_flow_run

    _await_exit(flow_run_id)
    answer = {"approve": entry.action == "approve", "reason": entry.reason}
    try:
        resume_flow_run(UUID(flow_run_id), run_input=answer)
    except (NotPausedError, FlowPauseTimeout, PrefectException, RuntimeError) as error:
        return _problem(flow_run_id, str(error) or type(error).__name__)
    except (httpx.HTTPError, OSError) as error:
        return _problem(flow_run_id, f"{url}: {error}")
    return None


def _await_exit(flow_run_id: str) -> None:
    """Return when the process that suspended is gone from this machine.

    A worker that is handed the same flow run again while it still holds the old process ends
    itself (Prefect 3.7.7).
    """
    deadline_s = time.monotonic() + GONE_WITHIN_S
    waited = False
    while _lives(flow_run_id) and time.monotonic() < deadline_s:
        waited = True
        time.sleep(_POLL_S)
    if waited:
        time.sleep(_NOTICED_S)


def _lives(flow_run_id: str) -> bool:
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied, OSError):
            told = process.environ().get(FLOW_RUN_VARIABLE)
            if told == flow_run_id and process.pid != os.getpid():
                return True
    return False


def _problem(flow_run_id: str, why: str) -> str:
    return (
        f"flow run {flow_run_id} was not resumed: {why}. The ledger has the answer; cancel that "
        f"run when the server answers: prefect flow-run cancel {flow_run_id}"
    )
