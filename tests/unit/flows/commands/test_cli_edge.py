import json

import pytest
from typer.testing import CliRunner

from flows.cli import app

runner = CliRunner()


def _plan(*arguments):
    return runner.invoke(app, ["edge", "plan", *arguments])


def test_plan_of_a_model_that_fits():
    done = _plan("qwen3-1.7b", "--context", "2048")
    assert done.exit_code == 0
    assert "memory of Q4_K_M" in done.output
    assert "102 GB/s" in done.output
    assert "what would help" not in done.output


def test_plan_of_a_model_that_does_not_fit_says_what_would_help():
    done = _plan("qwen3-8b", "--slots", "2")
    assert done.exit_code == 1
    assert "headless mode" in done.output and "type IQ2_M" in done.output


def test_json_is_json_and_has_the_same_verdict():
    done = _plan("qwen3-8b", "--json")
    body = json.loads(done.output)
    assert (done.exit_code, body["fits"]) == (1, False)
    assert body["chosen"]["memory"]["total_bytes"] > body["available_bytes"]
    assert {c["type"] for c in body["choices"]} >= {"F16", "Q8_0", "Q4_K_M", "IQ2_M"}


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        (["no-such-model"], "no known model"),
        (["qwen3-4b", "--device", "nano"], "orin-nano-8gb"),
        (["qwen3-4b", "--type", "Q9"], "choose one of"),
        (["qwen3-4b", "--kv-type", "Q8_0"], "flash attention"),
        (["qwen3-4b", "--context", "0"], "context=0"),
        (["runs/no/such/bundle.tar.gz"], "is no folder"),
    ],
)
def test_bad_input_is_one_message(arguments, match):
    done = _plan(*arguments)
    assert done.exit_code == 2
    assert match in done.output
    assert "Traceback" not in done.output
