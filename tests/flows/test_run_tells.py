"""A run tells people how it ended, and a receiver that hangs does not hold it."""

import json
import time
from pathlib import Path

import pytest
from alert_receivers import Webhook

from configs.schema import PipelineConfig
from flows.alerts.send import read_alerts
from tasks.supervise import StageFailedError

VARIABLE = "RL_PIPELINE_ALERT_URLS"


def test_failure_and_cost_are_told_and_who_did_not_take_it_is_a_warning_of_the_run(
    tiny_pipeline, behave, migrated, monkeypatch
):
    alerts = {"timeout_s": 2.0, "max_run_usd": 0.0005, "events": ["failure", "cost"]}
    config = PipelineConfig.model_validate({"alerts": alerts})
    with Webhook() as hook:
        monkeypatch.setenv(VARIABLE, f"{hook.url('ok')} {hook.url('hang')}")
        behave(sft="raise")
        with pytest.raises(StageFailedError):
            tiny_pipeline(config)
        failed = json.loads(Path("runs/latest/summary.json").read_bytes())
        behave()
        started_s = time.monotonic()
        summary, _ = tiny_pipeline(config)
        told_s = time.monotonic() - started_s - summary["wall_s"]
        again, _ = tiny_pipeline(config)
    titles = [message["title"] for path, message in hook.received if path == "/ok"]
    assert titles == [
        "rl-pipeline calculator: stage sft failed (ValueError)",
        # 72 slot-seconds at 0.05 USD an hour
        "rl-pipeline calculator: RL cost $0.001, over alerts.max_run_usd=$0.0005",
    ]
    given_up = f"alert not taken by {VARIABLE}[2] (json): no answer within"
    for found in (failed, summary):
        assert any(warning.startswith(given_up) for warning in found["warnings"])
    assert told_s < 10
    assert again["warnings"] == []  # everything was reused: there is nothing to tell
    entries, _ = read_alerts(Path("runs"))
    sent = [(e.event, e.status) for e in entries if e.status != "off"]
    assert sent == [("failure", "partly"), ("cost", "partly")]
