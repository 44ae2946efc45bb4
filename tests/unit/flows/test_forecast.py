"""Figures found in a folder of runs, settings changed, and what the command prints."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from configs.load import dump_config, load_config
from configs.schema import PipelineConfig
from flows.cli import app
from flows.commands.forecast import duration_text, money_text
from flows.forecast import (
    PROBE_STEPS,
    figures_for,
    for_settings,
    in_hindsight,
    measured,
    outlook,
    probings,
)
from tasks.artifacts import ArtifactRecord
from tasks.rl.figures import Figures, decode_speed
from tasks.rl.figures_of_runs import UNHINDERED


def leave_run(runs: Path, config: PipelineConfig, train_s: float = 0.5) -> Path:
    """A run's folder with an RL stage of ten steps; each took `train_s` to train."""
    folder, run = runs / "store/rl/abc", runs / f"20260101-000000-{config.profile}-0000"
    folder.mkdir(parents=True)
    run.mkdir(parents=True)
    made = 10 * config.rl.batch_size
    seconds = {
        "learner": {"train": 10 * train_s, "sync": 0.5, "startup": 3.0},
        "rollout-0": {"rollout": 6.0, "grade": 0.1, "sync": 0.5, "startup": 3.0},
    }
    ledger = {"samples": {"trained": made}, "seconds": seconds}
    values = {
        "generated_tokens_mean": 30.0, "turns_mean": 2.0, "staleness_mean": 1.0,
        "effective_share": 0.4, "kept_token_share": 0.95, "ess_share": 0.9,
    }  # fmt: skip
    (folder / "ledger.json").write_text(json.dumps(ledger))
    (folder / "summary.json").write_text('{"steps": 10, "sync_proofs": 10, "samples": 320}')
    (folder / "metrics.jsonl").write_text(json.dumps({"step": 1, "values": values}) + "\n")
    record = {"kind": "model", "uri": "store/rl/abc", "sha256": "0" * 64, "meta": {}}
    (run / "records.json").write_text(json.dumps({"rl": record}))
    (run / "config.json").write_text(json.dumps(dump_config(config)))
    return run


def gathered(folder: Path, *others: Path) -> Path:
    """Runs made in folders of their own, in one; each finds its stage where it was made."""
    folder.mkdir()
    for other in others:
        (run,) = other.glob("2026*")
        record = json.loads((run / "records.json").read_text())
        record["rl"]["uri"] = str(other / "store/rl/abc")
        (run / "records.json").write_text(json.dumps(record))
        run.rename(folder / run.name)
    return folder


@pytest.fixture(scope="module")
def config() -> PipelineConfig:
    return load_config("calculator", {"rl.batch_size": 32})


@pytest.fixture(scope="module")
def figures(config: PipelineConfig, tmp_path_factory: pytest.TempPathFactory) -> Figures:
    found = measured(leave_run(tmp_path_factory.mktemp("runs"), config))
    assert found is not None
    return found


def test_the_newest_run_of_the_profile_is_what_was_measured(
    config: PipelineConfig, tmp_path: Path
) -> None:
    assert figures_for(config, tmp_path).source.startswith("assumed")
    leave_run(tmp_path, config)
    found = figures_for(config, tmp_path)
    assert found.source == "measured by abc, 10 steps"
    assert found.times.train_s == pytest.approx(0.5)


def test_a_probe_counts_where_there_is_no_run(config: PipelineConfig, tmp_path: Path) -> None:
    probed = config.model_copy(update={"profile": "calculator-probe"})
    leave_run(tmp_path, probed, train_s=0.8)
    assert figures_for(config, tmp_path).times.train_s == pytest.approx(0.8)


def test_a_probe_just_made_goes_before_an_older_run(config: PipelineConfig, tmp_path: Path) -> None:
    leave_run(tmp_path / "own", config)
    probed = config.model_copy(update={"profile": "calculator-probe"})
    leave_run(tmp_path / "probe", probed, train_s=0.8)
    runs = gathered(tmp_path / "all", tmp_path / "own", tmp_path / "probe")
    assert figures_for(config, runs).times.train_s == pytest.approx(0.5)
    assert figures_for(config, runs, probed=True).times.train_s == pytest.approx(0.8)


def test_the_half_of_a_probe_in_turns_is_for_what_is_in_turns(
    config: PipelineConfig, tmp_path: Path
) -> None:
    beside, alone = probings(config)
    leave_run(tmp_path / "beside", beside, train_s=0.8)
    leave_run(tmp_path / "alone", alone, train_s=0.3)
    found = figures_for(config, gathered(tmp_path / "all", tmp_path / "beside", tmp_path / "alone"))
    assert found.times.train_s == pytest.approx(0.8)
    assert found.times_in_turns is not None
    assert found.times_in_turns.train_s == pytest.approx(0.3)
    assert UNHINDERED not in found.assumptions
    larger = for_settings(found, load_config("calculator", {"rl.batch_size": 64}))
    assert larger.times_in_turns is not None
    assert larger.times_in_turns.train_s == pytest.approx(0.6)
    one = figures_for(config, leave_run(tmp_path / "one", beside).parent)
    assert one.times_in_turns is None and UNHINDERED in one.assumptions


def test_a_probe_is_short_publishes_each_step_and_calls_tools_as_they_are() -> None:
    slow = {"rl.tools.simulated_latency": {"median_s": 0.3, "sigma": 1.0, "max_s": 10.0}}
    config = load_config("calculator", {**slow, "rl.staleness_limit": 4})
    beside, alone = probings(config)
    assert [p.rl.staleness_limit for p in (beside, alone)] == [4, 0]
    for short in (beside, alone):
        assert short.rl.steps == PROBE_STEPS and short.rl.tools.simulated_latency is None
        assert (short.rl.publish.start, short.rl.publish.end) == (1, 1)
        assert short.rl.batch_size == config.rl.batch_size
    assert len({config.profile, beside.profile, alone.profile}) == 3
    (only,) = probings(load_config("micro"))
    assert only.profile == "micro-probe"


@pytest.mark.parametrize("damage", ["records.json", "config.json"])
def test_a_damaged_run_is_no_measurement(
    config: PipelineConfig, tmp_path: Path, damage: str
) -> None:
    run = leave_run(tmp_path, config)
    (run / damage).write_text("{")
    assert measured(run) is None
    assert figures_for(config, tmp_path).source.startswith("assumed")


def test_a_batch_twice_as_large_takes_twice_as_long(figures: Figures) -> None:
    larger = load_config("calculator", {"rl.batch_size": 64, "rl.staleness_limit": 4})
    changed = for_settings(figures, larger)
    assert changed.times.train_s == pytest.approx(1.0)
    assert (changed.work.batch_size, changed.work.staleness_limit) == (64, 4)
    assert changed.work.turns_mean == figures.work.turns_mean


def test_a_rarer_publish_and_a_tighter_clip_cost_effective_samples(
    config: PipelineConfig, figures: Figures
) -> None:
    base = outlook("", config, figures)
    tighter = {"rl.batch_size": 32, "rl.loss.clip_high": 0.02, "rl.loss.clip_low": 0.02}
    clipped = outlook("", load_config("calculator", tighter), figures)
    assert clipped.wall_s == pytest.approx(base.wall_s)
    assert clipped.usd_per_effective > base.usd_per_effective
    rarer = {"rl.batch_size": 32, "rl.publish": {"start": 3, "end": 3}}
    aged = outlook("", load_config("calculator", rarer), figures)
    # at N = η + 1 nothing may start on the third step's weights: the sides nearly take turns
    assert aged.wall_s > base.wall_s


def test_time_and_cost_by_hand(config: PipelineConfig, figures: Figures) -> None:
    look = outlook("", config, figures)
    samples = config.rl.steps * 32
    assert look.samples == samples
    assert look.wall_s == pytest.approx(3.0 + samples / look.candidate.samples_per_s)
    price = config.cost.usd_per_device_hour
    assert look.usd == pytest.approx(look.wall_s * 2 * price / 3600)  # learner and one worker


def test_in_hindsight_a_run_says_what_synchronous_would_have_taken(
    config: PipelineConfig, tmp_path: Path
) -> None:
    leave_run(tmp_path, config)
    record = ArtifactRecord(
        kind="model", uri=str(tmp_path / "store/rl/abc"), sha256="0" * 64, meta={}
    )
    said = in_hindsight(record, config)
    assert 0 < said["modelled_s"] < said["modelled_synchronous_s"]
    assert in_hindsight(None, config) == {}
    alternating = {"rl.staleness_limit": 0, "rl.publish": {"start": 1, "end": 1}}
    assert in_hindsight(record, load_config("calculator", alternating)) == {}
    (tmp_path / "store/rl/abc/ledger.json").write_text('{"samples": {"trained": null}}')
    assert in_hindsight(record, config) == {}


def test_the_command_says_what_it_used_and_what_to_do(
    config: PipelineConfig, tmp_path: Path
) -> None:
    leave_run(tmp_path, config)
    asked = [
        "forecast",
        "--runs",
        str(tmp_path),
        "rl.batch_size=32",
        "--what-if",
        "rl.publish.end=3",
    ]
    shown = CliRunner().invoke(app, asked)
    text = " ".join(shown.output.split())
    assert shown.exit_code == 0, shown.output
    assert "measured by abc" in text and "with rl.publish.end=3" in text
    assert "1 : 1" in text and "2, in turns" in text
    assert "go asynchronous" in text or "stay synchronous" in text


def test_a_wrong_what_if_is_one_clear_message(tmp_path: Path) -> None:
    asked = ["forecast", "--runs", str(tmp_path), "-c", "micro", "--what-if", "rl.pubish.end=3"]
    shown = CliRunner().invoke(app, asked)
    assert shown.exit_code == 2 and "rl.pubish" in shown.output
    assert "Traceback" not in shown.output


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.4, "0 s"), (119, "119 s"), (600, "10 min"), (9000, "2.5 h")]
)
def test_durations(seconds: float, text: str) -> None:
    assert duration_text(seconds) == text


@pytest.mark.parametrize(
    ("usd", "text"),
    [
        (0.0, "$0.00"),
        (12.3, "$12.30"),
        (0.00417, "$0.0042"),
        (3e-5, "< $0.0001"),
        (float("inf"), "$inf"),
    ],
)
def test_money(usd: float, text: str) -> None:
    assert money_text(usd) == text


def test_decode_speed_keeps_the_engines_floor(config: PipelineConfig) -> None:
    assert decode_speed(config, 0.5).step_s == pytest.approx(4.0)
