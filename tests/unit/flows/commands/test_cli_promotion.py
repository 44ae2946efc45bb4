"""`promote`, `rollback`, `approve`, `history` as people and scripts see them."""

import json
import re
from datetime import UTC, datetime, timedelta

import pytest
from typer.testing import CliRunner

from flows.cli import app
from flows.commands.promotion_view import plain
from flows.promotion.approval import approval_markdown, fenced
from flows.promotion.news import promotion_alert
from flows.promotion.releases import find_release
from tasks.tracking.promotion_ledger import PromotionLedger
from tests.small_releases import write_run


@pytest.fixture
def runs(tmp_path, monkeypatch):
    """Two packaged runs; the MLflow store cannot be reached, which costs no time."""
    monkeypatch.delenv("RL_PIPELINE_SIGNING_KEY", raising=False)
    monkeypatch.delenv("RL_PIPELINE_ALERT_URLS", raising=False)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    folder = tmp_path / "runs"
    for name in ("r1", "r2"):
        write_run(folder, name)
    return folder


def call(runs, *arguments, **options):
    return CliRunner().invoke(app, [*arguments, "--runs", str(runs)], **options)


def text(result):
    return " ".join(re.sub(r"\x1b\[[0-9;]*m|[│╭╮╰╯─]", "", result.output).split())


@pytest.mark.parametrize("command", ["promote", "rollback", "approve", "history"])
def test_every_command_teaches_with_an_example(command):
    result = CliRunner().invoke(app, [command, "--help"])
    assert result.exit_code == 0
    assert f"Example: rl-pipeline {command}" in text(result)


def test_promote_rollback_and_history(runs):
    done = call(runs, "promote", "r1")
    assert done.exit_code == 0, done.output
    assert "champion of calc: v1" in text(done)
    assert "the ledger is right, but MLflow's aliases wait" in text(done)
    refused = call(runs, "promote", "r2")
    assert refused.exit_code == 2
    assert "it has not been compared with calc v1" in text(refused)
    assert "Traceback" not in refused.output
    assert call(runs, "promote", "r2", "--force").exit_code == 2
    assert call(runs, "promote", "r2", "--force", "--reason", "[b]mine[/b]").exit_code == 0
    assert call(runs, "rollback", "--reason", "units").exit_code == 0
    again = call(runs, "rollback")
    assert again.exit_code == 2
    assert "only one rollback follows a promotion" in text(again)

    shown = text(call(runs, "history"))
    assert "[b]mine[/b]" in shown
    assert "calc: champion calc v1, previous nobody; 3 entries, the chain verifies" in shown
    (body,) = json.loads(call(runs, "history", "--json").output)
    assert body["verified_entries"] == 3
    assert body["champion"]["run_id"] == "r1"
    assert [e["action"] for e in body["entries"]] == ["promote", "promote", "rollback"]
    assert "promote" not in text(call(runs, "history", "--last", "1"))
    alerts = (runs / "alerts.jsonl").read_text()
    assert "rolled back to calc v1" in alerts
    assert "calc v2 is the champion" in alerts


def test_history_of_nothing_and_of_no_such_model(tmp_path):
    assert "nothing was packaged" in text(call(tmp_path, "history"))
    assert json.loads(call(tmp_path, "history", "--json").output) == []
    missing = call(tmp_path, "history", "--model", "calc")
    assert missing.exit_code == 2
    assert "nothing was packaged for calc" in text(missing)


def test_history_of_a_changed_ledger_names_the_line(runs):
    call(runs, "promote", "r1")
    ledger = PromotionLedger(runs, "calc")
    ledger.path.write_bytes(ledger.path.read_bytes().replace(b"by hand", b"by Hand"))
    result = call(runs, "history")
    assert result.exit_code == 2
    assert "line 1 differs from what was written" in text(result)
    assert "Traceback" not in result.output


def test_repair_puts_a_torn_line_aside(runs):
    call(runs, "promote", "r1")
    ledger = PromotionLedger(runs, "calc")
    with ledger.path.open("ab") as file:
        file.write(b'{"half')
    torn = call(runs, "history")
    assert torn.exit_code == 2
    assert "line 2 is half-written" in text(torn)
    repaired = call(runs, "history", "--repair")
    assert repaired.exit_code == 0
    assert "1 entries, the chain verifies" in text(repaired)
    assert "127.0.0.1:9" in text(repaired)  # the store still does not answer
    (aside,) = ledger.path.parent.glob("*.torn-*")
    assert aside.read_bytes() == b'{"half'


def test_approve_shows_then_asks(runs):
    ledger = PromotionLedger(runs, "calc")
    until = (datetime.now(UTC) + timedelta(hours=1)).isoformat()
    facts = {"champion": None, "passed": True, "waiting": True, "approve_by": until}
    ledger.append("candidate", find_release(runs, "r1"), reason="waits", evidence=facts)
    nobody = call(runs, "approve", "r1")
    assert nobody.exit_code == 2
    assert "the run left no transcripts to look at" in text(nobody)
    assert "nobody to ask: no terminal" in text(nobody)
    assert ledger.champion() is None
    done = call(runs, "approve", "r1", "--yes", "--reason", "fine")
    assert done.exit_code == 0, done.output
    assert ledger.entries()[-1].reason == "fine"
    gone = call(runs, "approve", "r1", "--yes")
    assert gone.exit_code == 2
    assert "it is the champion" in text(gone)


def test_alerts_tell_what_happened_and_what_to_do(runs):
    ledger = PromotionLedger(runs, "calc")
    facts = {"waiting": True, "approve_by": "2030-01-01T00:00:00+00:00"}
    entry = ledger.append("candidate", find_release(runs, "r1"), reason="good", evidence=facts)
    alert = promotion_alert(entry)
    assert alert.event == "promotion"
    assert alert.title == "rl-pipeline: calc v1 waits for approval"
    assert "rl-pipeline approve calc:1" in alert.body
    assert "2030-01-01" in alert.body
    other = ledger.append("promote", find_release(runs, "r1"), reason="yes", actor="ann@x")
    assert promotion_alert(other).title == "rl-pipeline: calc v1 is the champion"
    assert "by ann@x, run r1" in promotion_alert(other).body
    assert promotion_alert(other).key != alert.key


def test_text_of_models_is_text():
    assert plain("[red]x[/red]\x1b[31m\x00\u202ey") == "\\[red]x\\[/red]\ufffd[31m\ufffd\ufffdy"
    assert plain("tab\tand\nline stay") == "tab\tand\nline stay"
    assert fenced("a```b````c") == "`````text\na```b````c\n`````"
    assert fenced("plain") == "```text\nplain\n```"
    pair = {
        "prompt": "<script>", "gold": "4", "kind": "the candidate broke it",
        "sides": [{"name": "Champion", "outcome": "correct",
                   "messages": [{"role": "agent", "content": "```\n# heading"}]}],
    }  # fmt: skip
    page = approval_markdown("calc:1", {"reason": "<b>good</b>"}, [pair])
    assert "&lt;b&gt;good&lt;/b&gt;" in page
    assert "````text\nagent: ```\n# heading\n````" in page
    assert "No transcripts" in approval_markdown("calc:1", {"reason": "r"}, [])
