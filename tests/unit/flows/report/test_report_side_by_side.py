"""The side-by-side section: numbers as people read them, hostile text made harmless."""

from html.parser import HTMLParser

import pytest
from report_run import HOSTILE

from flows.report.side_by_side import rows_of, section, write_page


def example(kind="lost", text=HOSTILE, parting=None):
    said = [{"role": "user", "content": text}, {"role": "assistant", "content": text}]
    return {
        "kind": kind,
        "row_id": "r1",
        "band": text,
        "gold": text,
        "parting": parting,
        "tokens": [{"text": text, "kl": 0.5, "same_top": False}],
        "f16": {"correct": True, "outcome": "correct", "extracted": text, "messages": said},
        "file": {"correct": False, "outcome": "no_answer", "extracted": None, "messages": said},
    }


def figures(**changes):
    facts = {
        "accuracy": 0.5,
        "accuracy_delta": {"value": -0.25, "ci95": [-0.4, -0.1]},
        "kl": {"value": 0.02, "ci95": [0.01, 0.03]},
        "lost": 3,
        "gained": 1,
        "identical": 2,
        "first_divergence_median": 4.0,
        "still_the_same": [{"tokens": 0, "share": 1.0}, {"tokens": 1, "share": 0.25}],
        "kl_by_position": [{"position": 0, "answers": 8, "kl": 0.02, "low": 0.01, "high": 0.03}],
        "examples": [example()],
    }
    return {
        "title": HOSTILE,
        "problems": 8,
        "f16_accuracy": 0.75,
        "attribution": "RL gained accuracy.",
        "files": {"Q4_K_M": facts | changes},
    }


class Page(HTMLParser):
    def __init__(self, text):
        super().__init__(convert_charrefs=True)
        self.tags, self.text, self.attributes = [], [], []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs

    def handle_data(self, data):
        self.text.append(data)


@pytest.fixture
def page(tmp_path):
    path = write_page(figures(), tmp_path / "parity.html")
    return Page(path.read_text(encoding="utf-8"))


def test_a_row_says_what_changed():
    (row,) = rows_of(figures())
    assert row["accuracy"] == "50.0 %" and row["delta"] == "−40.0 … −10.0"
    assert (row["lost"], row["gained"], row["identical"]) == ("3", "1", "25.0 %")
    assert row["median"] == "5"  # four tokens alike, the fifth is the first to differ
    assert row["kl"] == "0.02" and row["kl_interval"] == "0.01 … 0.03"


@pytest.mark.parametrize("value", [None, float("nan"), "many"])
def test_what_is_unknown_is_never_a_number(value):
    (row,) = rows_of(figures(accuracy=value, lost=value, identical=value, kl={"value": value}))
    assert {row["accuracy"], row["lost"], row["identical"], row["kl"]} == {"—"}


def test_answers_that_never_part_say_so():
    (row,) = rows_of(figures(first_divergence_median=None))
    assert row["median"] == "never"


def test_nothing_compared_is_no_section(tmp_path):
    assert section({}) == {} and section({"files": {}}) == {}
    assert "Nothing was compared." in write_page({}, tmp_path / "p.html").read_text()


@pytest.mark.parametrize(
    ("kl", "css"),
    [(0.0, "h0"), (0.00009, "h0"), (0.0001, "h1"), (0.005, "h2"), (0.05, "h3"), (9, "h4")],
)
def test_a_token_is_the_darker_the_farther_apart(kl, css):
    shown = figures()
    shown["files"]["Q4_K_M"]["examples"][0]["tokens"][0]["kl"] = kl
    assert section(shown)["examples"][0]["tokens"][0]["css"] == css


def test_the_token_at_which_they_part_is_framed():
    token = {"text": "7", "kl": 0.0, "same_top": True}
    one = example(parting={"position": 1, "f16": "7", "file": "8"}) | {"tokens": [token] * 3}
    shown = section(figures(examples=[one]))["examples"][0]["tokens"]
    assert [t["css"] for t in shown] == ["h0", "h0 part", "h0"]


@pytest.mark.parametrize(
    ("parting", "said"),
    [
        (None, "Both wrote the same tokens."),
        ({"position": 0, "f16": "7", "file": "8"}, "at token 1: F16 wrote “7”, Q4_K_M wrote “8”."),
        ({"position": 2, "f16": None, "file": "8"}, "F16 had ended, Q4_K_M wrote “8”."),
    ],
)
def test_where_answers_part_is_said_in_words(parting, said):
    shown = section(figures(examples=[example(parting=parting)]))
    assert said in shown["examples"][0]["parting"]


def test_hostile_text_stays_text(page):
    assert not {"script", "img", "iframe", "a"} & set(page.tags)
    assert not [name for name, _ in page.attributes if name.startswith("on")]
    words = "".join(page.text)
    assert '<script>alert("x")</script>' in words and "{{ 7*7 }}" in words
    for char in ("\x1b", "\x00", "‮", "​", "\ud800"):
        assert char not in words
        assert all(char not in (value or "") for _, value in page.attributes)
    assert "⟦U+202E⟧" in words


def test_the_page_needs_no_network_and_no_script(page):
    assert not [v for n, v in page.attributes if n in ("src", "href") and v]
    assert any("default-src 'none'" in (v or "") for _, v in page.attributes)
    assert "Point at a token for its KL" in "".join(page.text)


def test_files_stand_largest_first_and_repaired_ones_beside_their_type():
    facts = figures()["files"]["Q4_K_M"]
    shown = figures() | {"files": dict.fromkeys(("IQ2_M+3", "Q8_0", "X", "IQ2_M", "Q4_K_M"), facts)}
    assert [r["name"] for r in rows_of(shown)] == ["Q8_0", "Q4_K_M", "IQ2_M", "IQ2_M+3", "X"]
