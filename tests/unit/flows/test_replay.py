"""A finished run's rewards, replayed by the command."""

import json
from dataclasses import replace

import pytest
from typer.testing import CliRunner

from configs.schema import PipelineConfig
from flows.cli import app
from flows.replay import DIFFERENCES, ReplayInputError, replay_run
from tasks.artifacts import write_json, write_jsonl
from tasks.environments.renderer import PromptRenderer
from tasks.models.load import load_tokenizer
from tasks.rl.sample_log import SAMPLES, SampleLog
from tests.tiny_run import tiny_config, tiny_data, tiny_snapshot
from tests.tiny_samples import ROWS, trained_samples

__all__ = ["tiny_config", "tiny_data", "tiny_snapshot"]


@pytest.fixture
def run(tmp_path, tiny_snapshot):
    """A run of two batches: its records, data, tokenizer and samples."""
    folder, policy, data = tmp_path / "run", tmp_path / "rl", tmp_path / "data"
    load_tokenizer(tiny_snapshot.folder).save_pretrained(policy / "policy")
    write_jsonl(data / "train.jsonl", [row.model_dump() for row in ROWS.values()])
    config = PipelineConfig.model_validate({"profile": "test"})
    write_json(folder / "config.json", config.model_dump(mode="json"))
    records = {name: {"uri": (tmp_path / name).as_posix()} for name in ("rl", "data")}
    write_json(folder / "records.json", records)
    samples = trained_samples(PromptRenderer(load_tokenizer(tiny_snapshot.folder)))
    for batch in range(2):
        SampleLog(policy / SAMPLES).write(batch, samples)
    return folder


def replay(*arguments):
    return CliRunner().invoke(app, ["replay", *map(str, arguments)])


def test_a_run_that_still_earns_the_same(run):
    result = replay(run)
    assert result.exit_code == 0, result.output
    assert "8 samples of 2 batches graded again; 0 outcomes and 0 rewards differ; 0 advantages" in (
        " ".join(result.output.split())
    )
    assert not (run / DIFFERENCES).exists()


def test_another_answer_is_counted_shown_and_written(run):
    changed = ROWS["r"].model_copy(update={"answer": "3"})
    write_jsonl(run.parent / "data" / "train.jsonl", [changed.model_dump()])
    result = replay(run)
    said = " ".join(result.output.split())
    assert result.exit_code == 1 and "6 outcomes and 6 rewards differ" in said, result.output
    assert "1 → 0" in said and "0 → 1" in said
    lines = [json.loads(x) for x in (run / DIFFERENCES).read_text().splitlines()]
    assert {line["batch"] for line in lines} == {0, 1}
    assert (lines[1]["rollout_id"], lines[1]["outcome_then"], lines[1]["outcome_now"]) == (
        "7.0.1", 0.0, 1.0,
    )  # fmt: skip


def test_an_override_is_laid_over_the_runs_own_config(run):
    found = replay_run(run, ["rl.reward.outcome=2"])
    assert (found.outcomes, found.rewards) == (0, 4)
    blind = replay_run(run, ["rl.credit.type=turn_gae"])
    assert blind.advantages is None and not blind.differences
    out = run.parent / "elsewhere.jsonl"
    result = replay(run, "rl.reward.outcome=2", "--out", out)
    assert result.exit_code == 1 and len(out.read_text().splitlines()) >= 4
    assert "not compared" in " ".join(replay(run, "rl.credit.type=turn_gae").output.split())
    bad = replay(run, "rl.reward.outcom=2")
    assert bad.exit_code == 2 and "rl.reward.outcome" in bad.output


def test_hostile_text_is_shown_as_text(run, tiny_snapshot):
    samples = trained_samples(PromptRenderer(load_tokenizer(tiny_snapshot.folder)))
    group = samples.groups[0]
    evil = replace(group.rollouts[1].rollout, final_text="[red]3\x1b[2J" + "x" * 500)
    rollouts = (group.rollouts[0], replace(group.rollouts[1], rollout=evil), *group.rollouts[2:])
    log = SampleLog(run.parent / "rl" / SAMPLES)
    log.write(0, replace(samples, groups=(replace(group, rollouts=rollouts),)))
    result = replay(run, "rl.reward.outcome=2")
    assert "\x1b" not in result.output and "[red]3" in result.output


@pytest.mark.parametrize("gone", ["rl", "data"])
def test_what_is_missing_is_named(run, gone):
    records = json.loads((run / "records.json").read_text())
    del records[gone]
    write_json(run / "records.json", records)
    with pytest.raises(ReplayInputError, match=f"stage {gone}"):
        replay_run(run)


def test_a_run_without_samples_says_how_to_get_them(run):
    SampleLog(run.parent / "rl" / SAMPLES).resume(0)
    result = replay(run)
    assert (
        result.exit_code == 2
        and "keep_samples" in result.output
        and "--force rl" in (" ".join(result.output.split()))
    )
