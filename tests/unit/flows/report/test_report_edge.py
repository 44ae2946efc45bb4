import json

import pytest

from flows.report.data import RunFiles
from flows.report.edge import edge_section
from flows.report.page import render

MIB = 1 << 20
ENTRY = {
    "size": 10 * MIB,
    "memory": {
        "total_bytes": 700 * MIB,
        "kv_cache_bytes": 2 * MIB,
        "compute_bytes": 3 * MIB,
        "output_bytes": 1 * MIB,
    },
    "predicted": {
        "device": "orin-nano-8gb",
        "file_bytes": 11 * MIB,
        "tokens_per_s": {
            "7W": {"bound": 50.0, "expected": [10.4, 20.0]},
            "15W": {"bound": 50.0, "expected": [10.4, 20.0]},
            "25W": {"bound": 80.0, "expected": [15.0, 31.6]},
        },
    },
    "reported": {"kv_cache_bytes": 2 * MIB, "compute_bytes": 2 * MIB, "output_bytes": 1 * MIB},
}
MEASURED = {
    "resident_bytes": 20 * MIB,
    "decode_tokens_per_s": 123.4,
    "prompt_tokens_per_s": 2000.0,
    "where": "CPU <of> somewhere",
}


def _run(root, entry=ENTRY, measured=MEASURED):
    run, package = root / "runs/r", root / "runs/store/package/k"
    for folder in (run, package / "bundle"):
        folder.mkdir(parents=True)
    record = {"kind": "bundle", "uri": "runs/store/package/k", "sha256": "0" * 64, "meta": {}}
    (run / "records.json").write_text(json.dumps({"package": record}))
    manifest = {"models": {"Q8_0": entry}, "serving": {"context_length": 512}}
    (package / "bundle/manifest.json").write_text(json.dumps(manifest))
    (package / "measured.json").write_text(json.dumps({"Q8_0": measured}))
    return RunFiles(run)


def test_figures_by_hand(tmp_path):
    found = edge_section(_run(tmp_path))
    assert found["device"] == "orin-nano-8gb"
    assert found["context"] == "512"
    (row,) = found["rows"]
    assert row == {
        "type": "Q8_0",
        "file": "10.0 MiB",
        "predicted_file": "11.0 MiB (+10.0 %)",
        "memory": "700.0 MiB",
        "buffers": "5.0 MiB",
        "predicted_buffers": "6.0 MiB (+20.0 %)",
        "speed": "10–20 (7W, 15W); 15–32 (25W)",
        "resident": "20.0 MiB",
        "decode": "123",
        "prompt": "2,000",
    }


def test_page_says_where_it_was_measured(tmp_path):
    page = render(_run(tmp_path))
    assert "measured here, one thread, CPU &lt;of&gt; somewhere" in page
    assert "10–20 (7W, 15W)" in page


def test_repaired_file_has_no_predicted_size(tmp_path):
    entry = {**ENTRY, "predicted": {**ENTRY["predicted"], "file_bytes": None}}
    (row,) = edge_section(_run(tmp_path, entry))["rows"]
    assert row["predicted_file"] == "—"


@pytest.mark.parametrize("value", [None, [], "x", 7, float("nan"), {"a": 1}])
def test_values_of_the_wrong_kind_become_unknown(tmp_path, value):
    entry = dict.fromkeys(ENTRY, value)
    found = edge_section(_run(tmp_path, entry, value))
    (row,) = found["rows"]
    assert row["memory"] == row["speed"] == row["decode"] == "—"


def test_run_without_a_bundle(tmp_path):
    (tmp_path / "r").mkdir()
    assert edge_section(RunFiles(tmp_path / "r"))["rows"] == []
    assert "No bundle was made." in render(RunFiles(tmp_path / "r"))
