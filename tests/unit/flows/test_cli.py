"""The command line: what people see, and the exit codes scripts see."""

import json
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner, Result

from flows.cli import app
from flows.commands.bundle_view import NoBundleError, find_bundle, pinned_keys
from flows.commands.console import exit_code, is_ours, reports_errors
from tasks.supervise import StageFailedError

ROOT = Path(__file__).resolve().parents[3]
DEFAULTS = str(Path(__file__).with_name("defaults.yaml"))
COMMANDS = ("run", "plan", "check", "doctor", "report", "serve", "verify", "config", "upload")


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(app, [str(a) for a in arguments])


def text(result: Result) -> str:
    """All output on one line, styles and frames taken out."""
    plain = re.sub(r"\x1b\[[0-9;]*m|[│╭╮╰╯─]", "", result.output)
    return " ".join(plain.split())


def console_script(*arguments: str, **options: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "flows.cli", *arguments]
    return subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, check=False, **options  # type: ignore[call-overload]
    )  # fmt: skip


def test_help_lists_every_command_and_a_first_step() -> None:
    shown = text(invoke("--help"))
    for command in COMMANDS:
        assert f" {command} " in shown
    assert "First try: rl-pipeline run" in shown


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_teaches_with_an_example(command: str) -> None:
    result = invoke(command, "--help")
    assert result.exit_code == 0
    assert f"Example: rl-pipeline {command}" in text(result)


def test_help_is_quick() -> None:
    started_s = time.monotonic()
    assert console_script("--help").returncode == 0
    assert time.monotonic() - started_s < 10  # well under a second on an idle machine


@pytest.mark.parametrize("command", ["run", "plan", "check"])
def test_an_unknown_key_names_key_value_and_the_nearest(command: str) -> None:
    result = invoke(command, "-c", DEFAULTS, "rl.step=20")
    assert result.exit_code == 2
    shown = text(result)
    assert "rl.step = 20" in shown
    assert "command line: rl.step=20" in shown
    assert "did you mean rl.steps?" in shown
    assert "Traceback" not in shown


def test_a_wrong_value_names_what_is_allowed() -> None:
    result = invoke("plan", "-c", DEFAULTS, "rl.buffer.order=lifo")
    assert result.exit_code == 2
    assert 'rl.buffer.order = "lifo"' in text(result)
    assert "one of freshest, fifo" in text(result)


def test_brackets_in_a_value_are_shown_as_typed() -> None:
    result = invoke("plan", "-c", DEFAULTS, "rl.steps=[bold]")
    assert result.exit_code == 2
    assert '["bold"]' in text(result)


def test_a_missing_profile_lists_profiles() -> None:
    result = invoke("plan", "-c", "calculater")
    assert result.exit_code == 2
    assert "no such file or profile" in text(result)


@pytest.mark.parametrize("option", ["--force", "--stop-after"])
def test_an_unknown_stage_lists_stages(option: str) -> None:
    result = invoke("run", "-c", DEFAULTS, option, "train")
    assert result.exit_code == 2
    assert f"{option} train" in text(result)
    assert "data, sft, rl, evaluation, quantize, package" in text(result)


def test_a_profile_this_machine_cannot_run_is_refused_before_the_start(tmp_path: Path) -> None:
    result = invoke("run", "-c", DEFAULTS, "requires.gpus=64", "--runs", tmp_path)
    assert result.exit_code == 2
    assert "asks for 64" in text(result)
    assert "--anyway" in text(result)
    assert list(tmp_path.iterdir()) == []


def test_options_typed_wrong_exit_with_two() -> None:
    assert invoke("run", "--no-such-option").exit_code == 2
    assert invoke("serve").exit_code == 2
    assert invoke("nothing").exit_code == 2
    assert invoke("serve", "x", "--port", "0").exit_code == 2


def test_config_explains_a_block_and_suggests() -> None:
    shown = text(invoke("config", "rl.credit"))
    assert "one of grpo, dr_grpo, rloo, return_to_go, turn_gae" in shown
    assert "rl.credit.gamma" in shown and "0.99" in shown
    result = invoke("config", "rl.step")
    assert result.exit_code == 2 and "did you mean rl.steps?" in text(result)


def test_config_shows_the_values_of_a_profile() -> None:
    shown = text(invoke("config", "rl.steps", "-c", "gsm8k_qwen2.5_0.5b"))
    assert "rl.steps 200" in shown


def test_check_prints_the_table_and_fails_on_a_failing_row(tmp_path: Path) -> None:
    good = invoke("check", "-c", DEFAULTS, "--runs", tmp_path)
    assert good.exit_code == 0, good.output
    for name in ("LoRA", "KL and clipping", "reward edge cases", "quantisation format"):
        assert name in text(good)
    bad = invoke("check", "-c", DEFAULTS, "evaluation.sampling.max_turns=1", "--runs", tmp_path)
    assert bad.exit_code == 1
    assert "evaluation.sampling.max_turns=2" in text(bad)


def test_doctor_refuses_and_clears_profiles(tmp_path: Path) -> None:
    refused = invoke("doctor", "-c", DEFAULTS, "requires.gpus=64", "--runs", tmp_path)
    assert refused.exit_code == 1
    assert "defaults is refused here" in text(refused)
    cleared = invoke("doctor", "-c", DEFAULTS, "requires.memory_gib=0", "requires.disk_gib=0",
                     "--runs", tmp_path)  # fmt: skip
    assert "defaults can run here" in text(cleared)
    assert "gsm8k_qwen2.5_0.5b" in text(invoke("doctor", "--runs", tmp_path))


def test_plan_names_every_stage_and_starts_nothing(tmp_path: Path) -> None:
    result = invoke("plan", "-c", DEFAULTS, "--runs", tmp_path / "runs")
    assert result.exit_code == 0, result.output
    for stage in ("data", "sft", "rl", "evaluation", "quantize", "package"):
        assert re.search(rf"\b{stage} RUN\b", text(result))
    assert "6 of 6 stages to run" in text(result)
    assert not (tmp_path / "runs").exists()


def test_report_and_upload_of_nothing(tmp_path: Path) -> None:
    missing = invoke("report", tmp_path / "none")
    assert missing.exit_code == 2
    assert "is no folder" in text(missing)
    assert "nothing was pending" in text(invoke("upload", tmp_path))


def test_serve_without_a_bundle_says_what_to_give(tmp_path: Path) -> None:
    result = invoke("serve", tmp_path)
    assert result.exit_code == 2
    assert "runs/latest" in text(result)


def test_a_run_without_a_bundle_says_so(tmp_path: Path) -> None:
    (tmp_path / "summary.json").write_text(json.dumps({"bundle": {"path": None}}))
    with pytest.raises(NoBundleError, match="made no bundle"):
        find_bundle(tmp_path)


def test_a_bundle_is_found_from_every_side(tmp_path: Path) -> None:
    bundle = tmp_path / "runs" / "store" / "package" / "k" / "bundle"
    bundle.mkdir(parents=True)
    (bundle / "manifest.json").write_text("{}")
    run = tmp_path / "runs" / "1"
    run.mkdir()
    (run / "summary.json").write_text(
        json.dumps({"bundle": {"path": "runs/store/package/k/bundle"}})
    )
    assert find_bundle(bundle) == bundle
    assert find_bundle(bundle.parent) == bundle
    assert find_bundle(run).resolve() == bundle.resolve()


def test_trust_never_comes_from_the_bundle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RL_PIPELINE_SIGNING_KEY", str(tmp_path / "keys" / "signing_key"))
    with pytest.raises(NoBundleError, match="--allowed-signers"):
        pinned_keys(None)
    pin = tmp_path / "keys" / "allowed_signers"
    pin.parent.mkdir()
    pin.write_text("x")
    assert pinned_keys(None) == pin


def test_debug_shows_the_traceback_wherever_it_stands() -> None:
    plain = console_script("plan", "-c", DEFAULTS, "rl.step=1")
    assert plain.returncode == 2 and "Traceback" not in plain.stderr
    debug = console_script("plan", "-c", DEFAULTS, "rl.step=1", "--debug")
    assert debug.returncode != 0 and "Traceback" in debug.stderr


def test_ctrl_c_exits_with_130_and_says_what_is_kept(capsys: pytest.CaptureFixture[str]) -> None:
    @reports_errors
    def command() -> None:
        raise KeyboardInterrupt

    with pytest.raises(typer.Exit) as caught:
        command()
    assert caught.value.exit_code == 130
    assert "finished stages are kept" in " ".join(capsys.readouterr().err.split())


def test_a_failed_stage_shows_reason_and_log_once(capsys: pytest.CaptureFixture[str]) -> None:
    @reports_errors
    def command() -> None:
        raise StageFailedError("rl", "Killed", "out of memory", "see log.txt", "log.txt", "tail")

    with pytest.raises(typer.Exit) as caught:
        command()
    assert caught.value.exit_code == 1
    shown = capsys.readouterr().err
    assert "stage rl failed (Killed): out of memory" in shown
    assert shown.count("log.txt") == 1 and "Traceback" not in shown


def test_errors_that_are_not_ours_keep_their_traceback() -> None:
    @reports_errors
    def command() -> None:
        raise ValueError("a fault in the code")

    with pytest.raises(ValueError, match="a fault in the code"):
        command()


def test_errors_are_told_apart() -> None:
    failed = StageFailedError("rl", "Killed", "gone", "again", "log.txt")
    assert is_ours(failed) and exit_code(failed) == 1
    assert not is_ours(ValueError("x"))
    assert exit_code(NoBundleError("x")) == 2
