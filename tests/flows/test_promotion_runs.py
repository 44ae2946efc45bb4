"""Promotion over the whole flow: runs one after the other, the ledger, MLflow, the command line."""

import json
from pathlib import Path

import pytest
from rich.console import Console

from configs.schema import PipelineConfig
from flows.commands.promotion_view import show_transcripts
from flows.plan import plan
from flows.promotion.acts import approve, rollback
from flows.promotion.transcripts import transcripts_of
from tasks.supervise import StageFailedError
from tasks.tracking.promotion_ledger import LedgerCorruptError, PromotionLedger
from tasks.tracking.registry import aliases


def config(steps, **blocks):
    """A run whose model solves `steps` of the eight held-out problems."""
    blocks.setdefault("promotion", {"problems": 8})
    return PipelineConfig.model_validate({"rl": {"steps": steps}, **blocks})


def said(summary):
    promotion = summary["promotion"]
    return promotion["outcome"], promotion["version"]


def registry(summary):
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=summary["mlflow"]["tracking_uri"])
    return aliases(client, "calculator")


@pytest.fixture
def ledger(tiny_pipeline):
    """The ledger of the default profile."""
    return PromotionLedger(Path("runs"), "calculator")


def worse_stays_a_candidate(tiny_pipeline):
    """With the figures it was judged by."""
    worse, _ = tiny_pipeline(config(2))
    assert said(worse) == ("candidate", 2)
    evidence = worse["promotion"]["evidence"]
    # solves h0 and h1 of 8, the champion h0 … h3: two fewer
    assert evidence["candidate_accuracy"] == 0.25
    assert evidence["champion_accuracy"] == 0.5
    assert evidence["delta"] == -0.25
    assert evidence["ci95"][0] < -0.25 < evidence["ci95"][1] <= 0
    assert (evidence["passed"], evidence["margin"], evidence["problems"]) == (False, 0.0, 8)
    assert any("calculator v2 candidate" in w for w in worse["warnings"])


def told_and_shown():
    """Alerts of every decision, and transcripts of the last challenge."""
    alerts = [json.loads(line) for line in Path("runs/alerts.jsonl").read_text().splitlines()]
    titles = [a["title"] for a in alerts if a.get("event") == "promotion"]
    assert titles == [
        "rl-pipeline: calculator v1 is the champion",
        "rl-pipeline: calculator v2 stays a candidate",
        "rl-pipeline: calculator v2 is the champion",
        "rl-pipeline: calculator v3 is the champion",
    ]
    shown = transcripts_of(Path("runs/latest"))
    _check_transcripts_are_shown_as_text(shown)
    assert {side["name"] for pair in shown for side in pair["sides"]} == {"Champion", "Candidate"}
    assert {pair["kind"] for pair in shown} >= {"the candidate fixed it", "right both times"}


def withdrawn_is_not_promoted_again(tiny_pipeline, ledger):
    """Not by a run: only a person does that."""
    rollback(Path("runs"), reason="wrong units")
    comes_again, _ = tiny_pipeline(config(6))
    assert said(comes_again) == ("candidate", 3)
    assert "only a person promotes it again" in comes_again["promotion"]["reason"]
    assert ledger.champion().version == 2
    # the run's start has moved what the rollback, made without MLflow, left behind
    assert registry(comes_again) == {"champion": ledger.champion().bundle_sha256}


def test_better_equal_and_worse_candidates(tiny_pipeline, migrated, ledger):
    first, events = tiny_pipeline(config(4))
    assert said(first) == ("promoted", 1)
    assert "no champion to beat" in first["promotion"]["reason"]
    assert "challenge" not in {event.stage for event in events}
    assert first["warnings"] == []

    again, _ = tiny_pipeline(config(4))
    assert said(again) == ("champion already", 1)
    assert len(ledger.entries()) == 1

    worse_stays_a_candidate(tiny_pipeline)
    tolerant, _ = tiny_pipeline(config(2, promotion={"problems": 8, "margin": 1.0}))
    assert said(tolerant) == ("promoted", 2)
    better, events = tiny_pipeline(config(6))
    assert said(better) == ("promoted", 3)
    assert [e.stage for e in events if e.kind == "stage_finished"][-2:] == ["package", "challenge"]
    records = json.loads(Path("runs/latest/records.json").read_bytes())
    assert records["challenge"]["kind"] == "challenge"
    assert set(better["stages"]) == {"data", "sft", "rl", "evaluation", "quantize", "package"}
    assert len(plan(config(6))) == 6

    state = ledger.state()
    assert (state.champion.version, state.previous.version) == (3, 2)
    assert ledger.verify() == 4
    assert registry(better) == {
        "champion": state.champion.bundle_sha256,
        "previous": state.previous.bundle_sha256,
    }
    told_and_shown()
    withdrawn_is_not_promoted_again(tiny_pipeline, ledger)

    ledger.path.write_bytes(ledger.path.read_bytes().replace(b"wrong units", b"Wrong units"))
    store = sorted(Path("runs/store").rglob("*"))
    with pytest.raises(LedgerCorruptError, match="line 5"):
        tiny_pipeline(config(7))
    assert sorted(Path("runs/store").rglob("*")) == store  # said before any work


def _check_transcripts_are_shown_as_text(shown):
    """Neither markup nor control characters of a model reach the terminal."""
    out = Console(record=True, width=100)
    hostile = json.loads(json.dumps(shown[:1]))
    hostile[0]["sides"][0]["messages"][0]["content"] = "[red]\x1b]0;owned\x07[/red] end"
    show_transcripts(hostile, out)
    text = out.export_text()
    assert "[red]" in text
    assert "\x1b" not in text
    assert "<b>`4`" in text


def test_what_cannot_be_compared_is_not_promoted(tiny_pipeline, migrated, behave, ledger):
    tiny_pipeline(config(2), stop_after="package")
    assert not ledger.path.exists()  # stopped before the decision
    tiny_pipeline(config(2))
    model = Path(ledger.champion().bundle) / "models" / "Q8_0.gguf"
    model.rename("aside")
    summary, events = tiny_pipeline(config(6))
    assert said(summary) == ("candidate", 2)
    assert "calculator v1, the champion, cannot be scored" in summary["promotion"]["reason"]
    assert "challenge" not in {event.stage for event in events}
    Path("aside").rename(model)

    behave(challenge="raise")
    with pytest.raises(StageFailedError, match="stage challenge failed"):
        tiny_pipeline(config(6))
    assert ledger.champion().version == 1
    assert len(ledger.entries()) == 2  # nothing was decided
    behave()
    summary, _ = tiny_pipeline(config(6))
    assert said(summary) == ("promoted", 2)


def test_approval_without_a_deployment(tiny_pipeline, migrated, ledger):
    settings = {"promotion": {"problems": 8, "approval": True}}
    first, _ = tiny_pipeline(config(4, **settings))
    assert said(first) == ("waiting", 1)
    assert first["promotion"]["evidence"]["flow_run_id"] is None
    assert ledger.champion() is None
    again, _ = tiny_pipeline(config(4, **settings))
    assert said(again) == ("waiting", 1)
    assert len(ledger.entries()) == 1  # the same question is not asked twice
    approve(Path("runs"), "latest", reason="reads well")
    second, _ = tiny_pipeline(config(6, **settings))
    assert said(second) == ("waiting", 2)
    approve(Path("runs"), "latest", reject=True, reason="rude")
    rejected, _ = tiny_pipeline(config(6, **settings))
    assert said(rejected) == ("candidate", 2)
    assert "rejected by" in rejected["promotion"]["reason"]
    assert ledger.champion().version == 1
