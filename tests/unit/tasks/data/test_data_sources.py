"""Sources: shapes of users' files, mappings, ids, public datasets, generators."""

import sys

import pytest

from configs.schema.data import DataConfig, FileSource, Mapping, ReasoningGymSource
from tasks.artifacts import write_jsonl
from tasks.data.errors import (
    DataError,
    DataFileEmptyError,
    DataFileMissingError,
    DatasetLibraryMissingError,
    DatasetUnavailableError,
    UnknownShapeError,
)
from tasks.data.sources import load
from tasks.data.tables import to_frame, write_parquet

GSM = "She has 2+3=<<2+3=5>>5 eggs.\nSold at $2 that is 5*2=<<5*2=10>>$10.\n#### 10"


def source(path, **more):
    return DataConfig(source=FileSource(train=str(path), **more))


def rows_of(tmp_path, rows, **more):
    return load(source(write_jsonl(tmp_path / "rows.jsonl", rows), **more))


def test_prompt_and_answer_as_they_stand(tmp_path):
    loaded = rows_of(tmp_path, [{"id": "0007", "prompt": "p", "answer": "033", "topic": "x"}])
    row = loaded.train[0]
    assert (row.id, row.prompt, row.answer, row.line) == ("0007", "p", "033", 1)
    assert row.meta == {"columns": {"topic": "x"}}
    assert loaded.facts["shape"] == "prompt/answer"
    assert loaded.facts["columns"] == {"prompt": "prompt", "answer": "answer", "id": "id"}


def test_gsm8k_is_recognised_with_answer_solution_and_band(tmp_path):
    loaded = rows_of(tmp_path, [{"question": "How much?", "answer": GSM}])
    row = loaded.train[0]
    assert (loaded.facts["shape"], row.answer, row.band) == ("gsm8k", "10", "easy")
    assert row.solution == "She has 2+3=5 eggs.\nSold at $2 that is 5*2=$10.\n#### 10"


def test_question_and_answer_without_hashes_is_no_gsm8k(tmp_path):
    loaded = rows_of(tmp_path, [{"question": "q", "answer": "5"}])
    assert (loaded.facts["shape"], loaded.train[0].answer) == ("question/answer", "5")


def test_chat_messages_are_recognised_and_graded_on_their_last_number(tmp_path):
    talk = [{"role": "user", "content": "2+3?"}, {"role": "assistant", "content": "2+3=5"}]
    loaded = rows_of(tmp_path, [{"messages": talk}])
    row = loaded.train[0]
    assert (loaded.facts["shape"], row.prompt, row.answer) == ("messages", "2+3?", "5")
    assert row.messages == talk


def test_a_chat_with_an_answer_column_keeps_it(tmp_path):
    talk = [{"role": "user", "content": "2+3?"}, {"role": "assistant", "content": "hm"}]
    assert rows_of(tmp_path, [{"messages": talk, "answer": "5"}]).train[0].answer == "5"


def test_a_mapping_overrules_what_is_recognised(tmp_path):
    rows = [{"text": "p", "label": "033", "prompt": "no", "answer": "1", "level": "hard"}]
    mapping = Mapping(prompt="text", answer="label", band="level")
    row = rows_of(tmp_path, rows, mapping=mapping).train[0]
    assert (row.prompt, row.answer, row.band) == ("p", "033", "hard")


def test_a_mapped_column_that_is_not_there_names_those_that_are(tmp_path):
    with pytest.raises(UnknownShapeError, match=r"mapping\.prompt='text' is no column.*'answer'"):
        rows_of(tmp_path, [{"prompt": "p", "answer": "1"}], mapping=Mapping(prompt="text"))


def test_an_unknown_shape_says_how_to_map_it(tmp_path):
    with pytest.raises(UnknownShapeError, match=r"data\.source\.mapping\.prompt"):
        rows_of(tmp_path, [{"text": "p", "label": "1"}])


def test_ids_come_from_content_where_none_is_given_and_are_stable(tmp_path):
    rows = [{"prompt": "p", "answer": "1"}, {"prompt": "q", "answer": "1"}]
    first = [row.id for row in rows_of(tmp_path, rows).train]
    assert first == [row.id for row in rows_of(tmp_path, rows[::-1]).train][::-1]
    assert len(set(first)) == 2


def test_json_numbers_become_the_text_they_were_written_in(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"id": 7, "prompt": "p", "answer": 29.00}\n{"prompt": "q", "answer": 3}\n')
    rows = load(source(path)).train
    assert (rows[0].id, rows[0].answer) == ("7", "29.00")
    assert rows[1].answer == "3"


def test_parquet_is_read_like_jsonl(tmp_path):
    path = write_parquet(tmp_path / "x.parquet", to_frame([{"prompt": "p", "answer": "033"}]))
    assert load(source(path)).train[0].answer == "033"


def test_a_bad_line_goes_to_quarantine_with_its_number(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "p", "answer": "1"}\n{oops\n{"prompt": "q", "answer": "2"}\n')
    loaded = load(source(path))
    assert [row.line for row in loaded.train] == [1, 3]
    assert [(q.line, q.code, q.row) for q in loaded.quarantined] == [
        (2, "unparseable_line", {"text": "{oops"})
    ]


def test_missing_empty_and_folder(tmp_path):
    with pytest.raises(DataFileMissingError, match=r"data\.source\.train=.*nowhere\.jsonl"):
        load(source(tmp_path / "nowhere.jsonl"))
    with pytest.raises(DataFileMissingError, match="is a folder"):
        load(source(tmp_path))
    (tmp_path / "empty.jsonl").write_text("\n\n")
    with pytest.raises(DataFileEmptyError, match="the file is empty"):
        load(source(tmp_path / "empty.jsonl"))
    (tmp_path / "bad.jsonl").write_text("[\n{},\n")
    with pytest.raises(DataFileEmptyError, match=r"none of its 2 lines parses \(line 1"):
        load(source(tmp_path / "bad.jsonl"))


@pytest.mark.parametrize("name", ["openai/gsm8k", "openai/gsm8k:main"])
def test_a_public_dataset_id_without_its_library_says_what_to_do(name, monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(DatasetLibraryMissingError, match="download the dataset's JSONL"):
        load(source(name))


@pytest.mark.parametrize("name", ["openai/gsm8k", "openai/gsm8k:main"])
def test_a_public_dataset_that_cannot_be_reached_says_what_to_do(name, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    with pytest.raises(DatasetUnavailableError, match=r"train=.*gsm8k.*set data.source.train"):
        load(source(name))


@pytest.mark.parametrize("name", ["data/train.jsonl", "a/b/c", "../x/y", "data/train.parquet"])
def test_a_path_is_not_taken_for_a_dataset_id(name):
    with pytest.raises(DataFileMissingError):
        load(source(name))


def test_reasoning_gym_gives_distinct_problems_on_both_sides():
    config = DataConfig(source=ReasoningGymSource(train_rows=40, heldout_rows=32), seed=3)
    loaded = load(config)
    prompts = [row.prompt for row in [*loaded.train, *loaded.heldout]]
    assert (len(loaded.train), len(loaded.heldout), len(set(prompts))) == (40, 32, 72)
    assert loaded.facts["answer_kind"] == "number"
    again = load(config)
    assert [r.prompt for r in again.train] == [r.prompt for r in loaded.train]


def test_reasoning_gym_names_the_generators_and_says_when_one_runs_dry():
    with pytest.raises(DataError, match="chain_sum"):
        load(DataConfig(source=ReasoningGymSource(dataset="nope", train_rows=1, heldout_rows=32)))
    few = ReasoningGymSource(
        options={"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1},
        train_rows=5000,
        heldout_rows=32,
    )
    with pytest.raises(DataError, match="distinct problems"):
        load(DataConfig(source=few))
