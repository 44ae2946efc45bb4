"""The report's table of importance matrices."""

import pytest

from flows.report.data import RunFiles
from flows.report.matrices import matrices_section
from tasks.artifacts import write_json


def run_with(tmp_path, parity):
    write_json(tmp_path / "store" / "parity.json", parity)
    records = {"quantize": {"uri": str(tmp_path / "store"), "sha256": "0" * 64}}
    write_json(tmp_path / "run" / "records.json", records)
    return RunFiles(tmp_path / "run")


def row(low, high, matrix="none"):
    return {
        "type": "Q4_K_M",
        "matrix": matrix,
        "kl": {"value": 0.001, "ci95": [0.0005, 0.002]},
        "own_minus_this": {"value": (low + high) / 2, "ci95": [low, high]},
    }


@pytest.mark.parametrize(
    ("low", "high", "verdict", "tone"),
    [
        (-2e-5, -1e-6, "own is nearer", "good"),
        (1e-6, 2e-5, "own is farther", "bad"),
        (-1e-6, 1e-6, "no difference shown", "warn"),
        (-1e-6, 0.0, "no difference shown", "warn"),
    ],
)
def test_a_difference_counts_only_beyond_chance(low, high, verdict, tone, tmp_path):
    comparison = {"text": "Python", "rows": [row(low, high)]}
    files = run_with(tmp_path, {"imatrix": {"rollouts": 8, "comparison": comparison}})
    (shown,) = matrices_section(files)["rows"]
    assert (shown["verdict"], shown["tone"]) == (verdict, tone)
    assert shown["kl"] == "0.001" and shown["kl_ci"] == "0.0005 … 0.002"


def test_the_own_matrix_is_compared_with_nothing(tmp_path):
    own = {"type": "IQ2_M", "matrix": "own rollouts", "kl": {"value": 0.1, "ci95": [0.0, 0.2]}}
    files = run_with(tmp_path, {"imatrix": {"rollouts": 8, "comparison": {"rows": [own]}}})
    (shown,) = matrices_section(files)["rows"]
    assert shown["verdict"] == shown["difference"] == ""


def test_without_a_comparison_the_matrix_is_still_described(tmp_path):
    quant = {"IQ2_M": {"without_imatrix": ["token_embd.weight"]}, "F16": {}}
    imatrix = {"rollouts": 256, "weights": "assistant", "comparison": None}
    shown = matrices_section(run_with(tmp_path, {"imatrix": imatrix, "quant": quant}))
    assert shown["rows"] == [] and shown["rollouts"] == "256"
    assert shown["left_out"] == "token_embd.weight"
    assert "positions from which the policy samples" in shown["weights"]


def test_no_matrix_is_no_section(tmp_path):
    assert matrices_section(run_with(tmp_path, {})) == {}
    assert matrices_section(RunFiles(tmp_path / "nowhere")) == {}


@pytest.mark.parametrize("ends", [None, [1.0], ["a", "b"], [None, 1.0]])
def test_an_interval_that_cannot_be_read_gives_no_verdict(ends, tmp_path):
    broken = row(-2e-5, -1e-6) | {"own_minus_this": {"value": -1e-5, "ci95": ends}}
    files = run_with(tmp_path, {"imatrix": {"rollouts": 8, "comparison": {"rows": [broken]}}})
    assert matrices_section(files)["rows"][0]["verdict"] == ""
