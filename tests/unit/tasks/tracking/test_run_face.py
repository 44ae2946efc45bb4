"""The description and figures of a run in MLflow's pages."""

import math

from tasks.tracking.run_face import description, figures

SUMMARY = {
    "status": "FINISHED",
    "profile": "calculator",
    "wall_s": 12.5,
    "peak_tree_bytes": None,
    "heldout": {
        "sft": {"accuracy": 0.25},
        "rl": {"accuracy": 0.75, "by_band": [{"band": "easy", "accuracy": 0.9}]},
        "delta": {"value": 0.5, "ci95": [0.4, 0.6]},
    },
    "quant": {
        "Q8_0": {
            "accuracy": 0.74,
            "kld_mean": 0.001,
            "ships": True,
            "size_bytes": 2e6,
            "why": "ships: a|b",
        }
    },
    "stages": {"data": {"status": "completed", "cached": True, "output_sha256": "ab" * 32}},
    "cost": {"usd": None, "usd_per_effective_sample": math.nan},
    "promotion": {"reason": "beats the champion"},
}


def test_figures_are_grouped_and_unknown_ones_left_out():
    found = figures(SUMMARY)
    assert found["heldout/accuracy_policy"] == 0.75 and found["heldout/delta_ci95_low"] == 0.4
    assert found["heldout/accuracy_policy_easy"] == 0.9
    assert found["parity/Q8_0/ships"] == 1.0 and found["run/wall_s"] == 12.5
    assert not {"cost/usd", "cost/usd_per_effective_sample", "run/peak_tree_bytes"} & set(found)


def test_the_description_says_what_came_out_and_where_to_look():
    text = description(SUMMARY)
    assert "25.0% → 75.0%" in text and "[+40.0, +60.0] points" in text
    assert "beats the champion" in text and "reused" in text and "`abababababab`" in text
    assert "ships: a/b" in text, "a bar would end the table's cell"
    assert "report.html" in text and "2.00 MB" in text


def test_an_empty_run_has_a_description_and_no_figures():
    assert figures({}) == {} and "No quantisation was made" in description({})
    assert "None%" not in description({"heldout": {"sft": {"accuracy": 0.2}, "rl": {}}})
