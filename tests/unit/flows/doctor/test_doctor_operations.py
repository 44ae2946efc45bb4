"""What doctor says of daily use: each fault is found, named, and comes with a remedy."""

import os
import socket
import sqlite3
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest

from configs.schema.operations import AlertsConfig
from flows.doctor.operations import (
    alert_receivers,
    database_fits,
    disk,
    examine_operations,
    ledgers,
    left_processes,
    open_mlflow_runs,
    releases,
    schedule_zones,
    service_ports,
    services,
    signing_key_mode,
    ssh_client,
)
from flows.quarantine.decisions import Decision, decide, decisions_path
from flows.run_owner import Owner
from tasks.artifacts import write_json
from tasks.artifacts.provenance import project_root
from tasks.process_tree import TOKEN_VARIABLE
from tasks.tracking.tracker import owner_tags

VARIABLE = "RL_PIPELINE_ALERT_URLS"
DEAD = {"owner.pid": "4194999", "owner.started": "1.00", "owner.host": os.uname().nodename}


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (VARIABLE, "RL_PIPELINE_SIGNING_KEY", "MLFLOW_TRACKING_URI"):
        monkeypatch.delenv(name, raising=False)


def test_an_empty_folder_is_in_order(tmp_path: Path) -> None:
    findings = examine_operations(project_root(), tmp_path, 50.0)
    bad = [f for f in findings if f.status == "fail"]
    assert bad == [] and all(f.looked_at for f in findings)
    assert all(f.remedy for f in findings if f.status in ("warn", "fail", "open"))
    assert not any(tmp_path.iterdir())  # it only looked


@pytest.mark.parametrize(("free", "status"), [(5.0, "pass"), (4.9, "warn")])
def test_disk(tmp_path: Path, free: float, status: str) -> None:
    assert disk(tmp_path, free).status == status


def test_a_crashed_service_is_named_with_its_log(tmp_path: Path) -> None:
    from deployment.service_files import ServiceState, state_path

    state = ServiceState("mlflow", "http://127.0.0.1:5000", 4194999, 1.0)
    write_json(state_path(tmp_path, "mlflow"), asdict(state))
    finding = services(tmp_path)
    assert finding.status == "fail" and "mlflow crashed" in finding.looked_at
    assert "make up" in finding.remedy


def test_a_port_that_a_service_would_need_is_named(tmp_path: Path) -> None:
    from flows.services.specs import Ports

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        finding = service_ports(tmp_path, Ports(port, port))
    assert finding.status == "warn" and str(port) in finding.looked_at
    assert f"--prefect-port {port + 1}" in finding.remedy


def revision(path: Path, number: str) -> None:
    with sqlite3.connect(path) as db:
        db.execute("CREATE TABLE alembic_version (version_num TEXT)")
        db.execute("INSERT INTO alembic_version VALUES (?)", (number,))
    db.close()


def test_a_database_of_a_newer_version_broken_or_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert database_fits("mlflow", tmp_path).status == "pass"
    revision(tmp_path / "mlflow.db", "f00dfeedbeef")
    newer = database_fits("mlflow", tmp_path)
    assert newer.status == "fail" and "a newer version wrote it" in newer.looked_at
    assert "restore the backup" in newer.remedy
    (tmp_path / "mlflow.db").write_bytes(b"no database at all" * 100)
    broken = database_fits("mlflow", tmp_path)
    assert broken.status == "fail" and "cannot be read" in broken.looked_at
    from flows.services.databases import DATABASE_VARIABLES

    monkeypatch.setenv(DATABASE_VARIABLES["prefect"], "mysql://u:s3cret@h/x")
    wrong = database_fits("prefect", tmp_path)
    assert wrong.status == "fail" and "s3cret" not in wrong.looked_at + wrong.remedy


def test_pages_that_sqlite_finds_broken_are_named(tmp_path: Path) -> None:
    from flows.services.databases import database, known_revisions

    path = tmp_path / "mlflow.db"
    revision(path, known_revisions(database("mlflow", tmp_path))[1])
    with sqlite3.connect(path) as db:
        db.execute("CREATE TABLE big (x TEXT)")
        db.executemany("INSERT INTO big VALUES (?)", [("y" * 3000,)] * 50)
    db.close()
    assert database_fits("mlflow", tmp_path).status == "pass"
    raw = bytearray(path.read_bytes())
    raw[-8192:-4096] = os.urandom(4096)
    path.write_bytes(raw)
    finding = database_fits("mlflow", tmp_path)
    assert finding.status == "fail" and "runs/backups" in finding.remedy


def test_processes_that_a_dead_run_left_are_found(tmp_path: Path) -> None:
    for run_id, tags in (("gone", DEAD), ("here", owner_tags())):
        folder = tmp_path / run_id
        folder.mkdir()
        write_json(folder / "owner.json", asdict(Owner(f"{tmp_path.name}-{run_id}", None, tags)))
    assert left_processes(tmp_path).status == "pass"
    sleeper = [sys.executable, "-c", "import time; time.sleep(60)"]
    started = [
        subprocess.Popen(sleeper, env={**os.environ, TOKEN_VARIABLE: f"{tmp_path.name}-{run}:rl"})
        for run in ("gone", "here")
    ]
    try:
        finding = left_processes(tmp_path)
    finally:
        for process in started:
            process.kill()
            process.wait()
    assert finding.status == "warn" and str(started[0].pid) in finding.looked_at
    assert str(started[1].pid) not in finding.looked_at


def test_mlflow_runs_of_dead_owners_are_counted(tmp_path: Path) -> None:
    assert open_mlflow_runs(tmp_path).status == "pass"
    with sqlite3.connect(tmp_path / "mlflow.db") as db:
        db.execute("CREATE TABLE runs (run_uuid TEXT, status TEXT)")
        db.execute("CREATE TABLE tags (run_uuid TEXT, key TEXT, value TEXT)")
        for run, status, tags in (
            ("a", "RUNNING", DEAD), ("b", "RUNNING", owner_tags()), ("c", "FINISHED", DEAD),
        ):  # fmt: skip
            db.execute("INSERT INTO runs VALUES (?, ?)", (run, status))
            db.executemany("INSERT INTO tags VALUES (?, ?, ?)", [(run, *t) for t in tags.items()])
    db.close()
    finding = open_mlflow_runs(tmp_path)
    assert finding.status == "warn" and finding.looked_at == "1 still RUNNING, for instance a"


def test_a_ledger_that_was_edited_fails(tmp_path: Path) -> None:
    (tmp_path / "promotions").mkdir()
    (tmp_path / "promotions" / "micro.jsonl").write_text('{"format": 1}\n')
    finding = ledgers(tmp_path)
    assert finding.status == "fail" and "micro.jsonl" in finding.looked_at and finding.remedy


def test_quarantine_decisions_that_were_edited_fail(tmp_path: Path) -> None:
    decision = Decision("release", "a" * 64, "prompt_too_long", "r", "f:1", "long", "meant so")
    decide(tmp_path, decision)
    assert releases(tmp_path).looked_at == "1, chained and signed"
    path = decisions_path(tmp_path)
    path.write_text(path.read_text().replace("meant so", "meant to"))
    finding = releases(tmp_path)
    assert finding.status == "fail" and "line 1 was changed" in finding.looked_at
    assert signing_key_mode(tmp_path).status == "pass"


def test_a_key_others_can_read_or_that_is_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = tmp_path / "keys" / "signing_key"
    key.parent.mkdir()
    key.write_text("secret words")
    key.chmod(0o640)
    finding = signing_key_mode(tmp_path)
    assert (finding.status, finding.remedy) == ("fail", f"chmod 600 {key}")
    assert "secret words" not in finding.looked_at
    monkeypatch.setenv("RL_PIPELINE_SIGNING_KEY", str(tmp_path / "gone"))
    assert signing_key_mode(tmp_path).status == "fail"


def test_ssh() -> None:
    assert ssh_client(lambda name: f"/usr/bin/{name}").status == "pass"
    assert "openssh-client" in ssh_client(lambda name: None).remedy


@pytest.mark.parametrize(
    ("text", "status", "part"),
    [
        ("deployments: [{schedules: [{cron: 0 2, timezone: UTC}]}]", "pass", "0 2 UTC"),
        ("deployments: [{schedules: [{timezone: Europe/Berln}]}]", "fail", "Europe/Berlin"),
        ("deployments: [{}]", "pass", "none"),
        ("deployments: [", "fail", "prefect.yaml"),
        ("[]", "fail", "prefect.yaml"),
    ],
)  # fmt: skip
def test_the_zone_of_the_schedule(tmp_path: Path, text: str, status: str, part: str) -> None:
    path = tmp_path / "prefect.yaml"
    path.write_text(text)
    finding = schedule_zones(path)
    assert finding.status == status and part in finding.looked_at
    assert schedule_zones(tmp_path / "none.yaml").status == "fail"


def test_whom_alerts_go_to_without_saying_where(monkeypatch: pytest.MonkeyPatch) -> None:
    assert alert_receivers(AlertsConfig()).status == "open"
    monkeypatch.setenv(VARIABLE, "json://secret.example.org/x")
    finding = alert_receivers(AlertsConfig())
    assert finding.status == "pass" and f"{VARIABLE}[1] (json)" in finding.looked_at
    monkeypatch.setenv(VARIABLE, "json://secret.example.org/x pigeon://loft")
    finding = alert_receivers(AlertsConfig())
    assert finding.status == "fail" and f"{VARIABLE}[2] (pigeon)" in finding.looked_at
    assert "secret" not in finding.looked_at
