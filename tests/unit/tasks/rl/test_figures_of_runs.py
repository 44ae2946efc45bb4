"""Figures read off a run: what a modelled run was made from comes out again."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from configs.load import load_config
from configs.schema import PipelineConfig
from tasks.models.shapes import shape_of
from tasks.rl.figures import (
    Teaching,
    assumed_figures,
    clip_of,
    clipped_share,
    decode_speed,
    layout_of,
    run_model,
    work_of,
)
from tasks.rl.figures_of_runs import NoFiguresError, figures_of_run
from tasks.rl.simulated_engines import LengthMix
from tasks.rl.simulated_work import Modelled, Times

TOKENS, TURNS = 24.0, 1.5


def config(**overrides: object) -> PipelineConfig:
    keys = {"rl.batch_size": 32, "rl.steps": 10, "rl.checkpoint_every": 2}
    return load_config("calculator", {**keys, **overrides})


def leave(folder: Path, chosen: PipelineConfig, times: Times) -> Modelled:
    """What a stage of ten steps leaves, had it taken exactly these times.

    A worker's second is booked once: a proof, with its wait for the batch in the making, before
    grading, grading before sampling.
    """
    work = replace(work_of(chosen, 10), turns_mean=TURNS, tokens=LengthMix(TOKENS / TURNS, 0.5, 64))
    ran = run_model(work, times, layout_of(chosen), seed=3)
    made = 10 * 32 + ran.dropped
    graded_s, proven_s = made * times.grade_s, ran.sync_s - 10 * times.publish_s
    ledger = {
        "samples": {"trained": 320, "dropped": ran.dropped, "filtered": 0},
        "seconds": {
            "learner": {"train": 10 * times.train_s, "sync": 10 * times.publish_s,
                        "checkpoint": 5 * times.checkpoint_s, "startup": 4.0},
            "rollout-0": {"rollout": ran.workers_busy_s - graded_s - proven_s, "grade": graded_s,
                          "sync": proven_s, "startup": 4.0},
        },
    }  # fmt: skip
    values = {
        "generated_tokens_mean": TOKENS, "turns_mean": TURNS, "staleness_mean": 2.0,
        "effective_share": 0.4 * 0.9 * 0.8, "kept_token_share": 0.9, "ess_share": 0.8,
    }  # fmt: skip
    (folder / "ledger.json").write_text(json.dumps(ledger))
    (folder / "summary.json").write_text(json.dumps({"steps": 10, "sync_proofs": 10}))
    line = json.dumps({"step": 1, "time_s": 0.0, "values": values})
    (folder / "metrics.jsonl").write_text(line + "\n")
    return ran


def test_what_went_in_comes_out(tmp_path: Path) -> None:
    chosen = config()
    speed = decode_speed(chosen, 0.0004)
    times = Times(speed, train_s=0.6, grade_s=0.001, publish_s=0.06, prove_s=0.06, checkpoint_s=0.2)
    leave(tmp_path, chosen, times)
    found = figures_of_run(tmp_path, chosen)
    assert found.times.train_s == pytest.approx(0.6)
    assert found.times.grade_s == pytest.approx(0.001)
    assert found.times.publish_s == pytest.approx(0.06)
    assert found.times.prove_s == pytest.approx(0.06)
    assert found.times.checkpoint_s == pytest.approx(0.2)
    assert found.times.decode.per_sequence_s == pytest.approx(0.0004, rel=0.15)
    assert found.startup_s == pytest.approx(4.0)
    assert found.work.turns_mean == TURNS and found.work.tokens.mean == pytest.approx(16.0)
    assert found.teaching.advantage_share == pytest.approx(0.4)


def test_in_turns_a_proof_waits_for_nobody_and_is_what_was_booked(tmp_path: Path) -> None:
    chosen = config(**{"rl.staleness_limit": 0, "rl.publish": {"start": 1, "end": 1}})
    times = Times(decode_speed(chosen, 0.0004), train_s=0.6, publish_s=0.06, prove_s=0.09)
    leave(tmp_path, chosen, times)
    found = figures_of_run(tmp_path, chosen)
    # nothing is sampled after the last publish, so the model proves one fewer than the run has
    assert found.times.prove_s == pytest.approx(0.09 * 9 / 10)
    assert found.times.decode.per_sequence_s == pytest.approx(0.0004, rel=0.1)


def test_on_one_device_half_of_the_syncing_is_proving(tmp_path: Path) -> None:
    """Of 10 s of work and 2 s of syncing a step, no second is anybody else's as well."""
    chosen = config(**{"rl.runtime.type": "inline"})
    leave(tmp_path, chosen, Times(decode_speed(chosen, 0.0004), train_s=0.6))
    ledger = json.loads((tmp_path / "ledger.json").read_text())
    seconds = {"train": 6.0, "rollout": 3.0, "grade": 1.0, "sync": 2.0, "startup": 4.0}
    (tmp_path / "ledger.json").write_text(json.dumps(ledger | {"seconds": {"device": seconds}}))
    found = figures_of_run(tmp_path, chosen)
    assert (found.times.publish_s, found.times.prove_s) == pytest.approx((0.1, 0.1))
    assert found.layout.shared
    again = run_model(replace(found.work, steps=10), found.times, found.layout)
    assert again.both_s == 0.0
    assert again.wall_s == pytest.approx(12.0, rel=0.05)


def test_several_updates_share_the_seconds_of_their_batch(tmp_path: Path) -> None:
    """Ten steps of 0.6 s, two a batch: a batch takes 1.2 s."""
    chosen = config(**{"rl.updates_per_batch": 2, "rl.loss.type": "decoupled_ppo"})
    leave(tmp_path, config(), Times(decode_speed(chosen, 0.0004), train_s=0.6))
    assert figures_of_run(tmp_path, chosen).times.train_s == pytest.approx(1.2)


def test_slow_tools_hide_decoding_and_leave_an_upper_bound(tmp_path: Path) -> None:
    """Most of the time is waiting for tools: the bound may be loose, but the run is met by it."""
    latency = {"median_s": 0.3, "sigma": 1.0, "max_s": 10.0}
    chosen = config(**{"rl.tools.simulated_latency": latency})
    true = Times(decode_speed(chosen, 0.0004), train_s=0.6)
    leave(tmp_path, chosen, true)
    found = figures_of_run(tmp_path, chosen)
    assert found.work.tool_latency is not None
    assert found.times.decode.per_sequence_s < 0.004

    def mean_wall_s(times: Times) -> float:  # one run differs from the next by a fifth
        runs = [run_model(found.work, times, found.layout, seed).wall_s for seed in range(12)]
        return sum(runs) / len(runs)

    assert mean_wall_s(found.times) == pytest.approx(mean_wall_s(true), rel=0.15)


def test_drift_reproduces_what_was_measured_at_the_measured_age(tmp_path: Path) -> None:
    chosen = config()
    leave(tmp_path, chosen, Times(decode_speed(chosen, 0.0004), train_s=0.6))
    teaching = figures_of_run(tmp_path, chosen).teaching
    bounds = clip_of(chosen.rl)
    assert teaching.effective_share(2.0, *bounds) == pytest.approx(0.4 * 0.9 * 0.8, rel=1e-3)
    assert teaching.effective_share(0.0, *bounds) == pytest.approx(0.4)
    assert teaching.effective_share(4.0, *bounds) < teaching.effective_share(2.0, *bounds)
    assert teaching.effective_share(2.0, 0.05, 0.05) < teaching.effective_share(2.0, *bounds)


def test_clipped_share_from_a_table_of_the_normal_distribution() -> None:
    """Bounds one deviation away: 15.87 % lie beyond each, and each silences one sign."""
    sigma = math.log(1.28)
    low = 1 - math.exp(-sigma)
    assert clipped_share(sigma, low, 0.28) == pytest.approx(0.158655, abs=1e-5)
    assert clipped_share(sigma, 1 - 1e-12, 0.28) == pytest.approx(0.158655 / 2, abs=1e-5)
    assert clipped_share(sigma, 1 - 1e-12, math.inf) == pytest.approx(0.0, abs=1e-9)
    assert clipped_share(0.0, 0.2, 0.28) == 0.0
    assert Teaching(0.5).effective_share(9.0, 0.2, 0.28) == 0.5


@pytest.mark.parametrize("broken", ["ledger.json", "summary.json", "metrics.jsonl"])
def test_a_run_that_left_too_little_is_named(tmp_path: Path, broken: str) -> None:
    chosen = config()
    leave(tmp_path, chosen, Times(decode_speed(chosen, 0.0004), train_s=0.6))
    (tmp_path / broken).unlink()
    with pytest.raises(NoFiguresError, match=str(tmp_path)):
        figures_of_run(tmp_path, chosen)


def test_a_run_without_a_step_is_named(tmp_path: Path) -> None:
    chosen = config()
    leave(tmp_path, chosen, Times(decode_speed(chosen, 0.0004), train_s=0.6))
    (tmp_path / "summary.json").write_text('{"steps": 0}')
    with pytest.raises(NoFiguresError, match="0 steps"):
        figures_of_run(tmp_path, chosen)
    (tmp_path / "summary.json").write_text("[]")
    with pytest.raises(NoFiguresError, match="holds a list"):
        figures_of_run(tmp_path, chosen)


@pytest.mark.parametrize("odd", ["null", "-1", "1e999", "true", '"text"', "[]", "{}"])
@pytest.mark.parametrize(
    ("name", "whole"),
    [("samples", '{"trained": %s}'), ("seconds", "%s"), ("seconds", '{"learner": %s}')],
)
def test_odd_values_are_no_figures(tmp_path: Path, odd: str, name: str, whole: str) -> None:
    chosen = config()
    leave(tmp_path, chosen, Times(decode_speed(chosen, 0.0004), train_s=0.6))
    body = json.loads((tmp_path / "ledger.json").read_text())
    body[name] = json.loads(whole % odd)
    (tmp_path / "ledger.json").write_text(json.dumps(body))
    with pytest.raises(NoFiguresError):
        figures_of_run(tmp_path, chosen)


@pytest.mark.parametrize("profile", ["calculator", "gsm8k_qwen2.5_7b", "micro"])
def test_assumptions_are_named(profile: str) -> None:
    chosen = load_config(profile)
    assumed = assumed_figures(chosen, shape_of(chosen.model))
    assert "assumed" in assumed.source and len(assumed.assumptions) == 4
    assert assumed.layout == layout_of(chosen)


def test_training_flops_by_hand() -> None:
    """6 P a token with adapters: 7.6 G weights, 512 samples of 368 tokens, 35 % of 312 TFLOP/s."""
    chosen = load_config("gsm8k_qwen2.5_7b", ["hardware=2gpu", "rl.batch_size=512"])
    assumed = assumed_figures(chosen, shape_of(chosen.model))
    expected = 6 * 7_615_616_512 * (0.6 * 400 + 128) * 512 / (0.35 * 312e12)
    assert assumed.times.train_s == pytest.approx(expected)
    assert assumed.times.decode.step_s == pytest.approx(7_615_616_512 * 2 / 2.0e12)
