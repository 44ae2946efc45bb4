"""Looks at what daily use needs: services, databases, what killed runs left, ledgers, alerts, ssh.

Each only looks: nothing is started, ended, migrated or sent.
"""

import contextlib
import os
import shutil
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import yaml

from configs.schema.operations import AlertsConfig
from configs.time_zones import UnknownTimeZoneError, time_zone
from flows.doctor.findings import Finding

if TYPE_CHECKING:
    from flows.services.specs import Ports

LOW_DISK_GIB = 5.0
CHECKED_DATABASE_BYTES = 256 << 20
"""A larger SQLite file is not read through: that takes long."""


def examine_operations(root: Path, runs: Path, disk_gib: float) -> list[Finding]:
    """What nights, servers, devices and alerts need beyond one run."""
    return [
        disk(runs, disk_gib),
        services(runs),
        service_ports(runs),
        *(database_fits(name, runs) for name in ("prefect", "mlflow")),
        left_processes(runs),
        open_mlflow_runs(runs),
        ledgers(runs),
        releases(runs),
        signing_key_mode(runs),
        ssh_client(),
        schedule_zones(root / "deployment" / "prefect.yaml"),
        alert_receivers(AlertsConfig()),
    ]


def disk(runs: Path, free_gib: float) -> Finding:
    """Free space where runs lie."""
    looked_at = f"{free_gib:.1f} GiB free under {runs}"
    if free_gib >= LOW_DISK_GIB:
        return Finding("disk", "pass", looked_at)
    return Finding("disk", "warn", looked_at, "rl-pipeline gc says what can go, and takes it away")


def services(runs: Path) -> Finding:
    """Prefect server, worker and MLflow server, as `rl-pipeline ps` sees them."""
    from flows.services.control import statuses

    found = statuses(runs)
    looked_at = ", ".join(f"{s.name} {s.state}" for s in found)
    bad = [s for s in found if s.state in ("crashed", "not answering")]
    if bad:
        return Finding(
            "services",
            "fail",
            looked_at,
            f"see {bad[0].log}, then `make up`: it starts again what is not healthy",
        )
    running = [s for s in found if s.state == "running"]
    if 0 < len(running) < len(found):
        return Finding(
            "services", "warn", looked_at, "`make up` starts the rest, `make down` ends all"
        )
    return Finding("services", "pass", looked_at)


def service_ports(runs: Path, ports: "Ports | None" = None) -> Finding:
    """Whether `make up` could listen; a port our own service holds is fine."""
    from flows.services.control import statuses
    from flows.services.process import PortTakenError, refuse_taken_port
    from flows.services.specs import Ports, service_specs

    running = {s.name for s in statuses(runs) if s.state != "stopped"}
    ports = ports or Ports()
    taken = []
    for name, spec in service_specs(runs, ports, Path()).items():
        if name in running:
            continue
        try:
            refuse_taken_port(spec)
        except PortTakenError as error:
            taken.append(str(error))
    looked_at = f"Prefect {ports.prefect}, MLflow {ports.mlflow} on 127.0.0.1"
    if taken:
        what, _, remedy = taken[0].partition("; ")
        return Finding("ports of the services", "warn", what, remedy)
    return Finding("ports of the services", "pass", f"{looked_at}: free, or our own")


def database_fits(name: str, runs: Path) -> Finding:
    """Whether a database is whole and of this version."""
    from flows.services.databases import (
        DatabaseNewerError,
        DatabaseUnusableError,
        DatabaseUrlError,
        condition,
        database,
    )

    title = f"{name} database"
    try:
        of = database("prefect" if name == "prefect" else "mlflow", runs)
        found = condition(of)
    except DatabaseUrlError as error:
        what, _, remedy = str(error).partition("; ")
        return Finding(title, "fail", what, remedy or "unset the variable")
    except DatabaseNewerError as error:
        what, _, remedy = str(error).partition(". ")
        return Finding(title, "fail", what, remedy)
    except DatabaseUnusableError as error:
        remedy = "restore the newest copy from runs/backups, or start its PostgreSQL"
        return Finding(title, "fail", str(error), remedy)
    if found == "new":
        return Finding(title, "pass", f"none yet; the first run makes {of.shown}")
    if of.postgresql is None and (damage := _damage(of.path)):
        return Finding(title, "fail", damage, "restore the newest copy from runs/backups")
    if found == "older":
        return Finding(
            title,
            "warn",
            f"{of.shown} is of an older version than {of.package}",
            "`make up` backs it up, then migrates it",
        )
    return Finding(title, "pass", f"{of.shown}: whole, of this version")


def _damage(path: Path) -> str:
    """What SQLite finds broken in a file; empty where nothing, or it is too large or busy."""
    if path.stat().st_size > CHECKED_DATABASE_BYTES:
        return ""
    try:
        with contextlib.closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True, timeout=2)) as db:
            said = db.execute("PRAGMA quick_check(1)").fetchone()[0]
    except sqlite3.OperationalError:
        return ""  # locked: somebody is using it, so it works
    except sqlite3.DatabaseError as error:
        return f"{path}: {error}"
    return "" if said == "ok" else f"{path}: {said}"


def left_processes(runs: Path) -> Finding:
    """Processes of runs whose owner is gone."""
    from flows.run_owner import owners
    from tasks.process_tree import marked

    left = {o.run_id: marked(o.run_id) for o in owners(runs) if not o.lives}
    found = {run: processes for run, processes in left.items() if processes}
    if not found:
        return Finding("processes of dead runs", "pass", "none")
    looked_at = "; ".join(
        f"run {run}: {', '.join(str(p.pid) for p in processes)}" for run, processes in found.items()
    )
    return Finding(
        "processes of dead runs",
        "warn",
        looked_at,
        "the next run in this folder ends them; or kill them by these ids",
    )


def open_mlflow_runs(runs: Path) -> Finding:
    """MLflow runs left RUNNING by owners that are gone, where the store is a local file."""
    from tasks.tracking.reconcile import owner_lives

    title, path = "MLflow runs of dead owners", runs / "mlflow.db"
    if os.environ.get("MLFLOW_TRACKING_URI") or not path.exists():
        return Finding(title, "pass", "no local MLflow file to look at")
    query = (
        "SELECT r.run_uuid, t.key, t.value FROM runs r JOIN tags t ON t.run_uuid = r.run_uuid "
        "WHERE r.status = 'RUNNING' AND t.key LIKE 'owner.%'"
    )
    try:
        with contextlib.closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True, timeout=2)) as db:
            rows = db.execute(query).fetchall()
    except sqlite3.Error as error:
        return Finding(title, "open", f"{path}: {error}", "look again when it is not in use")
    tags: dict[str, dict[str, str]] = {}
    for run, key, value in rows:
        tags.setdefault(run, {})[key] = value
    dead = [run for run, owner in tags.items() if not owner_lives(owner)]
    if not dead:
        return Finding(title, "pass", f"{len(tags)} running, all by living processes")
    return Finding(
        title,
        "warn",
        f"{len(dead)} still RUNNING, for instance {dead[0]}",
        "the next run closes them as KILLED; with servers, so does the worker's reconciler",
    )


def ledgers(runs: Path) -> Finding:
    """Every promotion ledger, line by line."""
    from tasks.tracking.promotion_ledger import LedgerError
    from tasks.tracking.promotion_ledger import ledgers as all_ledgers

    found = all_ledgers(runs)
    counts = []
    for ledger in found:
        try:
            counts.append(f"{ledger.model} {ledger.verify()} entries")
        except LedgerError as error:
            remedy = "rl-pipeline history shows it; put back the copy from runs/backups, if any"
            return Finding("promotion ledgers", "fail", str(error), remedy)
    looked_at = ", ".join(counts) or "none yet"
    return Finding("promotion ledgers", "pass", f"{looked_at}{': chains whole' if counts else ''}")


def releases(runs: Path) -> Finding:
    """The decisions on quarantined rows: chain and signatures."""
    from flows.quarantine.decisions import ReleaseFileError, read_decisions

    try:
        count = len(read_decisions(runs))
    except ReleaseFileError as error:
        what, _, remedy = str(error).partition("; ")
        return Finding("quarantine decisions", "fail", what, remedy)
    return Finding(
        "quarantine decisions", "pass", f"{count}, chained and signed" if count else "none"
    )


def signing_key_mode(runs: Path) -> Finding:
    """The key that signs bundles: there, and for its owner's eyes only."""
    from deployment.jetson.signing import KEY_NAME, KEY_VARIABLE

    named = os.environ.get(KEY_VARIABLE)
    path = Path(named) if named else runs / "keys" / KEY_NAME
    if not path.exists():
        if not named:
            return Finding("signing key", "pass", f"none yet; the first bundle makes {path}")
        remedy = f"set {KEY_VARIABLE} to an ed25519 key, or unset it"
        return Finding("signing key", "fail", f"{KEY_VARIABLE} names no file", remedy)
    mode = path.stat().st_mode & 0o777
    if mode & 0o077:
        return Finding(
            "signing key",
            "fail",
            f"{path} has mode {mode:o}: others can read it",
            f"chmod 600 {path}",
        )
    return Finding("signing key", "pass", f"{path}, mode {mode:o}")


def ssh_client(which: Callable[[str], str | None] = shutil.which) -> Finding:
    """What deployment to devices needs; sshd serves only the tests of it."""
    found = which("ssh")
    if found is None:
        return Finding(
            "ssh", "warn", "no ssh client", "install openssh-client: `rl-pipeline deploy` needs it"
        )
    server = which("sshd") or which("/usr/sbin/sshd")
    return Finding("ssh", "pass", f"{found}; sshd (for tests only) {server or 'none'}")


def schedule_zones(path: Path) -> Finding:
    """The time zones of the schedules."""
    title = "schedule"
    try:
        body = yaml.safe_load(path.read_text(encoding="utf-8"))
        schedules = [s for d in body["deployments"] for s in d.get("schedules") or ()]
        zones = [(str(s.get("cron")), str(s.get("timezone") or "UTC")) for s in schedules]
    except (OSError, yaml.YAMLError, KeyError, TypeError, AttributeError) as error:
        return Finding(
            title, "fail", f"{path.name}: {error}", f"put {path.name} back: git checkout"
        )
    for _, zone in zones:
        try:
            time_zone(zone)
        except UnknownTimeZoneError as error:
            return Finding(title, "fail", str(error), f"mend `timezone` in deployment/{path.name}")
    shown = ", ".join(f"{cron} {zone}" for cron, zone in zones)
    return Finding(title, "pass", shown or "none")


def alert_receivers(config: AlertsConfig) -> Finding:
    """Whom alerts go to, by kind; never an address."""
    from flows.alerts.send import alert_addresses

    found = alert_addresses(config)
    if not found:
        return Finding(
            "alerts",
            "open",
            f"{' and '.join(config.urls_env)} not set: nobody is told",
            f"export {config.urls_env[0]}='mailtos://… slack://…', then rl-pipeline alerts test",
        )
    import apprise

    unknown = [name for name, url in found.items() if apprise.Apprise.instantiate(url) is None]
    if unknown:
        return Finding(
            "alerts",
            "fail",
            f"{', '.join(unknown)}: no address Apprise knows",
            "mend it; `rl-pipeline alerts test` tries all of them",
        )
    return Finding("alerts", "pass", f"{', '.join(found)}; try them: rl-pipeline alerts test")
