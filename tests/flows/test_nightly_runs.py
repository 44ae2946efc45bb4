"""Nights one after another through the whole flow: real Prefect server, real MLflow, no worker."""

import json
import os
from pathlib import Path

import pytest
from prefect.client.orchestration import get_client
from prefect.settings import PREFECT_API_URL, temporary_settings

from configs.schema import PipelineConfig
from flows.nightly.log import NightLog
from flows.run_ends import NightSkippedError
from flows.run_lock import RunLock
from tasks.artifacts.append_log import read_log
from tasks.supervise import StageFailedError

STAGES = ["data", "sft", "rl", "evaluation", "quantize", "package"]


def config(**nightly) -> PipelineConfig:
    """Micro-sized in what the tiny stages read, with a drop folder."""
    block = {"drop_folder": "drop", "timezone": "Europe/Berlin", **nightly}
    return PipelineConfig.model_validate({"nightly": block})


def drop(name: str, *numbers: int) -> None:
    """A finished file of new rows."""
    rows = [{"prompt": f"{n}+1=?", "answer": str(n + 1), "band": "easy"} for n in numbers]
    Path("drop").mkdir(exist_ok=True)
    Path("drop", name).write_text("".join(json.dumps(row) + "\n" for row in rows))


def statuses(summary) -> dict[str, str]:
    return {name: stage["status"] for name, stage in summary["stages"].items()}


def last_state():
    settings = temporary_settings({PREFECT_API_URL: os.environ["PREFECT_API_URL"]})
    with settings, get_client(sync_client=True) as client:
        return client.read_flow_runs(limit=1, sort="EXPECTED_START_TIME_DESC")[0].state


def outcomes() -> list[str]:
    return [line.outcome for line in NightLog(Path("runs"), "calculator").lines()]


@pytest.fixture
def drop_folder(tiny_pipeline):
    Path("drop").mkdir()


def first_night(tiny_pipeline):
    """There is no champion to start from yet: trained from the base, and promoted."""
    first, _ = tiny_pipeline(config(start_from="champion"), nightly=True)
    night = first["night"]
    assert (night["outcome"], night["scheduled"], night["zone"]) == (
        "trained",
        False,
        "Europe/Berlin",
    )
    assert night["starts_from"] == {
        "asked": "champion",
        "what": "base",
        "release": None,
        "sha256": None,
        "why_not": "there is no champion yet",
    }
    assert night["kl_reference_sha256"] == first["stages"]["sft"]["output_sha256"]
    assert any("there is no champion yet" in warning for warning in first["warnings"])
    assert first["promotion"]["outcome"] == "promoted"
    return first


def night_with_nothing_new(tiny_pipeline):
    """It ends as completed, with nothing run."""
    second, events = tiny_pipeline(config(start_from="champion"), nightly=True)
    assert second["status"] == "FINISHED"
    assert second["night"]["outcome"] == "nothing new"
    assert (second["night"]["new_rows"], second["night"]["dropped_lines"]) == (0, 0)
    assert set(statuses(second).values()) == {"completed", "not run"}
    assert statuses(second)["sft"] == "not run"
    said = [e.message for e in events if e.kind == "note"]
    assert any(text.startswith("nothing new: 0 training rows") for text in said)
    state = last_state()
    assert state.is_completed() and state.message.startswith("nothing new: 0 training rows")


def night_with_new_rows(tiny_pipeline, first):
    """Started from the champion, trained on what was dropped; half a line waits."""
    drop("monday.jsonl", 100, 101)
    Path("drop", "torn.jsonl").write_text('{"prompt": "1+1=?", "ans')
    third, events = tiny_pipeline(config(start_from="champion"), nightly=True)
    night = third["night"]
    assert (night["outcome"], night["new_rows"], night["dropped_lines"]) == ("trained", 2, 2)
    assert night["dropped_files"] == {"monday.jsonl": 2}
    assert night["left_files"] == {
        "torn.jsonl": "no newline at its end, so half-written; next night"
    }
    champion = first["stages"]["rl"]["output_sha256"]
    assert night["starts_from"]["what"] == "champion"
    assert night["starts_from"]["sha256"] == champion == night["kl_reference_sha256"]
    assert third["stages"]["sft"]["output_sha256"] == champion
    assert any(f"weights {champion[:12]}, of calculator v1" in e.message for e in events)
    return third


def test_nights_train_on_what_is_new_and_only_then(tiny_pipeline, migrated, drop_folder):
    """First night, nothing new, new rows, a start from the champion: one chain."""
    first = first_night(tiny_pipeline)
    night_with_nothing_new(tiny_pipeline)
    third = night_with_new_rows(tiny_pipeline, first)
    fourth, _ = tiny_pipeline(config(start_from="snapshot", min_new_rows=2), nightly=True)
    assert fourth["night"]["outcome"] == "nothing new"  # the same rows are not new again
    drop("tuesday.jsonl", 100, 102)
    fifth, _ = tiny_pipeline(config(start_from="snapshot", min_new_rows=2), nightly=True)
    assert fifth["night"]["outcome"] == "nothing new"  # one new row, two are asked for
    drop("tuesday.jsonl", 100, 102, 103)
    sixth, _ = tiny_pipeline(config(start_from="snapshot", min_new_rows=2), nightly=True)
    assert (sixth["night"]["outcome"], sixth["night"]["new_rows"]) == ("trained", 2)
    assert sixth["night"]["starts_from"]["what"] == "snapshot"
    heldout = {s["night"]["heldout_sha256"] for s in (first, third, sixth)}
    assert len(heldout) == 1
    assert [outcome for outcome in outcomes() if outcome != "started"] == [
        "trained",
        "nothing new",
        "trained",
        "nothing new",
        "nothing new",
        "trained",
    ]
    by_day, _ = tiny_pipeline(stop_after="data")
    assert by_day["night"] is None


def test_a_failed_night_goes_on_at_the_failed_stage_and_its_rows_stay_new(
    tiny_pipeline, behave, migrated, drop_folder
):
    tiny_pipeline(config(), nightly=True)
    drop("monday.jsonl", 200)
    behave(evaluation="raise")
    with pytest.raises(StageFailedError, match="stage evaluation failed"):
        tiny_pipeline(config(), nightly=True)
    failed = json.loads(Path("runs/latest/summary.json").read_bytes())
    assert (failed["status"], failed["night"]["outcome"]) == ("FAILED", "failed")
    behave()
    again, _ = tiny_pipeline(config(), nightly=True)
    reused = {name for name, stage in again["stages"].items() if stage["cached"]}
    assert reused == {"data", "sft", "rl"}
    assert (again["night"]["outcome"], again["night"]["new_rows"]) == ("trained", 1)
    assert outcomes()[2:] == ["started", "failed", "started", "trained"]
    assert "stage evaluation failed" in NightLog(Path("runs"), "calculator").lines()[3].reason


def test_a_night_that_was_cut_short_on_purpose_is_not_built_upon(
    tiny_pipeline, migrated, drop_folder
):
    summary, _ = tiny_pipeline(config(), nightly=True, stop_after="data")
    assert summary["night"]["outcome"] == "stopped"
    assert NightLog(Path("runs"), "calculator").last_trained() is None


def test_a_night_that_finds_another_run_at_work_skips_itself_and_says_so(
    tiny_pipeline, server, drop_folder
):
    with (
        RunLock(Path("runs"), "by-day"),
        pytest.raises(
            NightSkippedError, match=r"night \d{4}-\d\d-\d\d skipped: run by-day \(process"
        ),
    ):
        tiny_pipeline(config(), nightly=True)
    assert outcomes() == ["skipped"]
    alerts = [row for row in read_log(Path("runs/alerts.jsonl")).rows if "skipped" in str(row)]
    assert alerts


def test_a_missing_drop_folder_fails_the_night_by_name(tiny_pipeline, migrated):
    with pytest.raises(ValueError, match=r"nightly\.drop_folder='drop': No such file"):
        tiny_pipeline(config(), nightly=True)
    assert outcomes() == ["started", "failed"]
