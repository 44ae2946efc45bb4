"""Taking releases to devices: deploy, roll back, drill; on the command line and as a Prefect flow.

`deploy_release` does the work and needs no server. `rl_pipeline_deploy` is the same as a flow, and
`deploy_champion` starts that flow after a promotion where the profile asks for it.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from prefect import flow
from prefect.artifacts import create_table_artifact
from prefect.context import FlowRunContext
from prefect.logging import get_run_logger

from configs.devices import choose, load_fleet
from configs.problems import ConfigError
from configs.schema import PipelineConfig
from configs.schema.devices import Device, Fleet
from deployment.fleet.books import DeviceBooks
from deployment.fleet.cargo import loaded
from deployment.fleet.device import DeviceResult
from deployment.fleet.enrol import not_enrolled
from deployment.fleet.errors import DeployError, FleetFailedError, NothingToDeployError
from deployment.fleet.fleet import FleetEvent, FleetResult, Listener, deploy_fleet, visit
from deployment.fleet.rollout import waves
from deployment.jetson import signing
from deployment.jetson.errors import PackageError
from deployment.jetson.on_device.verify import BundleError
from deployment.service_files import RUNS_VARIABLE, services_environment
from flows.alerts.send import Alert, send_alert
from flows.commands.bundle_view import NoBundleError, find_bundle
from flows.devices.log import log_deployment
from flows.flow_log import harmless
from flows.promotion.releases import choose_ledger, config_of, find_release
from flows.run_id import new_run_id
from tasks.tracking.promotion_ledger import Release

CHAMPION = "champion"
DEPLOYMENT = "rl-pipeline-deploy/rl-pipeline-deploy"


@dataclass(frozen=True)
class Order:
    """What is to be deployed, where, and how."""

    bundle: Path
    config: PipelineConfig
    runs_dir: Path
    only: tuple[str, ...] = ()
    keep_going: bool = False
    allowed_signers: Path | None = None

    @property
    def fleet(self) -> Fleet:
        """The file of devices, read anew.

        Raises:
            ConfigError: it cannot be used.
        """
        return load_fleet(self.config.deploy.devices)


@dataclass(frozen=True)
class Deployed:
    """What became of an order."""

    result: FleetResult
    notes: tuple[str, ...] = ()
    """What could not be told, and whom."""
    agent: str = ""
    devices: tuple[Device, ...] = field(default=(), repr=False)


def find_order(
    source: str,
    runs_dir: Path,
    *,
    config: PipelineConfig | None = None,
    profile: str | None = None,
    devices: str | None = None,
    only: Sequence[str] = (),
    keep_going: bool = False,
    allowed_signers: Path | None = None,
) -> Order:
    """The order meant by `champion`, a path (bundle, archive, run), a version or a hash.

    The settings are those given, else those of the run that made the release.

    Raises:
        NothingToDeployError: there is no champion.
        NoReleaseError, NoBundleError: nothing of that name.
    """
    bundle, release = _find(source, runs_dir, profile)
    found = config or (config_of(release, runs_dir) if release else PipelineConfig())
    if devices is not None:
        deploy = found.deploy.model_copy(update={"devices": devices})
        found = found.model_copy(update={"deploy": deploy})
    return Order(bundle, found, runs_dir, tuple(only), keep_going, allowed_signers)


def _find(source: str, runs_dir: Path, profile: str | None) -> tuple[Path, Release | None]:
    if source == CHAMPION:
        ledger = choose_ledger(runs_dir, profile)
        champion = ledger.champion()
        if champion is None:
            raise NothingToDeployError(
                f"{ledger.model} has no champion yet; promote a candidate: rl-pipeline promote, or "
                "name a bundle or a run"
            )
        return find_bundle(Path(champion.bundle)), champion
    path = Path(source)
    if path.exists():
        return find_bundle(path), None
    release = find_release(runs_dir, source, profile)
    return find_bundle(Path(release.bundle)), release


def pinned(runs_dir: Path, given: Path | None) -> Path:
    """The keys that bundles are judged by here, and that devices are enrolled with.

    Raises:
        NoBundleError: there is no such file.
    """
    named = os.environ.get(signing.KEY_VARIABLE)
    path = given or (Path(named).parent if named else runs_dir / "keys") / signing.PIN_NAME
    if not path.is_file():
        raise NoBundleError(
            f"no pinned keys at {path}; a first run makes them, or give --allowed-signers FILE"
        )
    return path


def planned_waves(order: Order) -> list[tuple[str, ...]]:
    """The waves an order would take, if nothing fails."""
    names = [device.name for device in choose(order.fleet, order.only)]
    return waves(names, order.config.deploy.wave_size)


def deploy_release(order: Order, listener: Listener = lambda event: None) -> Deployed:
    """Carry an order out; devices that fail are in the result, and people are told of them.

    Raises:
        ConfigError: the file of devices cannot be used.
        BundleError, PackageError: the bundle is refused here already; no device was asked.
        NothingToDeployError: no device is enrolled.
    """
    fleet = order.fleet
    devices = choose(fleet, order.only)
    known_hosts = Path(fleet.known_hosts)
    if len(strangers := not_enrolled(devices, known_hosts)) == len(devices):
        raise NothingToDeployError(
            f"{', '.join(strangers)}: not enrolled (no host key in {known_hosts}). Once for each: "
            f"rl-pipeline devices enrol {strangers[0]}"
        )
    books = DeviceBooks(order.runs_dir)
    with loaded(order.bundle, pinned(order.runs_dir, order.allowed_signers)) as cargo:
        result = deploy_fleet(
            devices,
            known_hosts,
            cargo,
            order.config.deploy,
            books,
            keep_going=order.keep_going,
            listener=listener,
        )
        agent, source = cargo.agent, cargo.source
    notes = log_deployment(
        result.results, agent, source, order.config.tracking, order.runs_dir, new_run_id("deploy")
    )
    if not result.ok:
        notes += send_alert(order.config.alerts, _alert(result), order.runs_dir).problems
    return Deployed(result, tuple(notes), agent, devices)


def _alert(result: FleetResult) -> Alert:
    failed = [r for r in result.results if r.outcome == "failed"]
    lines = [f"{r.device}: {r.error}: {r.reason}" for r in failed]
    counts = ", ".join(f"{n} {what}" for what, n in sorted(result.counts().items()))
    title = f"rl-pipeline: deployment of {result.release[:12]} failed on {len(failed)} devices"
    key = f"deploy:{result.release[:12]}:{','.join(r.device for r in failed)}"
    return Alert("failure", title, "\n".join([counts, *lines]), key)


def roll_back(
    devices: Sequence[Device],
    fleet: Fleet,
    config: PipelineConfig,
    runs_dir: Path,
    listener: Listener = lambda event: None,
) -> tuple[list[DeviceResult], list[str]]:
    """Have each device serve the release before, one after another."""
    books, results = DeviceBooks(runs_dir), []
    for device in devices:
        results.append(_revert(device, fleet, config, books, listener))
    return results, _logged(results, config, runs_dir, books)


def drill(
    device: Device,
    fleet: Fleet,
    config: PipelineConfig,
    runs_dir: Path,
    listener: Listener = lambda event: None,
) -> tuple[list[DeviceResult], list[str]]:
    """Practise: back to the release before, then to where it was; both with every check."""
    books = DeviceBooks(runs_dir)
    back = _revert(device, fleet, config, books, listener, action="drill")
    results = [back]
    if back.ok and back.previous is not None:
        results.append(
            _revert(device, fleet, config, books, listener, action="drill", target=back.previous)
        )
    return results, _logged(results, config, runs_dir, books)


def _revert(
    device: Device,
    fleet: Fleet,
    config: PipelineConfig,
    books: DeviceBooks,
    listener: Listener,
    action: Any = "rollback",
    target: str | None = None,
) -> DeviceResult:
    agent = _agent_of(device, books, config)

    def failed(error: DeployError) -> DeviceResult:
        reason, kind = str(error), type(error).__name__
        return DeviceResult(device.name, action, "failed", target, reason=reason, error=kind)

    result = visit(
        device,
        Path(fleet.known_hosts),
        config.deploy,
        listener,
        lambda v: v.rollback(agent, action, target),
        failed,
    )
    books.enter(result, agent, books.bundle_of(result.release or ""))
    listener(FleetEvent(device.name, "result", result.outcome))
    return result


def _agent_of(device: Device, books: DeviceBooks, config: PipelineConfig) -> str:
    known = books.record(device.name) or {}
    return str(known.get("agent") or config.package.name)


def _logged(
    results: list[DeviceResult], config: PipelineConfig, runs_dir: Path, books: DeviceBooks
) -> list[str]:
    """Log each result as an attempt of its own: a drill has two for one device."""
    notes = []
    for number, result in enumerate(results):
        agent = str((books.record(result.device) or {}).get("agent") or config.package.name)
        bundle = books.bundle_of(result.release or "") or ""
        attempt = f"{new_run_id(result.action)}-{number}"
        notes += log_deployment([result], agent, bundle, config.tracking, runs_dir, attempt)
    return notes


@flow(name="rl-pipeline-deploy", persist_result=False, validate_parameters=True)
def rl_pipeline_deploy(
    source: str = CHAMPION,
    profile: str | None = None,
    devices: str | None = None,
    only: list[str] | None = None,
    keep_going: bool = False,
) -> dict[str, Any]:
    """Take a release to the devices: one canary, then waves; back to the last good on failure.

    Args:
        source: `champion`, a bundle's path, a run, a version such as `calculator:3`, or a hash.
        profile: whose champion, where several profiles have one.
        devices: file of devices; the profile's `deploy.devices` without it.
        only: names of devices; all of them without it.
        keep_going: go on with the other devices after one has failed.
    """
    runs_dir = Path(os.environ.get(RUNS_VARIABLE, "runs"))
    order = find_order(
        source,
        runs_dir,
        profile=profile,
        devices=devices,
        only=only or (),
        keep_going=keep_going,
    )
    return deploy_in_flow(order)


def deploy_in_flow(order: Order) -> dict[str, Any]:
    """Carry an order out inside a flow run: progress in its log, the outcome as a table.

    Raises:
        FleetFailedError: a device does not serve the release.
    """
    log = get_run_logger()

    def say(event: FleetEvent) -> None:
        if event.kind != "sent":
            log.info("%s", harmless(f"{event.device or 'fleet'}: {event.text}"))

    done = deploy_release(order, say)
    for note in done.notes:
        log.warning("%s", harmless(note))
    rows = [
        {
            "device": r.device,
            "outcome": r.outcome,
            "serving": (r.serving or "not known")[:12],
            "tokens/s": "" if r.tokens_per_s is None else f"{r.tokens_per_s:.1f}",
            "reason": harmless(r.reason),
        }
        for r in done.result.results
    ]
    create_table_artifact(
        table=rows, key="deployment", description=f"release {done.result.release[:12]}"
    )
    if not done.result.ok:
        raise FleetFailedError(failure_text(done.result))
    return {"release": done.result.release, "devices": done.result.counts()}


def failure_text(result: FleetResult) -> str:
    """Which devices failed and why, in one line each."""
    lines = [f"{r.reason}" for r in result.results if r.outcome == "failed"]
    left = [r.device for r in result.results if r.outcome == "not_tried"]
    tail = f"; not tried: {', '.join(left)}" if left else ""
    return "; ".join(lines) + tail


def deploy_champion(release: Release, config: PipelineConfig, runs_dir: Path) -> str:
    """Start the deployment of a new champion; says what was started, and never raises for a device.

    On a server that has the deployment the flow is queued there and runs when the pool has room.
    Without one it is done here and now. A failure is alerted.
    """
    if (queued := _queue(release, runs_dir)) is not None:
        return queued
    try:
        order = find_order(str(release.bundle), runs_dir, config=config)
        if FlowRunContext.get() is not None:
            done = deploy_in_flow(order)
            return f"deployed {release.name}: {done['devices']}"
        deployed = deploy_release(order)
        if not deployed.result.ok:
            return f"the deployment of {release.name} failed: {failure_text(deployed.result)}"
        return f"deployed {release.name}: {deployed.result.counts()}"
    except FleetFailedError as error:  # people were told by deploy_release
        return f"the deployment of {release.name} failed: {error}"
    except (ConfigError, BundleError, PackageError, NoBundleError, DeployError) as error:
        title = f"rl-pipeline: {release.name} was promoted but not deployed"
        alert = Alert("failure", title, str(error), f"deploy:{release.bundle_sha256[:12]}")
        send_alert(config.alerts, alert, runs_dir)
        return f"{release.name} was not deployed: {error}"


def _queue(release: Release, runs_dir: Path) -> str | None:
    """Queue the flow where a server has its deployment; None where there is none."""
    from flows.devices.queue import queue_deployment

    url = os.environ.get("PREFECT_API_URL") or services_environment(runs_dir).get("PREFECT_API_URL")
    if url is None:
        return None
    return queue_deployment(url, DEPLOYMENT, {"source": release.bundle_sha256})
