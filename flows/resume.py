"""Resumes a suspended flow run with a person's answer."""

import os
from pathlib import Path
from uuid import UUID

from deployment.service_files import services_environment
from tasks.tracking.promotion_ledger import Entry


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

    answer = {"approve": entry.action == "approve", "reason": entry.reason}
    try:
        resume_flow_run(UUID(flow_run_id), run_input=answer)
    except (NotPausedError, FlowPauseTimeout, PrefectException, RuntimeError) as error:
        return _problem(flow_run_id, str(error) or type(error).__name__)
    except (httpx.HTTPError, OSError) as error:
        return _problem(flow_run_id, f"{url}: {error}")
    return None


def _problem(flow_run_id: str, why: str) -> str:
    return (
        f"flow run {flow_run_id} was not resumed: {why}. The ledger has the answer; cancel that "
        f"run when the server answers: prefect flow-run cancel {flow_run_id}"
    )
