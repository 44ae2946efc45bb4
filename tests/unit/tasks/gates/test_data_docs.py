"""Data Docs open offline and show untrusted text as text."""

import re
import subprocess

import pytest

from tasks.gates.data_docs import MAX_TEXT, shown, write_data_docs
from tasks.gates.dataset import DatasetLimits, dataset_frame, dataset_suite
from tasks.gates.validation import validate_frame
from tasks.gates.verdict import not_evaluated

HOSTILE = "<script>alert(1)</script>"


def page(tmp_path):
    rows = [
        {"row": f"n{i}", "id": "same", "prompt": HOSTILE, "answer": "1", "answer_kind": "number"}
        for i in range(2)
    ]
    verdict = validate_frame(dataset_frame(rows), dataset_suite("train", DatasetLimits(1, 100)))
    facts = {"train_rows": 2, "note": HOSTILE}
    held = [
        {
            "row_id": None,
            "line": 3,
            "reason": f"leak: {HOSTILE}",
            "row": {"a": HOSTILE},
            "source": "f",
        }
    ]
    verdicts = [verdict, not_evaluated("x", "why so")]
    return write_data_docs(tmp_path, "Data gate", facts, verdicts, reasons=[HOSTILE], held=held)


def test_nothing_is_fetched_from_the_network(tmp_path):
    html = page(tmp_path).read_text()
    assert not re.search(r"https?://|//cdn|<link|<script|@import|url\(", html)


def test_untrusted_text_is_escaped(tmp_path):
    html = page(tmp_path).read_text()
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in html
    assert HOSTILE not in html


def test_every_check_and_the_reason_are_shown(tmp_path):
    html = page(tmp_path).read_text()
    for text in ("duplicate_id", "expect column values to be unique", "row_count", "why so"):
        assert text in html


def test_the_page_says_first_whether_the_gate_passed_and_which_rows_are_out(tmp_path):
    failed = page(tmp_path).read_text()
    assert "failed</span></h1>" in failed and "f:3" in failed and "1 of 1" in failed
    passed = write_data_docs(tmp_path, "Data gate", {"released": {}}, []).read_text()
    assert "passed</span></h1>" in passed and "Rows set aside" not in passed


def test_values_are_shown_as_a_person_reads_them():
    assert shown({"a": 1, "b": 0.123456}) == "a: 1, b: 0.1235"
    assert [shown(v) for v in (None, True, False, [])] == ["", "yes", "no", ""]
    assert shown("x\u202ey\x1b[0m\ud800") == "x\\u202ey\\u001b[0m\\ud800"
    assert len(shown("é" * 999)) == MAX_TEXT


@pytest.mark.needs("chromium")
def test_a_browser_without_a_network_shows_it_and_runs_nothing(tmp_path):
    path = page(tmp_path)
    command = ["chromium", "--headless", "--no-sandbox", "--disable-gpu", "--dump-dom",
               f"--user-data-dir={tmp_path / 'profile'}", "--host-resolver-rules=MAP * ~NOTFOUND",
               path.as_uri()]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert "why so" in done.stdout and "duplicate_id" in done.stdout
    assert "<script" not in done.stdout
