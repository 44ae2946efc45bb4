"""Prefect plugin: `prefect deployment run rl-pipeline`, as typed from the checkout.

Prefect knows deployments as FLOW/DEPLOYMENT only. Ours are both called `rl-pipeline`, so a name
without a slash means NAME/NAME. The command also finds the server that `make up` started, without
an export. `pyproject.toml` enables the plugin, so it works in the checkout and nowhere else, and it
touches nothing but the `prefect` command itself: no flow, worker, server or test.
"""

import os
import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from prefect.plugins import HookContext, SetupResult, register_hook

from deployment.service_files import runs_folder, services_environment

DEFAULT_PORT = 4200
DEFAULT_API_URL = f"http://127.0.0.1:{DEFAULT_PORT}/api"
_CONNECT_WAIT_S = 1.0


def full_name(name: str) -> str:
    """FLOW/DEPLOYMENT of a deployment's name as typed."""
    return name if "/" in name else f"{name}/{name}"


def is_prefect_command(arguments: Sequence[str]) -> bool:
    """Whether a process's command line is that of `prefect` (or `python -m prefect`)."""
    script = next((a for a in arguments[1:] if not a.startswith("-")), "")
    return Path(script).name == "prefect"


def resolve_bare_names() -> None:
    """Have Prefect's client read the deployment NAME/NAME where NAME is asked for."""
    from prefect.client.orchestration import PrefectClient

    read = PrefectClient.read_deployment_by_name

    async def read_by_bare_name(self: PrefectClient, name: str) -> Any:
        return await read(self, full_name(name))

    PrefectClient.read_deployment_by_name = read_by_bare_name  # type: ignore[method-assign]


def listens(port: int) -> bool:
    """Whether anything on this machine takes connections there."""
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=_CONNECT_WAIT_S):
            return True
    except OSError:
        return False


def api_url(configured: str | None) -> str:
    """The server of this checkout, else the one Prefect is configured for, else the usual port.

    Without any, Prefect would start one of its own, which knows no deployment.
    """
    url = services_environment(runs_folder()).get("PREFECT_API_URL") or configured
    if url is None and not listens(DEFAULT_PORT):
        sys.stderr.write("no Prefect server runs for this checkout: `make up` starts one\n")
    return url or DEFAULT_API_URL


@register_hook
def setup_environment(*, ctx: HookContext) -> SetupResult | None:
    """Prefect's start-up hook."""
    if not is_prefect_command(sys.orig_argv):
        return None
    resolve_bare_names()
    if "PREFECT_API_URL" in os.environ:
        return None
    return SetupResult({"PREFECT_API_URL": api_url(ctx.api_url)}, note="server of this checkout")
