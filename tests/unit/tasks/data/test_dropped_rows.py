"""A night's dataset: dropped rows only train, the first night's held-out set stays."""

import json

import pytest

from configs.schema.data import (
    CalculatorSource,
    DataConfig,
    DataGate,
    FileSource,
    Mapping,
    ReasoningGymSource,
)
from tasks.artifacts import hash_file, write_jsonl
from tasks.artifacts.progress import Reporter
from tasks.data.drop_folder import take_in
from tasks.data.jsonl import read_jsonl
from tasks.data.new_rows import new_rows
from tasks.data.stage import run
from tasks.environments.row import read_demonstrations, read_rows

LOOSE = DataGate(min_train_rows=1, min_heldout_rows=1, max_quarantined_share=1.0)


def plain(count, start=0):
    return [
        {"id": f"r{i}", "prompt": f"What is {i} plus {i}?", "answer": str(2 * i)}
        for i in range(start, start + count)
    ]


class Nights:
    """Nights one after another, each on what the last one took in and made."""

    def __init__(self, folder, config):
        self.folder, self.config = folder, config
        self.head, self.heldout, self.count = None, None, 0
        (folder / "drop").mkdir()

    def drop(self, name, rows):
        write_jsonl(self.folder / "drop" / name, rows)

    def night(self, config=None):
        self.count += 1
        out = self.folder / f"night{self.count}"
        intake = take_in(
            self.folder / "drop", self.folder / "store", head=self.head, heldout=self.heldout
        )
        inputs = {"intake": intake.record} if intake.record is not None else {}
        record = run(config or self.config, inputs, out, Reporter(out))
        self.head, self.heldout = intake.record, out / "heldout.jsonl"
        return record, out


@pytest.fixture
def files(tmp_path):
    """Nights over a file of 20 rows that holds 5 of them out."""
    train = write_jsonl(tmp_path / "train.jsonl", plain(20))
    return Nights(
        tmp_path,
        DataConfig(source=FileSource(train=str(train), heldout_share=0.25), gate=LOOSE),
    )


def prompts(out, name="train.jsonl"):
    return [row.prompt for row in read_rows(out / name)]


def reasons(out):
    found = read_jsonl(out / "quarantine.jsonl").records
    return {r.values["row_id"]: r.values["reason"] for r in found}


def test_new_rows_join_the_training_side_and_the_heldout_bytes_stay(files):
    first, out1 = files.night()
    files.drop("monday.jsonl", plain(4, start=100))
    second, out2 = files.night()
    assert hash_file(out1 / "heldout.jsonl") == hash_file(out2 / "heldout.jsonl")
    assert prompts(out2)[:15] == prompts(out1)
    assert prompts(out2)[15:] == [row["prompt"] for row in plain(4, start=100)]
    assert second.meta["dropped_rows"] == 4 and second.meta["heldout_frozen"] is True
    assert first.meta["dropped_rows"] == 0 and first.meta["heldout_frozen"] is False
    assert {row.source for row in read_rows(out2 / "train.jsonl")} == {
        "train.jsonl",
        "drop:monday.jsonl",
    }
    assert new_rows(second, first) == {"all": 4}
    assert not new_rows(first, second)


def test_a_dropped_row_that_is_held_out_is_quarantined_as_a_leak(files):
    _, out1 = files.night()
    held = read_rows(out1 / "heldout.jsonl")[0]
    twin = {"id": "twin", "prompt": held.prompt.upper() + " ", "answer": held.answer}
    files.drop("leaks.jsonl", [twin, *plain(1, start=100)])
    record, out2 = files.night()
    assert reasons(out2) == {"twin": f"leak: the prompt of held-out row {held.id!r}"}
    assert record.meta["dropped_rows"] == 1
    assert hash_file(out1 / "heldout.jsonl") == hash_file(out2 / "heldout.jsonl")


def test_the_heldout_set_of_the_first_night_outlives_a_changed_source_and_seed(files, tmp_path):
    first, out1 = files.night()
    kept = (out1 / "heldout.jsonl").read_bytes()
    write_jsonl(tmp_path / "train.jsonl", plain(30))
    other = files.config.model_copy(update={"seed": 7})
    record, out2 = files.night(other)
    assert (out2 / "heldout.jsonl").read_bytes() == kept
    held = set(prompts(out2, "heldout.jsonl"))
    assert not held & set(prompts(out2))
    # 30 rows, 5 of them held out since the first night: all others train
    assert len(prompts(out2)) == 25
    assert record.meta["heldout_given_up"] > 0
    assert sum(new_rows(record, first).values()) == 10


def test_the_same_source_gives_nothing_new_and_no_leaks(files):
    first, _ = files.night()
    second, out2 = files.night()
    assert not new_rows(second, first)
    assert reasons(out2) == {}
    assert second.meta["heldout_given_up"] == 0


def test_every_faulty_dropped_row_is_set_aside_with_its_reason(files):
    files.night()
    faulty = [
        {"id": "gold", "prompt": "How high?", "answer": "very"},
        {"id": "blank", "prompt": "  ", "answer": "1"},
        {"id": "again", "prompt": "what is 3 plus 3?", "answer": "6"},
        {"id": "wrong", "prompt": "What is 5 plus 5?", "answer": "11"},
        *plain(1, start=200),
    ]
    files.drop("mixed.jsonl", faulty)
    (files.folder / "drop" / "torn.jsonl").write_text('{"prompt": "x", "answer": }\n')
    (files.folder / "drop" / "alien.jsonl").write_text('{"colour": "blue"}\n')
    record, out = files.night()
    found = reasons(out)
    assert found["gold"].startswith("unparseable_answer: ")
    assert found["blank"] == "prompt_no_text: empty or blank"
    held = {row.id for row in read_rows(out / "heldout.jsonl")}
    for twin, name in (("r3", "again"), ("r5", "wrong")):
        code = "leak: " if twin in held else "duplicate_prompt: "
        assert found[name].startswith(code), found[name]
    others = [q.values["reason"] for q in read_jsonl(out / "quarantine.jsonl").records]
    assert any(r.startswith("unparseable_line: drop:torn.jsonl: ") for r in others)
    assert any(
        r.startswith("unknown_shape: drop:alien.jsonl has the columns 'colour'") for r in others
    )
    assert record.meta["dropped_rows"] == 1


def test_rows_dropped_on_the_first_night_are_never_held_out(tmp_path):
    write_jsonl(tmp_path / "train.jsonl", plain(4))
    source = FileSource(train=str(tmp_path / "train.jsonl"), heldout_share=0.5)
    nights = Nights(tmp_path, DataConfig(source=source, gate=LOOSE))
    nights.drop("many.jsonl", plain(40, start=100))
    _, out = nights.night()
    assert all(int(row.answer) < 200 for row in read_rows(out / "heldout.jsonl"))
    assert len(read_rows(out / "heldout.jsonl")) == 2
    assert len(read_rows(out / "train.jsonl")) == 42


def test_a_cap_on_training_rows_does_not_throw_new_ones_away(files):
    source = files.config.source.model_copy(update={"max_train_rows": 6, "max_heldout_rows": 3})
    config = files.config.model_copy(update={"source": source})
    first, out1 = files.night(config)
    files.drop("new.jsonl", plain(5, start=100))
    second, out2 = files.night(config)
    assert (first.meta["train_rows"], second.meta["train_rows"]) == (6, 11)
    assert prompts(out2)[:6] == prompts(out1)
    assert len(read_rows(out2 / "heldout.jsonl")) == 3
    assert sum(new_rows(second, first).values()) == 5


def test_a_heldout_file_is_frozen_too(tmp_path):
    train = write_jsonl(tmp_path / "train.jsonl", plain(6))
    heldout = write_jsonl(tmp_path / "held.jsonl", plain(3, start=50))
    source = FileSource(train=str(train), heldout=str(heldout))
    nights = Nights(tmp_path, DataConfig(source=source, gate=LOOSE))
    _, out1 = nights.night()
    kept = (out1 / "heldout.jsonl").read_bytes()
    write_jsonl(heldout, plain(3, start=60))
    record, out2 = nights.night()
    assert (out2 / "heldout.jsonl").read_bytes() == kept
    assert record.meta["heldout_given_up"] == 3
    assert len(prompts(out2)) == 6  # rows of a held-out file never train


def test_dropped_rows_are_read_as_the_source_is(tmp_path):
    rows = [{"frage": f"{i}?", "antwort": f"0{i}", "prompt": "x"} for i in range(6)]
    train = write_jsonl(tmp_path / "train.jsonl", rows)
    mapping = Mapping(prompt="frage", answer="antwort")
    source = FileSource(train=str(train), mapping=mapping, answer_kind="code", heldout_share=0.3)
    nights = Nights(tmp_path, DataConfig(source=source, gate=LOOSE))
    nights.drop("mapped.jsonl", [{"frage": "neu?", "antwort": "007"}])
    nights.drop("own.jsonl", [{"prompt": "other?", "answer": "A1"}])  # without the mapped columns
    _, out = nights.night()
    dropped = [row for row in read_rows(out / "train.jsonl") if row.source.startswith("drop:")]
    assert [(r.prompt, r.answer, r.answer_kind) for r in dropped] == [
        ("neu?", "007", "code"),
        ("other?", "A1", "code"),
    ]


def test_calculator_and_generated_profiles_take_dropped_rows_too(tmp_path):
    source = CalculatorSource(train_rows=64, heldout_rows=32, demonstrations=10)
    nights = Nights(tmp_path, DataConfig(source=source, gate=LOOSE))
    nights.drop("more.jsonl", [{"prompt": "1000001+1=?", "answer": "1000002", "band": "hard"}])
    record, out = nights.night()
    (dropped,) = [row for row in read_rows(out / "train.jsonl") if row.source.startswith("drop:")]
    assert (dropped.band, record.meta["train_bands"]["hard"]) == ("hard", 22)
    shown = read_demonstrations(out / "demonstrations.jsonl")
    assert len(shown) == 11
    assert json.loads(shown[-1].model_dump_json())["messages"] == [
        {"role": "user", "content": "1000001+1=?"},
        {"role": "assistant", "content": "1000002"},
    ]


def test_a_generator_of_text_answers_gives_dropped_rows_its_kind(tmp_path):
    source = ReasoningGymSource(dataset="spell_backward", train_rows=8, heldout_rows=4)
    nights = Nights(tmp_path, DataConfig(source=source, gate=LOOSE))
    nights.drop("more.jsonl", [{"prompt": "Spell backward: abc", "answer": "cba"}])
    _, out = nights.night()
    (dropped,) = [row for row in read_rows(out / "train.jsonl") if row.source.startswith("drop:")]
    assert dropped.answer_kind == "text"


def test_a_frozen_file_is_copied_and_not_written_anew(files):
    """Bytes that this version of the project would write otherwise stay as they are."""
    _, out1 = files.night()
    rows = [json.loads(line) for line in (out1 / "heldout.jsonl").read_text().splitlines()]
    earlier = "".join(
        json.dumps(row, indent=None, separators=(" , ", " : ")) + "\n" for row in rows
    )
    (out1 / "heldout.jsonl").write_text(earlier)
    record, out2 = files.night()
    assert (out2 / "heldout.jsonl").read_text() == earlier
    assert record.meta["heldout_sha256"] == hash_file(out1 / "heldout.jsonl")
