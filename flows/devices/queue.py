"""Queues a deployment of flows on the Prefect server that has it."""

from collections.abc import Mapping
from typing import Any


def queue_deployment(url: str, name: str, parameters: Mapping[str, Any]) -> str | None:
    """Queue a flow run and say so; None where the server does not know the deployment.

    A server that does not answer is as one that does not know it: the caller does the work itself.
    """
    import httpx
    from prefect.client.orchestration import SyncPrefectClient
    from prefect.exceptions import ObjectNotFound, PrefectException

    try:
        with SyncPrefectClient(url) as client:
            found = client.read_deployment_by_name(name)
            run = client.create_flow_run_from_deployment(found.id, parameters=dict(parameters))
    except (ObjectNotFound, PrefectException, httpx.HTTPError, OSError):
        return None
    return f"{name} is queued as flow run {run.name} ({run.id})"
