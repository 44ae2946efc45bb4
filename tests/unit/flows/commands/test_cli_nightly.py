"""`rl-pipeline nightly …` and `reconcile`, as far as they go without a server."""

import json
import re
import time
from datetime import UTC, datetime
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from flows.cli import app
from flows.commands.nightly_view import parameters_of
from flows.nightly.log import NightLine, NightLog
from flows.nightly.schedule import CronError, cron_schedule, next_starts
from tasks.artifacts.append_log import read_log


@pytest.fixture(autouse=True)
def alone(tmp_path, monkeypatch):
    """No server, no addresses, a folder of one's own."""
    monkeypatch.chdir(tmp_path)
    for name in ("PREFECT_API_URL", "RL_PIPELINE_ALERT_URLS", "MLFLOW_TRACKING_URI"):
        monkeypatch.delenv(name, raising=False)


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(app, [str(a) for a in arguments])


def text(result: Result) -> str:
    return " ".join(re.sub(r"\x1b\[[0-9;]*m", "", result.output).split())


def night(outcome, day, **more) -> None:
    NightLog(Path("runs"), "calculator").append(
        NightLine(outcome, day, "Europe/Berlin", True, **more)
    )


@pytest.mark.parametrize("command", ["status", "enable", "disable", "run-now", "missing"])
def test_every_command_teaches_with_an_example(command):
    result = invoke("nightly", command, "--help")
    assert result.exit_code == 0
    assert f"Example: rl-pipeline nightly {command}" in text(result)


@pytest.mark.parametrize("command", [["disable"], ["run-now"], ["enable"]])
def test_without_a_server_it_says_what_to_do(command):
    result = invoke("nightly", *command)
    assert result.exit_code == 1
    assert "no Prefect server: start one with `rl-pipeline up`" in text(result)


def test_wrong_input_is_refused_before_a_server_is_looked_for():
    zone = invoke("nightly", "enable", "--timezone", "Europe/Berln")
    assert zone.exit_code == 2 and "did you mean Europe/Berlin" in text(zone)
    cron = invoke("nightly", "enable", "--cron", "61 2 * * *")
    assert cron.exit_code == 2 and "expected five fields" in text(cron)
    key = invoke("nightly", "enable", "nightly.drop_foldr=x")
    assert key.exit_code == 2 and "nightly.drop_folder" in text(key)


@pytest.mark.parametrize("cron", ["", "@daily", "1 2 3", "* * * * * *", "a b c d e", "30 25 * * *"])
def test_what_is_no_cron_of_five_fields_is_refused(cron):
    with pytest.raises(CronError, match="half past two every night"):
        cron_schedule(cron, "UTC")


def test_the_next_starts_are_those_of_the_zone_over_a_change_of_clocks():
    after = datetime(2026, 10, 24, 12, tzinfo=UTC)
    assert [f"{s:%d %H:%M}" for s in next_starts("30 2 * * *", "Europe/Berlin", after)] == [
        "25 00:30",
        "26 01:30",
        "27 01:30",
    ]
    change = datetime(2027, 3, 28, 0, 45, tzinfo=UTC)  # that night has begun: it is not next
    assert [f"{s:%d %H:%M}" for s in next_starts("30 2 * * *", "Europe/Berlin", change, 2)] == [
        "29 00:30",
        "30 00:30",
    ]


def test_a_missing_night_alerts_and_exits_with_1_and_a_done_one_does_not():
    never = invoke("nightly", "missing")
    assert never.exit_code == 1 and "no night has ever ended well" in text(never)
    night("trained", "2027-01-05", time_s=time.time() - 3600)
    assert invoke("nightly", "missing", "--within", "2").exit_code == 0
    late = invoke("nightly", "missing", "--within", "0.5")
    assert late.exit_code == 1 and "1 h 0 min ago, more than 30 min" in text(late)
    alerts = [json.dumps(row) for row in read_log(Path("runs/alerts.jsonl")).rows]
    assert sum("calculator: a night is missing" in row for row in alerts) >= 1


def test_status_without_a_server_still_shows_the_nights():
    night("skipped", "2027-01-04", reason="[red]7 h[/] late")
    night("started", "2027-01-05", run_id="run-5")
    night("trained", "2027-01-05", run_id="run-5", new_rows=12)
    night("started", "2027-01-06", run_id="run-6")
    shown = text(invoke("nightly", "status"))
    assert "schedule unknown: no Prefect server" in shown
    assert "[red]7 h[/] late" in shown  # a reason is text, not markup
    assert re.search(r"2027-01-05 .* trained 12 run-5", shown)
    assert shown.count("run-5") == 1
    assert re.search(r"2027-01-06 .* started run-6", shown)  # it runs, or it was killed


def test_parameters_hold_typed_overrides_and_the_profile():
    assert parameters_of("micro", ["rl.steps=3", "nightly.drop_folder=drop"]) == {
        "profile": "micro",
        "overrides": {"rl.steps": 3, "nightly.drop_folder": "drop"},
    }
    assert parameters_of("micro", []) == {"profile": "micro"}


def test_reconcile_has_nothing_to_do_in_an_empty_folder():
    result = invoke("reconcile")
    assert result.exit_code == 0 and "nothing to put right" in text(result)
    assert invoke("reconcile", "--every", "0").exit_code == 2


def test_a_server_that_does_not_answer_is_named_and_the_rest_is_put_right(monkeypatch):
    monkeypatch.setenv("PREFECT_API_URL", "http://127.0.0.1:9/api")
    monkeypatch.setenv("PREFECT_CLIENT_MAX_RETRIES", "0")
    result = invoke("reconcile")
    assert result.exit_code == 0
    assert "http://127.0.0.1:9/api does not answer" in text(result)
    assert "nothing to put right" in text(result)
