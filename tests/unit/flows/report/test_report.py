"""The report on a whole synthetic run, on broken runs and on hostile model output."""

import json
import random
import re
import shutil
from html.parser import HTMLParser
from pathlib import Path

import pytest
from report_run import HOSTILE, STAGES, make_run, sha

from flows.report.page import SECTIONS, RunFolderError, write_report
from tasks.artifacts import write_json

VOID = {"meta", "link", "img", "br", "hr", "input", "base", "source", "wbr"}
NOT_RUN = "not run"


class Page(HTMLParser):
    """Elements, their attributes, text, and whether every tag is closed in order."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text: list[str] = []
        self.open: list[str] = []
        self.unbalanced: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        if not self.open or self.open.pop() != tag:
            self.unbalanced.append(tag)

    def handle_data(self, data):
        self.text.append(data)

    def ids(self):
        return [a["id"] for _, a in self.elements if "id" in a]

    @property
    def words(self):
        return " ".join(" ".join(self.text).split())


def read(path: Path) -> tuple[str, Page]:
    text = path.read_text(encoding="utf-8")
    return text, Page(text)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The page of a complete run."""
    return read(write_report(make_run(tmp_path_factory.mktemp("whole"))))


def test_every_section_is_there_and_linked(whole):
    _, page = whole
    sections = [a.get("id") for tag, a in page.elements if tag == "section"]
    assert sections == [key for key, _ in SECTIONS]
    links = [a["href"] for tag, a in page.elements if tag == "a"]
    assert set(links) >= {f"#{key}" for key, _ in SECTIONS}
    assert all(link.startswith("#") for link in links)


def test_markup_is_balanced_and_ids_are_unique(whole):
    _, page = whole
    assert page.unbalanced == []
    assert page.open == []
    assert len(page.ids()) == len(set(page.ids()))


def test_one_file_without_network_or_script(whole):
    text, page = whole
    tags = {tag for tag, _ in page.elements}
    assert not tags & {"script", "link", "iframe", "object", "embed", "img", "base", "form"}
    for _, attributes in page.elements:
        assert not any(name.startswith("on") for name in attributes)
        assert not set(attributes) & {"src", "srcset", "action", "data", "xlink:href"}
    assert not re.search(r"@import|url\((?!#)", text)
    policy = next(a for _, a in page.elements if a.get("http-equiv"))
    assert policy["content"].startswith("default-src 'none'")


def test_nothing_refers_to_a_url(whole):
    text, page = whole
    for _, attributes in page.elements:
        for name, value in attributes.items():
            assert "://" not in (value or ""), (name, value)
    # the only address in the text is the tracking store the run itself recorded
    assert re.findall(r"\w+://\S*?(?=<)", text) == ["sqlite:///runs/mlflow.db"]


def test_hostile_output_is_text(whole):
    text, page = whole
    assert '<script>alert("x")</script>' in page.words  # readable as what it is
    assert "<script" not in text.lower()
    assert "onerror=alert(1)>" in page.words
    assert "{{ 7*7 }}" in page.words  # no template inside a template
    for hidden in ("\x1b", "\x00", "\u202e", "\u202c", "\u200b"):
        assert hidden not in text
    for mark in ("⟦U+001B⟧", "⟦U+0000⟧", "⟦U+202E⟧", "⟦U+200B⟧", "⟦U+D800⟧"):
        assert mark in page.words


def test_hostile_run_names_and_reasons_are_text(tmp_path):
    run = make_run(tmp_path)
    summary = json.loads((run / "summary.json").read_text())
    hostile = HOSTILE.encode("utf-8", "replace").decode()
    summary["profile"] = summary["run_id"] = summary["git_sha"] = hostile
    summary["quant"]["IQ2_M"]["why"] = hostile
    summary["quant"][hostile] = summary["quant"]["Q8_0"]
    summary["stages"][hostile] = {"status": hostile, "output_sha256": hostile, "wall_s": 3.0}
    summary["bundle"]["path"] = hostile
    write_json(run / "summary.json", summary)
    text, page = read(write_report(run))
    assert page.unbalanced == [] and page.open == []
    assert "<script" not in text.lower()
    assert not any(name.startswith("on") for _, a in page.elements for name in a)


def test_very_long_message_is_clipped_and_says_so(whole):
    text, page = whole
    assert "48,000 characters left out" in page.words  # 50,000 written, 2,000 shown
    assert len(text) < 400_000


def test_headline_figures(whole):
    _, page = whole
    assert "24.0 % → 88.0 %" in page.words
    assert "+64.0 points , 95 % interval +61.2 … +66.7, paired over 512 problems" in page.words
    assert "IQ2_M rejected" in page.words
    assert "$0.0071" in page.words


def test_tables_say_what_their_cells_are(whole):
    _, page = whole
    tables = sum(tag == "table" for tag, _ in page.elements)
    assert tables == sum(tag == "caption" for tag, _ in page.elements) >= 8
    assert all(a.get("scope") in ("row", "col") for tag, a in page.elements if tag == "th")


def test_charts_have_a_name_and_words(whole):
    _, page = whole
    charts = [a for tag, a in page.elements if tag == "svg"]
    assert len(charts) == 24
    ids = set(page.ids())
    for chart in charts:
        assert chart["role"] == "img"
        assert set(chart["aria-labelledby"].split()) <= ids


def test_transcripts_are_the_same_problem_on_both_sides(whole):
    _, page = whole
    assert page.words.count("Before RL") >= 10
    for kind in ("RL fixed it", "RL broke it", "wrong both times", "right both times"):
        assert kind in page.words


def test_lineage_shows_every_hash_both_ways(whole):
    _, page = whole
    for stage in STAGES:
        assert sha(stage) in page.words
    assert f"Policy {sha('rl')[:12]}" in page.words  # as an input and as an output
    assert sha("heldout") in page.words


def test_unnamed_metrics_are_shown_and_missing_ones_named(whole):
    _, page = whole
    assert "some_other_metric" in page.words
    assert "Not recorded in this run: Throughput" in page.words


def test_books_are_balanced_in_words(whole):
    _, page = whole
    assert "Wall-clock × slots is 5 min 40 s; the measured states miss it by 0.15 %" in page.words
    assert "rollout 2 min 00 s (35.3 %)" in page.words  # 120 of 339.5 s


def test_tensor_types_and_quarantine_are_counted(whole):
    _, page = whole
    assert "IQ2_S × 11, IQ3_S × 3, Q5_K × 1" in page.words
    assert "duplicate 2 q1 · line 8 · duplicate: same as q7" in page.words


def test_empty_run_says_not_run_and_shows_no_zero(tmp_path):
    run = tmp_path / "runs" / "nothing"
    run.mkdir(parents=True)
    _, page = read(write_report(run))
    assert [a.get("id") for t, a in page.elements if t == "section"] == [k for k, _ in SECTIONS]
    assert page.words.count(NOT_RUN) >= 8
    assert "0.0 %" not in page.words
    assert "$0" not in page.words


@pytest.mark.parametrize("stage", STAGES)
def test_a_stage_that_did_not_run_takes_nothing_else_away(tmp_path, stage):
    run = make_run(tmp_path)
    records = json.loads((run / "records.json").read_text())
    del records[stage]
    write_json(run / "records.json", records)
    _, page = read(write_report(run))
    assert NOT_RUN in page.words
    assert page.unbalanced == []
    assert sha({"data": "rl"}.get(stage, "data")) in page.words


def test_a_folder_that_is_gone_is_said(tmp_path):
    run = make_run(tmp_path)
    shutil.rmtree(tmp_path / "runs" / "store" / "rl")
    _, page = read(write_report(run))
    assert "rl: runs/store/rl/" in page.words
    assert "is in the records but not on disk" in page.words
    assert "The RL stage left no metrics." in page.words


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[1, 2]", b"null", b"\xff\xfe", b'{"heldout": [], "quant": 3}']
)
def test_broken_files_are_said_and_never_raise(tmp_path, content):
    run = make_run(tmp_path)
    (run / "summary.json").write_bytes(content)
    for name in ("summary.json", "ledger.json", "gate.json", "parity.json"):
        for path in (tmp_path / "runs" / "store").rglob(name):
            path.write_bytes(content)
    _, page = read(write_report(run))
    assert page.unbalanced == []
    if content != b'{"heldout": [], "quant": 3}':
        assert "Could not be read:" in page.words


def test_lines_that_do_not_parse_are_counted(tmp_path):
    run = make_run(tmp_path)
    for path in (tmp_path / "runs" / "store" / "evaluation").rglob("policy.jsonl"):
        path.write_bytes(path.read_bytes()[:-40] + b"\n[3]\n")
    _, page = read(write_report(run))
    assert "2 lines of policy.jsonl could not be read" in page.words


def test_values_of_the_wrong_kind_become_unknown(tmp_path):
    run = make_run(tmp_path)
    summary = json.loads((run / "summary.json").read_text())
    summary["wall_s"] = "long"
    summary["cost"] = {"usd": True}
    summary["rl"] = {"steps": None, "samples": "many"}
    summary["quant"]["Q8_0"] = {"ships": "yes", "kld_mean": None, "accuracy_delta_ci95": [1]}
    summary["bundle"]["signed"] = "true"
    write_json(run / "summary.json", summary)
    _, page = read(write_report(run))
    assert "signature unknown" in page.words
    assert "Q8_0 unknown" in page.words
    assert "No cost was recorded" in page.words


def places(value, path=()):
    """Every path into a JSON value."""
    yield path
    items = value.items() if isinstance(value, dict) else ()
    if isinstance(value, list):
        items = enumerate(value)
    for key, inner in items:
        yield from places(inner, (*path, key))


def replaced(value, path, new):
    """A copy of a JSON value with `new` at `path`."""
    if not path:
        return new
    copy = json.loads(json.dumps(value))
    at = copy
    for key in path[:-1]:
        at = at[key]
    at[path[-1]] = new
    return copy


def test_any_value_of_any_file_may_be_of_any_kind(tmp_path):
    run = make_run(tmp_path, steps=3)
    files = [*run.glob("*.json"), *(tmp_path / "runs" / "store").rglob("*.json")]
    rng = random.Random(0)
    odd = [None, 3, -1.5, "text", "", [], {}, [1], [[]], {"a": 1}, True, 1e400, "\u202e<b>"]
    tried = 0
    for path in files:
        whole = json.loads(path.read_text())
        spots = [p for p in places(whole) if p]
        for spot in rng.sample(spots, min(12, len(spots))):
            path.write_text(json.dumps(replaced(whole, spot, rng.choice(odd))))
            _, page = read(write_report(run))
            assert page.unbalanced == [] and page.open == [], (path, spot)
            tried += 1
        path.write_text(json.dumps(whole))
    assert tried >= 60


def test_the_same_run_gives_the_same_page(tmp_path):
    run = make_run(tmp_path)
    first = write_report(run).read_bytes()
    assert write_report(run).read_bytes() == first


def test_no_folder_is_a_clear_error(tmp_path):
    with pytest.raises(RunFolderError, match="runs/latest"):
        write_report(tmp_path / "absent")
