"""What is drawn while a run goes and at its end."""

import io
from pathlib import Path

import pytest
from rich.console import Console

from flows.commands.live import RunView, live_values, spark
from flows.commands.summary_view import interval, number, percent, show_summary, size
from tasks.events import Event


def plain_console() -> tuple[Console, io.StringIO]:
    out = io.StringIO()
    return Console(file=out, width=160, force_terminal=False), out


def events() -> list[Event]:
    rl = {"reward_mean": 0.25, "staleness_mean": 1.5, "staleness_max": 2.0, "effective_share": 0.6}
    return [
        Event("run_started", message="run x"),
        Event("stage_reused", "data", "reused: nothing changed"),
        Event("stage_finished", "data", "runs/store/data/k"),
        Event("stage_started", "rl", "first run"),
        Event("progress", "rl", "step 3", done=3, total=10),
        Event("metrics", "rl", step=3, values=rl),
        Event("metrics", "rl", step=4, values={**rl, "reward_mean": 0.75, "staleness_mean": None}),
        Event("warning", "rl", "batch looked [odd]"),
        Event("stage_finished", "rl", "runs/store/rl/k"),
        Event("stage_failed", "evaluation", "out of memory"),
        Event("progress", "unknown", "ignored", done=1, total=2),
    ]


def test_without_a_terminal_lines_are_printed() -> None:
    console, out = plain_console()
    with RunView(console) as view:
        for event in events():
            view(event)
    shown = out.getvalue()
    assert "data prep reused: nothing changed" in shown
    assert "async RL 3/10 step 3" in shown
    assert "data prep finished" not in shown  # it was reused
    assert "batch looked [odd]" in shown
    assert "held-out evaluation failed: out of memory" in shown


def test_the_picture_holds_lag_share_and_reward() -> None:
    out = io.StringIO()
    view = RunView(Console(file=out, width=160, force_terminal=True, color_system=None))
    for event in events():
        view(event)
    view.console.print(view.picture())
    shown = out.getvalue()
    assert "reward 0.75" in shown
    assert "lag max 2" in shown and "effective 0.6" in shown
    assert "lag 1.5" not in shown  # the newest is unknown, and unknown is never the old value
    assert "reward ▁█" in shown
    assert "! batch looked [odd]" in shown


def test_live_values_leave_out_what_is_unknown() -> None:
    assert live_values({"reward_mean": None, "accuracy": 0.0}) == {"accuracy": 0.0}
    assert live_values({}) == {}


@pytest.mark.parametrize(
    ("values", "line"),
    [([], ""), ([1.0], "▁"), ([2.0, 2.0], "▁▁"), ([0.0, 0.5, 1.0], "▁▄█"), ([-1.0, 1.0], "▁█")],
)
def test_spark(values: list[float], line: str) -> None:
    assert spark(values) == line


def test_spark_keeps_the_newest() -> None:
    assert spark([9.0] + [0.0] * 40) == "▁" * 40


@pytest.mark.parametrize(
    ("shown", "expected"),
    [
        (percent(0.8125), "81.2 %"), (percent(None), "–"), (percent(0.5, signed=True), "+50.0 %"),
        (percent(-0.02, signed=True), "-2.0 %"), (percent(True), "–"),
        (interval([0.41, 0.59]), "[+41.0, +59.0]"), (interval(None), "–"),
        (interval([0.1]), "–"), (interval([None, 0.1]), "–"),
        (size(2_500_000), "2.50 MB"), (size(None), "–"), (number(3.14159), "3.14"),
        (number(None), "–"), (number(True), "–"),
    ],
)  # fmt: skip
def test_figures(shown: str, expected: str) -> None:
    assert shown == expected


def full_summary() -> dict:
    stage = {"status": "completed", "cached": False, "wall_s": 12.5, "output_sha256": "ab" * 32}
    return {
        "wall_s": 321.0,
        "peak_tree_bytes": 3_000_000_000,
        "machine": {"gflops_f32": 150.0, "cores": 2},
        "stages": {"data": {**stage, "cached": True}, "sft": stage, "rl": stage},
        "heldout": {
            "sft": {"accuracy": 0.2, "n": 512, "by_band": [
                {"band": "easy", "accuracy": 0.3, "n": 170}]},
            "rl": {"accuracy": 0.8, "n": 512, "by_band": [
                {"band": "easy", "accuracy": 0.95, "n": 170}]},
            "delta": {"value": 0.6, "ci95": [0.56, 0.64]},
        },
        "rl": {"steps": 80, "samples": 10240, "effective_samples": 4000.5, "staleness_limit": 2,
               "max_staleness_seen": 2, "resumes": 0},
        "quant": {
            "F16": {"size_bytes": 2_400_000, "bits_per_weight": 16.0, "accuracy": 0.82},
            "IQ2_M": {"size_bytes": 600_000, "bits_per_weight": 2.93, "kld_mean": 0.2,
                      "top1": 0.9, "ppl_ratio": 1.05, "accuracy": 0.5,
                      "accuracy_delta_ci95": [-0.35, -0.29], "ships": False,
                      "why": "rejected: accuracy"},
        },
        "bundle": {"path": "runs/store/package/k/bundle", "sha256": "cd" * 32, "signed": True},
        "mlflow": {"tracking_uri": "sqlite:///runs/mlflow.db", "run_id": "r1"},
        "cost": {"usd": 0.01, "usd_per_device_hour": 0.05, "usd_per_effective_sample": 2.5e-6},
    }  # fmt: skip


def test_the_summary_says_everything_and_what_to_type_next(tmp_path: Path) -> None:
    console, out = plain_console()
    (tmp_path / "report.html").write_text("x")
    show_summary(full_summary(), tmp_path, console)
    shown = " ".join(out.getvalue().split())
    for part in (
        "data reused", "20.0 % 80.0 %", "easy 170 30.0 % 95.0 %",
        "RL minus SFT: +60.0 %, 95 % interval [+56.0, +64.0]: better",
        "IQ2_M 0.60 MB 2.93 0.2 90.0 % 1.05 50.0 % [-35.0, -29.0] rejected: accuracy",
        "staleness up to 2 of 2", "0.0100 USD for RL at 0.05 USD a device hour",
        "2.5e-06 USD an effective", "report.html", "signed", "run r1",
        "rl-pipeline serve runs/store/package/k/bundle", "mlflow ui --backend-store-uri",
    ):  # fmt: skip
        assert part in shown, f"{part!r} not in {shown}"


def test_the_summary_of_a_run_that_stopped_early(tmp_path: Path) -> None:
    console, out = plain_console()
    summary = {
        "wall_s": 3.0,
        "stages": {"data": {"status": "completed", "cached": False, "wall_s": 1.0,
                            "output_sha256": None},
                   "rl": {"status": "failed", "cached": False, "wall_s": 2.0}},
        "heldout": {"sft": {"accuracy": None}, "rl": {"accuracy": None}, "delta": {}},
        "quant": {},
        "bundle": {"path": None},
    }  # fmt: skip
    show_summary(summary, tmp_path, console)
    shown = out.getvalue()
    assert "failed" in shown
    assert "goes on where this run stopped" in shown
    assert "held-out accuracy" not in shown and "quantisation" not in shown
    show_summary({}, tmp_path, console)


@pytest.mark.parametrize(
    ("ci95", "word"), [([0.1, 0.2], "better"), ([-0.2, -0.1], "worse"), ([-0.1, 0.1], "undecided")]
)
def test_the_verdict_follows_the_interval(tmp_path: Path, ci95: list[float], word: str) -> None:
    summary = full_summary()
    summary["heldout"]["delta"] = {"value": sum(ci95) / 2, "ci95": ci95}
    console, out = plain_console()
    show_summary(summary, tmp_path, console)
    assert f": {word}" in out.getvalue()
