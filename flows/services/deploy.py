"""Work pool, deployment and automations on the Prefect server: put in place, twice or once.

`python -m flows.services.deploy RUNS_DIR` runs with the worker's environment, as `up` starts it.
"""

import asyncio
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml
from prefect.client.orchestration import PrefectClient, get_client
from prefect.client.schemas.actions import WorkPoolCreate, WorkPoolUpdate
from prefect.events.schemas.automations import AutomationCore
from prefect.exceptions import ObjectNotFound
from prefect.flows import Flow, load_flow_from_entrypoint
from prefect.utilities.callables import parameter_schema
from prefect.workers.process import ProcessWorker

from deployment.prefect_plugin import full_name
from deployment.service_files import services_dir
from flows.services.specs import POOL
from tasks.artifacts import hash_json, write_atomic
from tasks.artifacts.provenance import project_root

Schedules = list[dict[str, Any]]
POOL_LIMIT = 1
"""Runs at once. The pool's limit: a lost lease of a deployment's own limit crashes the run."""
VERSION_CHARS = 16
_CLI_TIMEOUT_S = 240.0


class PrefectDeployError(RuntimeError):
    """`prefect deploy` failed; shows what it said."""


def deployment_file() -> Path:
    """The committed description of the deployment."""
    return project_root() / "deployment" / "prefect.yaml"


def automations_file() -> Path:
    """The committed automations."""
    return project_root() / "deployment" / "automations.yaml"


def kept_schedules(described: Schedules, existing: Schedules) -> Schedules:
    """The schedules to deploy: one that a person changed on the server stays as it is.

    Both are lists of `{slug, cron, timezone, active, …}`; schedules are matched by slug.
    """
    there = {schedule["slug"]: schedule for schedule in existing if schedule.get("slug")}
    return [schedule | there.get(schedule["slug"], schedule) for schedule in described]


def describe(existing: dict[str, Schedules]) -> dict[str, Any]:
    """`prefect.yaml` as it is deployed: schedules kept, the version a hash of all it says.

    `existing` holds the schedules on the server by deployment. What a flow takes as parameters
    counts for the version: it is deployed with it.
    """
    described: dict[str, Any] = yaml.safe_load(deployment_file().read_text(encoding="utf-8"))
    for deployment in described["deployments"]:
        kept = kept_schedules(deployment.get("schedules", []), existing.get(deployment["name"], []))
        if kept:
            deployment["schedules"] = kept
        flow: Flow[..., Any] = load_flow_from_entrypoint(deployment["entrypoint"])
        schema = parameter_schema(flow).model_dump(mode="json")
        deployment["version"] = hash_json([described["pull"], deployment, schema])[:VERSION_CHARS]
    return described


async def ensure_pool(client: PrefectClient) -> str:
    """The process pool with its limit; says what was done."""
    try:
        pool = await client.read_work_pool(POOL)
    except ObjectNotFound:
        template = ProcessWorker.get_default_base_job_template()
        wanted = WorkPoolCreate(
            name=POOL, type="process", base_job_template=template, concurrency_limit=POOL_LIMIT
        )
        await client.create_work_pool(wanted)
        return "made"
    if pool.concurrency_limit == POOL_LIMIT:
        return "is there"
    await client.update_work_pool(POOL, WorkPoolUpdate(concurrency_limit=POOL_LIMIT))
    return "limit set back to 1"


async def existing_deployment(client: PrefectClient, name: str) -> tuple[str | None, Schedules]:
    """The deployed version and its schedules as `prefect.yaml` writes them; None where none is."""
    try:
        found = await client.read_deployment_by_name(full_name(name))
    except ObjectNotFound:
        return None, []
    schedules = []
    for each in found.schedules:
        written = each.schedule.model_dump(mode="json", exclude_none=True)
        keys = [key for key in ("cron", "timezone", "day_or") if key in written]
        shown: dict[str, Any] = {key: written[key] for key in keys}
        if "cron" in shown:
            shown |= {"slug": each.slug, "active": each.active}
            schedules.append(shown | ({"parameters": each.parameters} if each.parameters else {}))
    return found.version, schedules


async def ensure_automation(client: PrefectClient, wanted: AutomationCore) -> str:
    """The automation of this name, once: updated where it differs, duplicates taken away.

    One that is the same is left alone: an update forgets the runs whose silence is being timed.
    """
    found = sorted(await client.read_automations_by_name(wanted.name), key=lambda a: str(a.id))
    if not found:
        await client.create_automation(wanted)
        return "made"
    for duplicate in found[1:]:
        await client.delete_automation(duplicate.id)
    if said(found[0]) == said(wanted):
        return "is there"
    await client.update_automation(found[0].id, wanted)
    return "updated"


def said(automation: AutomationCore) -> Any:
    """What an automation says, without ids and the order of what has none."""
    core = set(AutomationCore.model_fields)
    return _without_ids(automation.model_dump(mode="json", include=core))


def _without_ids(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_ids(each) for key, each in value.items() if key != "id"}
    if isinstance(value, list):
        return sorted((_without_ids(each) for each in value), key=hash_json)
    return value


def read_automations() -> list[AutomationCore]:
    """The committed automations."""
    described = yaml.safe_load(automations_file().read_text(encoding="utf-8"))
    return [AutomationCore.model_validate(each) for each in described]


def run_prefect_deploy(path: Path) -> None:
    """Deploy all that a file describes, through Prefect's own command.

    Raises:
        PrefectDeployError: it failed or hung.
    """
    command = [sys.executable, "-m", "prefect", "--no-prompt", "deploy", "--all"]
    try:
        done = subprocess.run(
            [*command, "--prefect-file", str(path)],
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
            timeout=_CLI_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise PrefectDeployError(f"prefect deploy took over {_CLI_TIMEOUT_S:.0f} s") from error
    if done.returncode != 0:
        raise PrefectDeployError(f"prefect deploy failed:\n{done.stdout}{done.stderr}".rstrip())


async def deploy(runs_dir: Path) -> str:
    """Put everything in place; returns one line that says what was done.

    Raises:
        PrefectDeployError: see `run_prefect_deploy`.
    """
    async with get_client() as client:
        pool = await ensure_pool(client)
        names = [each["name"] for each in describe({})["deployments"]]
        found = {name: await existing_deployment(client, name) for name in names}
        described = describe({name: schedules for name, (_, schedules) in found.items()})
        wanted = {each["name"]: each["version"] for each in described["deployments"]}
        done = "there"
        if wanted != {name: version for name, (version, _) in found.items()}:
            path = services_dir(runs_dir) / "prefect.yaml"
            write_atomic(path, yaml.safe_dump(described, sort_keys=False, allow_unicode=True))
            run_prefect_deploy(path)
            done = "put in place"
        for automation in read_automations():
            await ensure_automation(client, automation)
    return f"pool {POOL} {pool}; {', '.join(map(full_name, names))} {done}"


def main(argv: list[str]) -> int:
    """Deploy for the runs folder in `argv[0]`."""
    sys.stdout.write(asyncio.run(deploy(Path(argv[0]))) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
