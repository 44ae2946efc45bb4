"""Data Docs open offline and show untrusted text as text."""

import re

from tasks.gates.data_docs import write_data_docs
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
    return write_data_docs(tmp_path, "Data gate", facts, [verdict, not_evaluated("x", "why so")])


def test_nothing_is_fetched_from_the_network(tmp_path):
    html = page(tmp_path).read_text()
    assert not re.search(r"https?://|//cdn|<link|<script|@import|url\(", html)


def test_untrusted_text_is_escaped(tmp_path):
    html = page(tmp_path).read_text()
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in html
    assert HOSTILE not in html


def test_every_check_and_the_reason_are_shown(tmp_path):
    html = page(tmp_path).read_text()
    for text in ("duplicate_id", "expect_column_values_to_be_unique", "row_count", "why so"):
        assert text in html
