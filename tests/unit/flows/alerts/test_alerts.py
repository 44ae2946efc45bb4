"""Alerts are received for real: by mail, webhook, Slack; and nothing that hangs holds a run."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from alert_receivers import Mailbox, Webhook, self_signed
from typer.testing import CliRunner

from configs.schema.operations import AlertsConfig
from flows.alerts.send import (
    LOG_NAME,
    MAX_BODY,
    START_GRACE_S,
    Alert,
    alert_addresses,
    entries,
    read_alerts,
    send_alert,
    start_alert,
    told_before,
)
from flows.cli import app
from tasks.artifacts.append_log import LogLines
from tasks.artifacts.provenance import project_root

VARIABLE = "RL_PIPELINE_ALERT_URLS"
CONFIG = AlertsConfig(timeout_s=10.0)
FAILURE = Alert("failure", "night failed", "stage rl: out of memory", "failure:micro:rl")


@pytest.fixture
def hook() -> Iterator[Webhook]:
    with Webhook() as webhook:
        yield webhook


@pytest.fixture
def address(monkeypatch: pytest.MonkeyPatch, hook: Webhook) -> str:
    monkeypatch.setenv(VARIABLE, hook.url())
    return hook.url()


def test_mail_and_webhook_receive_it_with_their_unicode(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hook: Webhook
) -> None:
    alert = Alert("gate", "Tor verfehlt: η > 2 – 質", "Zeile «1»\nline 2 é 🚨", "gate:x")
    with Mailbox() as mailbox:
        monkeypatch.setenv(VARIABLE, f"{mailbox.url} {hook.url()}")
        outcome = send_alert(CONFIG, alert, tmp_path)
    assert outcome.status == "sent", outcome
    assert [r.name for r in outcome.receivers] == [
        f"{VARIABLE}[1] (mailto)",
        f"{VARIABLE}[2] (json)",
    ]
    mail = mailbox.messages[0]
    assert mail["Subject"] == "Tor verfehlt: η › 2 – 質" and mail["To"] == "ops@example.org"
    body = mail.get_body(("plain", "html"))
    assert body is not None and "line 2 é 🚨" in body.get_content()
    path, message = hook.received[0]
    assert path == "/hook" and message["title"] == "Tor verfehlt: η › 2 – 質"
    assert message["message"] == "Zeile «1»\nline 2 é 🚨" and message["type"] == "failure"


@pytest.mark.needs("openssl")
def test_slack_receives_it_and_no_text_can_call_a_channel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Webhook(certificate=self_signed(tmp_path)) as slack:
        for name in ("HTTPS_PROXY", "https_proxy"):
            monkeypatch.setenv(name, f"http://127.0.0.1:{slack.port}")
        token = "T1JJ3T3L2/A1BRTD4JD/TIiajkdnlazkcOXrIdevi7FQ"
        monkeypatch.setenv(VARIABLE, f"slack://{token}/?verify=no")
        alert = Alert("failure", "night failed", "the model said <!channel> <@U6TTX1F9R>", "k")
        outcome = send_alert(CONFIG, alert, tmp_path)
    assert outcome.status == "sent", outcome
    assert slack.tunnels == ["hooks.slack.com:443"]
    path, message = slack.received[0]
    assert path == f"/services/{token}"
    said = json.dumps(message, ensure_ascii=False)
    assert "night failed" in said and "‹!channel›" in said
    assert "<!" not in said and "<@" not in said


def test_a_webhook_that_hangs_is_given_up_and_named_and_the_other_is_served(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hook: Webhook
) -> None:
    monkeypatch.setenv(VARIABLE, f"{hook.url('hang')} {hook.url('ok')}")
    config = AlertsConfig(timeout_s=2.0)
    started_s = time.monotonic()
    sending = start_alert(config, FAILURE, tmp_path)
    assert time.monotonic() - started_s < 1.0  # the run goes on meanwhile
    outcome = sending.wait()
    assert 1.9 < time.monotonic() - started_s < 2.0 + START_GRACE_S + 2.0
    assert outcome.status == "partly"
    hung, served = outcome.receivers
    assert (hung.ok, served.ok) == (False, True)
    assert hung.why == "no answer within alerts.timeout_s=2 s, given up"
    assert outcome.problems == (f"alert not taken by {VARIABLE}[1] (json): {hung.why}",)
    assert sending.wait() == outcome


@pytest.mark.parametrize(
    ("address", "why"),
    [
        ("json://127.0.0.1:1/x", "could not be reached"),
        ("mailto://127.0.0.1:1/?from=a@example.org&to=b@example.org", "could not be reached"),
        ("carrier-pigeon://loft", "no kind Apprise knows"),
        ("json://", "no kind Apprise knows"),
    ],
)
def test_receivers_that_fail_are_named_and_nothing_is_raised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, address: str, why: str
) -> None:
    monkeypatch.setenv(VARIABLE, address)
    outcome = send_alert(CONFIG, FAILURE, tmp_path)
    assert outcome.status == "failed"
    assert why in outcome.receivers[0].why


@pytest.mark.parametrize("code", [500, 403, 301])
def test_a_receiver_that_answers_with_an_error_has_not_taken_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hook: Webhook, code: int
) -> None:
    monkeypatch.setenv(VARIABLE, hook.url(f"{code}"))
    outcome = send_alert(CONFIG, FAILURE, tmp_path)
    assert (outcome.status, outcome.receivers[0].why) == ("failed", f"answered with status {code}")


def test_the_same_alert_twice_is_sent_once_until_it_is_due_again(
    tmp_path: Path, address: str, hook: Webhook
) -> None:
    other = Alert("failure", "t", "b", "failure:micro:sft")
    statuses = [send_alert(CONFIG, a, tmp_path).status for a in (FAILURE, FAILURE, other)]
    assert statuses == ["sent", "repeated", "sent"]
    again = send_alert(AlertsConfig(repeat_after_s=0.0), FAILURE, tmp_path)
    assert again.status == "sent"
    assert len(hook.received) == 3
    assert [e.status for e in read_alerts(tmp_path)[0]] == ["sent", "repeated", "sent", "sent"]


def test_the_same_alert_from_two_processes_at_once_is_sent_once(
    tmp_path: Path, address: str, hook: Webhook
) -> None:
    with ThreadPoolExecutor(4) as threads:
        outcomes = list(threads.map(lambda _: send_alert(CONFIG, FAILURE, tmp_path), range(4)))
    assert sorted(o.status for o in outcomes) == ["repeated", "repeated", "repeated", "sent"]
    assert len(hook.received) == 1


def test_an_alert_that_reached_nobody_is_no_reason_to_keep_silent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hook: Webhook
) -> None:
    monkeypatch.setenv(VARIABLE, hook.url("500"))
    assert send_alert(CONFIG, FAILURE, tmp_path).status == "failed"
    monkeypatch.setenv(VARIABLE, hook.url("ok"))
    assert send_alert(CONFIG, FAILURE, tmp_path).status == "sent"


def line(status: str, time_s: float, key: str = "k") -> list[dict]:
    return [{"id": status, "time": time_s, "event": "failure", "key": key, "status": status}]


@pytest.mark.parametrize(
    ("status", "age_s", "told"),
    [
        ("sent", 0.0, True),
        ("sent", 59.9, True),
        ("sent", 60.0, False),
        ("sent", -5.0, False),  # the clock was set back: later alerts must not be lost
        ("partly", 30.0, True),
        ("failed", 1.0, False),
        ("nobody", 1.0, False),
        ("repeated", 1.0, False),
        ("sending", 24.0, True),
        ("sending", 25.0, False),  # its sender was killed
    ],
)
def test_what_counts_as_told(status: str, age_s: float, told: bool) -> None:
    config = AlertsConfig(repeat_after_s=60.0, timeout_s=10.0)
    lines = LogLines(tuple(line(status, 1000.0)))
    assert told_before(lines, "k", 1000.0 + age_s, config) is told
    assert told_before(lines, "other", 1000.0 + age_s, config) is False


def test_everything_is_logged_and_no_address_anywhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hook: Webhook, caplog: pytest.LogCaptureFixture
) -> None:
    secret = f"json://someone:s3cr3t@127.0.0.1:{hook.port}/t0k3n/500"
    monkeypatch.setenv(VARIABLE, f"{secret} mailto://u:pa55w0rd@127.0.0.1:1/?to=who@example.org")
    outcome = send_alert(CONFIG, FAILURE, tmp_path)
    log = (tmp_path / LOG_NAME).read_text()
    seen = log + repr(outcome) + caplog.text + json.dumps(outcome.problems)
    for part in ("s3cr3t", "t0k3n", "pa55w0rd", "someone", "who@example", "127.0.0.1"):
        assert part not in seen
    assert "stage rl: out of memory" in log


def test_without_an_address_the_alert_is_written_down_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    assert send_alert(CONFIG, FAILURE, tmp_path).status == "nobody"
    monkeypatch.setenv(VARIABLE, "  \n ")
    assert send_alert(CONFIG, FAILURE, tmp_path).status == "nobody"
    (first, second), unreadable = read_alerts(tmp_path)
    assert (first.title, second.status, unreadable) == ("night failed", "nobody", ())


def test_an_event_the_profile_does_not_ask_for_is_only_written_down(
    tmp_path: Path, address: str, hook: Webhook
) -> None:
    outcome = send_alert(AlertsConfig(events=("cost",)), FAILURE, tmp_path)
    assert (outcome.status, hook.received) == ("off", [])


def test_several_variables_and_the_same_address_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ONE", "json://a/x json://b/x")
    monkeypatch.setenv("TWO", "json://a/x slack://c")
    found = alert_addresses(AlertsConfig(urls_env=("ONE", "TWO", "THREE")))
    assert found == {
        "ONE[1] (json)": "json://a/x",
        "ONE[2] (json)": "json://b/x",
        "TWO[2] (slack)": "slack://c",
    }


def test_long_hostile_and_broken_text_is_bounded_and_tamed(
    tmp_path: Path, address: str, hook: Webhook
) -> None:
    alert = Alert(
        "failure", "a\r\nBcc: x@example.org\x1b[31m" + "t" * 500, "\ud800\x00" + "b" * 9000, "k"
    )
    assert send_alert(CONFIG, alert, tmp_path).status == "sent"
    message = hook.received[0][1]
    assert (
        message["title"].startswith("a Bcc: x@example.org [31mttt") and len(message["title"]) == 160
    )
    assert len(message["message"]) == MAX_BODY and "\x00" not in message["message"]
    assert message["message"].endswith("b…")


def test_a_log_that_cannot_be_written_is_named_and_the_alert_goes_out(
    tmp_path: Path, address: str, hook: Webhook
) -> None:
    (tmp_path / LOG_NAME).mkdir()
    outcome = send_alert(CONFIG, FAILURE, tmp_path)
    assert outcome.status == "sent" and len(hook.received) == 1
    assert LOG_NAME in outcome.problems[0]


def test_a_sender_whose_run_is_killed_ends_by_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hook: Webhook
) -> None:
    code = (
        "import sys, time; from pathlib import Path; from flows.alerts.send import *\n"
        "from configs.schema.operations import AlertsConfig\n"
        "start_alert(AlertsConfig(timeout_s=2), Alert('failure','t','b','k'), Path(sys.argv[1]))\n"
        "time.sleep(60)"
    )
    environment = {**os.environ, VARIABLE: hook.url("hang"), "PYTHONPATH": str(project_root())}
    process = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], env=environment)
    try:
        assert eventually(lambda: bool(hook.received), 20)
        children = Path(f"/proc/{process.pid}/task")
        pids = [c for t in children.iterdir() for c in (t / "children").read_text().split()]
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert pids and eventually(lambda: not any(Path(f"/proc/{p}").exists() for p in pids), 10)
    assert [e.status for e in read_alerts(tmp_path)[0]] == ["sending"]


def eventually(holds, seconds: float) -> bool:
    deadline_s = time.monotonic() + seconds
    while not holds():
        if time.monotonic() > deadline_s:
            return False
        time.sleep(0.05)
    return True


def test_outcomes_are_joined_to_their_alerts_in_any_order() -> None:
    rows = (
        {"id": "a", "time": 1.0, "event": "cost", "status": "sending", "title": "A"},
        {"id": "b", "time": 2.0, "event": "gate", "status": "off"},
        {"id": "a", "time": 3.0, "status": "sent", "receivers": [{"name": "x", "ok": True}]},
        {"id": "stray", "time": 4.0, "status": "sent"},
    )
    found = entries(LogLines(rows))
    assert [(e.id, e.status, e.time) for e in found] == [("a", "sent", 1.0), ("b", "off", 2.0)]
    assert found[0].receivers == ({"name": "x", "ok": True},)


def test_the_commands_send_a_test_and_list_what_was_sent(
    tmp_path: Path, address: str, hook: Webhook, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner, where = CliRunner(), ["--runs", str(tmp_path)]
    for _ in range(2):  # a test is never a repeat
        done = runner.invoke(app, ["alerts", "test", "-c", "micro", *where])
        assert done.exit_code == 0 and f"taken by {VARIABLE}[1] (json)" in done.output
    assert [m["type"] for _, m in hook.received] == ["info", "info"]
    monkeypatch.delenv(VARIABLE)
    done = runner.invoke(app, ["alerts", "test", "-c", "micro", *where])
    assert done.exit_code == 1 and f"{VARIABLE} is empty" in done.output
    listed = runner.invoke(app, ["alerts", "list", "--last", "2", *where])
    assert listed.exit_code == 0 and "nobody" in listed.output and "sent" in listed.output
    as_json = runner.invoke(app, ["alerts", "list", "--json", "--last", "1", *where])
    assert json.loads(as_json.output)["status"] == "nobody"
    assert "no alerts" in runner.invoke(app, ["alerts", "list", "--runs", "/tmp/none"]).output
