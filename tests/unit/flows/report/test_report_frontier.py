"""The chart of size against fidelity: placed by hand, hostile names, missing figures."""

import json
import xml.etree.ElementTree as ET

import pytest
from report_run import make_run

from flows.report.data import RunFiles
from flows.report.frontier import Dot, best, chart, frontier_section
from flows.report.page import render
from tasks.artifacts import write_json


def dots(*places):
    return [Dot(f"f{i}", float(x), y, None) for i, (x, y) in enumerate(places)]


def test_the_line_joins_those_no_smaller_one_beats():
    made = dots((100, 1.0), (200, 0.1), (250, 0.2), (300, 0.1), (400, 0.01))
    assert [d.name for d in best(made)] == ["f0", "f1", "f4"]
    assert best([]) == []


def test_places_on_the_drawing():
    """100 to 500 bytes over 580 units from 70; 1 to 0.01 over 250 units from 16."""
    root = ET.fromstring(str(chart(dots((100, 1.0), (300, 0.1), (500, 0.01)))))
    circles = [
        (float(c.get("cx")), float(c.get("cy"))) for c in root.iter() if c.tag.endswith("circle")
    ]
    assert circles == [(70.0, 16.0), (360.0, 141.0), (650.0, 266.0)]


@pytest.mark.parametrize("few", [[], dots((100, 0.5))])
def test_fewer_than_two_files_are_no_chart(few):
    assert chart(few) == ""


def test_equal_kl_still_draws():
    assert "<circle" in chart(dots((100, 0.5), (200, 0.5)))


def test_a_gate_that_fails_shows_and_a_hostile_name_is_text():
    hostile = '<script>alert(1)</script>"\u202e'
    markup = str(chart([Dot(hostile, 1e5, 0.1, False), Dot("Q8_0", 2e5, 0.01, True)]))
    assert "<script>" not in markup and "&lt;script&gt;" in markup and "\u202e" not in markup
    assert 'class="dot s1"' in markup and 'class="dot s0"' in markup


def test_what_is_unknown_or_nought_is_no_dot(tmp_path):
    facts = {
        "F16": {"size_bytes": 9, "kld_mean": 1e-9},
        "Q8_0": {"size_bytes": 5, "kld_mean": 0.0},
        "Q4_K_M": {"size_bytes": 4, "kld_mean": None},
        "IQ2_M": {"size_bytes": None, "kld_mean": 0.1},
        "Q5_K_M": {"size_bytes": 3, "kld_mean": float("nan")},
    }
    write_json(
        tmp_path / "summary.json", {"quant": {n: f for n, f in facts.items() if n != "Q5_K_M"}}
    )
    assert frontier_section(RunFiles(tmp_path)) == {"svg": "", "picked": "", "why": ""}


def explored(run_dir, body):
    (run_dir / "quantise").mkdir()
    (run_dir / "quantise/frontier.json").write_text(body)


def test_what_quantise_left_is_drawn_too_and_its_pick_named(tmp_path):
    run_dir = make_run(tmp_path)
    before = str(frontier_section(RunFiles(run_dir))["svg"]).count("<circle")
    mix = {"name": "IQ2_M+2", "size_bytes": 600_000, "kld_mean": 0.03, "ships": True}
    picked = {"name": "IQ2_M+2", "why": "it lies nearest to F16"}
    explored(run_dir, json.dumps({"points": [mix], "picked": picked}))
    section = frontier_section(RunFiles(run_dir))
    assert str(section["svg"]).count("<circle") == before + 1
    page = render(RunFiles(run_dir))
    assert "picked <strong>IQ2_M+2</strong>: it lies nearest to F16." in page
    assert 'aria-labelledby="frontier-t frontier-d"' in page


def test_mixes_that_were_only_tried_are_told_on_pointing_alone(tmp_path):
    run_dir = make_run(tmp_path)
    tried = [
        {"name": name, "size_bytes": size, "kld_mean": 0.03, "ships": True}
        for name, size in (("IQ2_M+2", 600_000), ("IQ2_M+3", 610_000), ("Q5_K_M", 950_000))
    ]
    picked = {"name": "IQ2_M+2", "why": "w"}
    explored(run_dir, json.dumps({"points": tried, "picked": picked}))
    root = ET.fromstring(str(frontier_section(RunFiles(run_dir))["svg"]))
    written = [e.text for e in root.iter() if e.tag.endswith("text")]
    assert "IQ2_M+2" in written and "Q5_K_M" in written and "IQ2_M+3" not in written
    assert any("IQ2_M+3: " in (e.text or "") for e in root.iter() if e.tag.endswith("title"))


@pytest.mark.parametrize("body", ["{", "[1]", '{"points": 3, "picked": "x"}', "null"])
def test_a_broken_file_is_said_and_the_page_stands(body, tmp_path):
    run_dir = make_run(tmp_path)
    explored(run_dir, body)
    page = render(RunFiles(run_dir))
    assert "Quantisation and parity" in page
    assert ("frontier.json could not be read" in page) is (body == "{")
