"""Data prep end to end: what is written, quarantined, refused, and the same twice."""

import json
from pathlib import Path

import pytest

from configs.schema.data import CalculatorSource, DataConfig, DataGate, FileSource
from tasks.artifacts import hash_file, write_jsonl
from tasks.artifacts.progress import Reporter
from tasks.data.errors import (
    DataGateError,
    NoTrainingRowsError,
    TruncatedFileError,
    UnknownBandError,
)
from tasks.data.jsonl import read_jsonl
from tasks.data.stage import FILES, read_rows, run

GSM8K = Path(__file__).resolve().parents[5] / "shared" / "data" / "gsm8k"
LOOSE = DataGate(min_train_rows=1, min_heldout_rows=1, max_quarantined_share=1.0)


def plain(count, start=0):
    return [
        {"id": f"r{i}", "prompt": f"What is {i} plus {i}?", "answer": str(2 * i)}
        for i in range(start, start + count)
    ]


def stage(tmp_path, train, heldout=None, gate=LOOSE, **more):
    files = {"train": str(write_jsonl(tmp_path / "in" / "train.jsonl", train))}
    if heldout is not None:
        files["heldout"] = str(write_jsonl(tmp_path / "in" / "heldout.jsonl", heldout))
    config = DataConfig(source=FileSource(**files, **more), gate=gate)
    out = tmp_path / "out"
    return run(config, {}, out, Reporter(out)), out


def quarantine(out):
    return [record.values for record in read_jsonl(out / "quarantine.jsonl").records]


def test_calculator_writes_everything_and_twice_the_same(tmp_path):
    source = CalculatorSource(train_rows=120, heldout_rows=60, demonstrations=200)
    config = DataConfig(source=source)
    records = []
    for name in ("a", "b"):
        out = tmp_path / name
        records.append(run(config, {}, out, Reporter(out)))
    assert records[0].sha256 == records[1].sha256
    out = tmp_path / "a"
    written = {p.name for p in out.iterdir()}
    assert {*FILES, "quarantine.jsonl", "gate.json", "summary.json", "data_docs"} <= written
    meta = records[0].meta
    assert meta == json.loads((out / "summary.json").read_text())
    assert (meta["train_rows"], meta["heldout_rows"], meta["demonstrations"]) == (120, 60, 200)
    assert meta["train_bands"] == {"easy": 40, "medium": 40, "hard": 40}
    assert list(meta["heldout_bands"]) == ["easy", "medium", "hard"]
    assert meta["heldout_sha256"] == hash_file(out / "heldout.jsonl")
    assert json.loads((out / "gate.json").read_text())["passed"] is True
    assert quarantine(out) == []


def test_another_seed_gives_another_dataset(tmp_path):
    hashes = set()
    for seed in (0, 1):
        out = tmp_path / str(seed)
        source = CalculatorSource(train_rows=64, heldout_rows=32, demonstrations=10)
        hashes.add(run(DataConfig(source=source, seed=seed), {}, out, Reporter(out)).sha256)
    assert len(hashes) == 2


def test_a_leak_leaves_the_training_side_and_the_heldout_file_stays(tmp_path):
    heldout = plain(3)
    leak = {"id": "leak", "prompt": "what  IS ０ plus\u00a00?", "answer": "0"}
    _, clean_out = stage(tmp_path / "a", plain(5, start=10), heldout)
    record, out = stage(tmp_path / "b", [*plain(5, start=10), leak], heldout)
    assert hash_file(out / "heldout.jsonl") == hash_file(clean_out / "heldout.jsonl")
    assert "leak" not in {row.id for row in read_rows(out / "train.jsonl")}
    assert [(q["row_id"], q["line"], q["split"]) for q in quarantine(out)] == [("leak", 6, "train")]
    assert quarantine(out)[0]["reason"] == "leak: the prompt of held-out row 'r0'"
    assert record.meta["quarantined"] == {"leak": 1}
    assert "leak" not in {d.values["row_id"] for d in read_jsonl(out / FILES[2]).records}


def test_nothing_left_after_leak_removal_is_a_clear_error_and_on_disk(tmp_path):
    with pytest.raises(NoTrainingRowsError, match="after leak removal: leak 3"):
        stage(tmp_path, plain(3), plain(3))
    out = tmp_path / "out"
    assert [q["row_id"] for q in quarantine(out)] == ["r0", "r1", "r2"]
    assert json.loads((out / "gate.json").read_text())["passed"] is False
    assert (out / "data_docs" / "index.html").exists()


def test_every_fault_of_a_row_is_quarantined_with_its_own_reason(tmp_path):
    faults = [
        {"id": "long", "prompt": "x" * 5000, "answer": "1"},
        {"id": "gold", "prompt": "How high?", "answer": "very"},
        {"id": "none", "prompt": None, "answer": "1"},
        {"id": "blank", "prompt": " \u200b", "answer": "1"},
        {"id": "word", "prompt": "nan", "answer": "1"},
        {"id": "unanswered", "prompt": "And?", "answer": ""},
        {"id": "r1", "prompt": "Something else?", "answer": "1"},
        {"id": "again", "prompt": "WHAT is 2 plus 2?", "answer": "4"},
        {"id": "other", "prompt": "What is 3 plus 3?", "answer": "7"},
        {"id": "list", "prompt": ["p"], "answer": "1"},
    ]
    record, out = stage(tmp_path, [*plain(5), *faults], plain(3, start=50))
    reasons = {q["row_id"]: q["reason"] for q in quarantine(out)}
    assert reasons == {
        "long": "prompt_too_long: 5000 characters, data.gate.max_prompt_chars=4096",
        "gold": "unparseable_answer: not one number: 'very'",
        "none": "prompt_missing: missing (null)",
        "blank": "prompt_no_text: empty or blank",
        "word": "prompt_no_text: the word of a missing value that was turned to text",
        "unanswered": "answer_no_text: empty or blank",
        "r1": "duplicate_id: of row 'r1' on line 2, which answers '2'",
        "again": "duplicate_prompt: of row 'r2' on line 3",
        "other": "duplicate_prompt: of row 'r3' on line 4, which answers '6'",
        "list": "prompt_no_text: no text; expected a string",
    }
    assert [row.id for row in read_rows(out / "train.jsonl")] == ["r0", "r1", "r2", "r3", "r4"]
    assert quarantine(out)[0]["row"]["prompt"] == "x" * 5000
    # 8 of 18 rows are at fault; the two repeated prompts are what cleaning is for
    assert record.meta["quarantined_share"] == pytest.approx(8 / 18)


def test_a13_gold_that_does_not_parse_never_reaches_training(tmp_path):
    sentence = {"id": "anya", "prompt": "Who?", "answer": "Anya must climb one floor"}
    record, out = stage(tmp_path, [*plain(4), sentence], plain(3, start=50))
    assert [q["row_id"] for q in quarantine(out)] == ["anya"]
    assert record.meta["quarantined"] == {"unparseable_answer": 1}


def test_a_faulty_row_does_not_shadow_a_sound_one(tmp_path):
    rows = [{"id": "a", "prompt": "p?", "answer": "?"}, {"id": "b", "prompt": "p?", "answer": "1"}]
    _, out = stage(tmp_path, rows, plain(3))
    assert [row.id for row in read_rows(out / "train.jsonl")] == ["b"]


def test_too_many_faults_stop_the_run_and_leave_the_evidence(tmp_path):
    bad = [{"id": f"b{i}", "prompt": f"bad {i}", "answer": "x"} for i in range(10)]
    gate = DataGate(min_train_rows=1, min_heldout_rows=1)
    with pytest.raises(DataGateError, match=r"max_quarantined_share=5\.0%"):
        stage(tmp_path, [*plain(20), *bad], plain(5, start=50), gate=gate)
    assert len(quarantine(tmp_path / "out")) == 10
    assert "failed" in (tmp_path / "out" / "data_docs" / "index.html").read_text()


def test_a23_too_few_rows_fail_the_gate(tmp_path):
    gate = DataGate(min_train_rows=6, min_heldout_rows=1)
    with pytest.raises(DataGateError, match="row_count: observed 5"):
        stage(tmp_path, plain(5), plain(3, start=50), gate=gate)


def test_a10_a_cut_off_file_stops_data_prep(tmp_path):
    path = tmp_path / "cut.jsonl"
    path.write_text('{"prompt": "p", "answer": "1"}\n{"prompt": "q", "ans')
    config = DataConfig(source=FileSource(train=str(path)), gate=LOOSE)
    with pytest.raises(TruncatedFileError, match="line 2"):
        run(config, {}, tmp_path / "out", Reporter(tmp_path / "out"))


def test_a09_answers_stay_strings_to_the_last_file(tmp_path):
    tricky = ["033", "007", "18_19", "1e5", "NaN", "null", "True", "2024-01-02", "1" * 20]
    rows = [{"id": f"000{i}", "prompt": f"p{i}", "answer": a} for i, a in enumerate(tricky)]
    _, out = stage(tmp_path, rows, plain(3), answer_kind="code")
    written = read_rows(out / "train.jsonl")
    assert [(row.id, row.answer) for row in written] == [(r["id"], r["answer"]) for r in rows]


def test_without_a_heldout_file_a_share_is_kept_whatever_the_order(tmp_path):
    record, out = stage(tmp_path / "a", plain(40), heldout_share=0.25)
    assert (record.meta["train_rows"], record.meta["heldout_rows"]) == (30, 10)
    _, reverse = stage(tmp_path / "b", plain(40)[::-1], heldout_share=0.25)
    held = {row.id for row in read_rows(out / "heldout.jsonl")}
    assert held == {row.id for row in read_rows(reverse / "heldout.jsonl")}
    assert not held & {row.id for row in read_rows(out / "train.jsonl")}


def test_caps_are_kept(tmp_path):
    record, _ = stage(
        tmp_path, plain(20), plain(20, start=50), max_train_rows=7, max_heldout_rows=4
    )
    assert (record.meta["train_rows"], record.meta["heldout_rows"]) == (7, 4)


def test_an_unknown_band_is_refused(tmp_path):
    source = CalculatorSource(train_rows=64, heldout_rows=32, demonstrations=10)
    config = DataConfig(source=source, rl_bands=("eazy",))
    with pytest.raises(UnknownBandError, match="choose from easy, medium, hard"):
        run(config, {}, tmp_path, Reporter(tmp_path))


def test_solutions_and_conversations_become_demonstrations(tmp_path):
    rows = [
        {"id": "s", "prompt": "2+2?", "answer": "4", "solution": "2 and 2 make 4."},
        {"id": "n", "prompt": "3+3?", "answer": "6"},
    ]
    _, out = stage(tmp_path, rows, plain(3))
    said = [d.values["messages"][-1]["content"] for d in read_jsonl(out / FILES[2]).records]
    assert said == ["2 and 2 make 4.", "6"]


@pytest.mark.skipif(not GSM8K.is_dir(), reason="GSM8K is not at ../shared/data/gsm8k")
def test_real_gsm8k_is_read_gated_and_banded(tmp_path):
    source = FileSource(train=str(GSM8K / "train.jsonl"), heldout=str(GSM8K / "test.jsonl"))
    record = run(DataConfig(source=source), {}, tmp_path, Reporter(tmp_path))
    meta = record.meta
    assert (meta["shape"], meta["train_rows"], meta["heldout_rows"]) == ("gsm8k", 7473, 1319)
    assert sum(meta["train_bands"].values()) == 7473
    assert list(meta["heldout_bands"]) == ["easy", "medium", "hard"]
    first = read_jsonl(tmp_path / "demonstrations.jsonl").records[0].values
    assert first["messages"][1]["content"].endswith("\n#### 72")
    assert "<<" not in (tmp_path / "demonstrations.jsonl").read_text()
    assert read_rows(tmp_path / "train.jsonl")[0].answer == "72"
