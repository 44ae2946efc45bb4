"""The reward gate and Data Docs in the report."""

import json
from pathlib import Path

from flows.report.data import RunFiles
from flows.report.gates import docs_link, reward_gate
from flows.report.page import write_report

FLAT = "variance: observed 0.0, expected {'min_value': 0.01}; mean: observed 0, expected {}"


def files(tmp_path: Path, *lines: dict, docs: bool = True) -> RunFiles:
    records = {}
    for stage in ("data", "rl"):
        folder = tmp_path / "runs" / "store" / stage / "k"
        folder.mkdir(parents=True, exist_ok=True)
        records[stage] = {"uri": folder.as_posix(), "meta": {}}
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (tmp_path / "runs" / "store" / "rl" / "k" / "reward_gate.jsonl").write_text(text)
    if docs:
        page = tmp_path / "runs" / "store" / "data" / "k" / "data_docs" / "index.html"
        page.parent.mkdir(exist_ok=True)
        page.write_text("<html>")
    home = tmp_path / "runs" / "r1"
    home.mkdir(exist_ok=True)
    for name, body in (("records", records), ("summary", {"run_id": "r1"}), ("config", {})):
        (home / f"{name}.json").write_text(json.dumps(body))
    return RunFiles(home)


def cycle(step: int, *failed: str, why: str = "") -> dict:
    return {"step": step, "passed": not failed, "failed": list(failed), "why": why}


def test_the_link_leads_from_the_run_to_the_page_and_is_left_out_where_there_is_none(
    tmp_path: Path,
) -> None:
    run = files(tmp_path)
    assert docs_link(run) == "../store/data/k/data_docs/index.html"
    assert (run.run_dir / docs_link(run)).resolve().is_file()
    assert docs_link(files(tmp_path / "other", docs=False)) == ""


def test_checks_are_counted_over_the_cycles(tmp_path: Path) -> None:
    lines = [cycle(1), cycle(2, "variance", "mean", why=FLAT), cycle(3, "variance", why=FLAT)]
    found = reward_gate(files(tmp_path, *lines))
    assert (found["words"], found["verdict"]) == ("3 cycles, 2 failed", "failed")
    assert found["checks"] == [
        {"name": "variance", "count": "2", "steps": "2 … 3",
         "said": "observed 0.0, expected {'min_value': 0.01}"},
        {"name": "mean", "count": "1", "steps": "2", "said": "observed 0, expected {}"},
    ]  # fmt: skip


def test_no_cycles_and_all_passed(tmp_path: Path) -> None:
    assert reward_gate(files(tmp_path / "none")) == {}
    assert reward_gate(files(tmp_path / "good", cycle(1)))["verdict"] == "passed"


def test_the_page_shows_both(tmp_path: Path) -> None:
    run = files(tmp_path, cycle(1, "<b>", why="<b>: <script>"))
    html = write_report(run.run_dir).read_text()
    assert 'href="../store/data/k/data_docs/index.html"' in html
    assert "1 cycles, 1 failed" in html and "<script>" not in html and "<b>" not in html
