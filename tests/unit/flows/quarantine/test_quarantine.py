"""The quarantine over real data prep: list, show, release, and what comes of it."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from configs.schema.data import DataConfig, DataGate, FileSource
from flows.cli import app
from flows.plan import plan
from flows.quarantine.decisions import (
    ReleaseFileError,
    ReleaseRefusedError,
    decisions_path,
    read_decisions,
    released_rows,
)
from flows.quarantine.rows import UnknownRowError, find, quarantined, release
from tasks.artifacts.progress import Reporter
from tasks.data.errors import DataGateError, ReleasesChangedError
from tasks.data.stage import run as prepare

LONG = "why " * 12
HOSTILE = "2+2\x1b[2J[red]?\u202e"


def rows(*extra: dict) -> list[dict]:
    plain = [{"id": f"t{i}", "prompt": f"{i}+{i}=?", "answer": str(2 * i)} for i in range(8)]
    return [*plain, *extra]


EXTRA = (
    {"id": "long", "prompt": LONG, "answer": "1"},
    {"id": "again", "prompt": "3+3=?", "answer": "6"},
    {"id": "called", "prompt": "None", "answer": "0"},
    {"id": "word", "prompt": "what is missing?", "answer": "nan"},
    {"id": "held", "prompt": "7*7=?", "answer": "49"},
    {"id": "both", "prompt": "7*7=?" + " " * 40, "answer": "49"},
    {"id": "t1", "prompt": "one twice", "answer": "2"},
    {"id": "hostile", "prompt": HOSTILE + "x" * 40, "answer": "4"},
)


class Project:
    """A runs folder, data files, and data prep as a run would call it."""

    def __init__(self, folder: Path) -> None:
        self.runs, self.folder, self.made = folder / "runs", folder, 0
        self.config = DataConfig(
            source=FileSource(
                train=str(folder / "train.jsonl"),
                heldout=str(folder / "heldout.jsonl"),
            ),
            gate=DataGate(
                min_train_rows=1, min_heldout_rows=1, max_prompt_chars=32, max_quarantined_share=1.0
            ),
        )
        self.write("train", rows(*EXTRA))
        self.write("heldout", [{"id": "h1", "prompt": "7*7=?", "answer": "49"}])

    def write(self, side: str, body: list[dict]) -> None:
        text = "".join(json.dumps(row) + "\n" for row in body)
        (self.folder / f"{side}.jsonl").write_text(text)

    def prepare(self) -> tuple[Path, set[str], dict[str, str]]:
        """(folder, ids in training, reason by id in quarantine) of the next data prep."""
        self.made += 1
        out = self.runs / "store" / "data" / f"key{self.made}"
        record = prepare(self.config, released_rows(self.runs), out, Reporter(out))
        home = self.runs / f"run{self.made}"
        home.mkdir()
        uri = {"data": {"uri": record.uri}}
        (home / "records.json").write_text(json.dumps(uri))
        ids = {json.loads(line)["id"] for line in (out / "train.jsonl").read_text().splitlines()}
        set_aside = [json.loads(x) for x in (out / "quarantine.jsonl").read_text().splitlines()]
        return out, ids, {row["row_id"]: row["reason"] for row in set_aside}

    def release(self, named: str, **more: bool) -> dict:
        return release(self.runs, find(quarantined(self.runs)[0], named), "looked at it", **more)

    def cli(self, *arguments: str):
        return CliRunner().invoke(app, ["quarantine", *arguments, "--runs", str(self.runs)])


@pytest.fixture
def project(tmp_path: Path) -> Project:
    return Project(tmp_path)


def test_rows_are_listed_with_file_line_and_reason_and_shown_harmlessly(project: Project) -> None:
    project.prepare()
    listed = project.cli("list")
    assert listed.exit_code == 0
    assert "train.jsonl:9" in listed.output and "prompt_too_long: 48 characters" in listed.output
    assert "8 rows: prompt_too_long 3, " in listed.output
    shown = project.cli("show", "hostile")
    assert shown.exit_code == 0 and "\x1b" not in shown.output and "\u202e" not in shown.output
    assert "[2J[red]?" in shown.output
    only = project.cli("list", "--check", "leak", "--json")
    line = json.loads(only.output)
    assert (line["row_id"], line["releasable"], line["runs"]) == ("held", False, ["run1"])


def test_a_released_row_passes_that_check_and_the_gate_over_the_written_files(
    project: Project,
) -> None:
    _, ids, reasons = project.prepare()
    assert {"long", "again"}.isdisjoint(ids)
    for named in ("long", "again"):
        line = project.release(named)
        assert line["actor"] and line["why"] == "looked at it"
    out, ids, reasons = project.prepare()
    assert {"long", "again"} <= ids and reasons.keys().isdisjoint({"long", "again"})
    gate = json.loads((out / "gate.json").read_bytes())
    assert gate["passed"] is True
    assert gate["released"] == {"duplicate_prompt": 1, "prompt_too_long": 1}
    project.release("again", withdraw=True)
    _, ids, reasons = project.prepare()
    assert "again" not in ids and reasons["again"].startswith("duplicate_prompt")


def test_everything_else_still_binds(project: Project) -> None:
    project.prepare()
    project.release("word")  # the word may be meant, but as a number it does not parse
    project.release("both")  # not too long after all, but it is the held-out prompt
    _, ids, reasons = project.prepare()
    assert {"word", "both"}.isdisjoint(ids)
    assert reasons["word"].startswith("unparseable_answer")
    assert reasons["both"].startswith("duplicate_prompt: of row 'held'")
    project.release("both")
    _, ids, reasons = project.prepare()
    assert "both" not in ids and reasons["both"].startswith("leak")
    with pytest.raises(ReleaseRefusedError, match="no verifier can score"):
        project.release("word")


def test_a_word_that_looks_missing_may_be_meant(project: Project) -> None:
    _, ids, reasons = project.prepare()
    assert reasons["called"].startswith("prompt_no_text: the word")
    project.release("called")
    _, ids, _ = project.prepare()
    assert "called" in ids


@pytest.mark.parametrize(("named", "part"), [("held", "a lie"), ("t1", "booked by id")])
def test_what_cannot_be_released_says_why(project: Project, named: str, part: str) -> None:
    project.prepare()
    done = project.cli("release", named, "--reason", "please")
    assert done.exit_code == 2 and part in " ".join(done.output.split())
    assert not decisions_path(project.runs).exists() or read_decisions(project.runs) == []


def test_a_release_is_of_the_row_as_it_stood(project: Project) -> None:
    project.prepare()
    project.release("long")
    changed = [{**row, "answer": "2"} if row["id"] == "long" else row for row in rows(*EXTRA)]
    project.write("train", changed)
    _, ids, reasons = project.prepare()
    assert "long" not in ids and reasons["long"].startswith("prompt_too_long")


def test_a_gate_that_failed_is_where_a_release_helps(project: Project) -> None:
    project.config = project.config.model_copy(
        update={"gate": project.config.gate.model_copy(update={"min_train_rows": 9})}
    )
    with pytest.raises(DataGateError):
        project.prepare()
    project.release("long")
    _, ids, _ = project.prepare()
    assert "long" in ids and len(ids) == 9


def test_twice_no_reason_and_unknown_names_are_refused(project: Project) -> None:
    project.prepare()
    project.release("long")
    with pytest.raises(ReleaseRefusedError, match="released already"):
        project.release("long")
    with pytest.raises(ReleaseRefusedError, match="not released"):
        project.release("again", withdraw=True)
    assert project.cli("release", "again", "--reason", "  ").exit_code == 2
    found = quarantined(project.runs)[0]
    with pytest.raises(UnknownRowError, match="quarantine list"):
        find(found, "nobody")
    with pytest.raises(UnknownRowError):
        find(found, "")
    assert project.cli("list", "--run", "none").exit_code == 2


def test_decisions_are_chained_and_signed(project: Project) -> None:
    project.prepare()
    project.release("long")
    project.release("again")
    path = decisions_path(project.runs)
    whole = path.read_text()
    first, second = whole.splitlines()
    for broken, why in (
        (whole.replace("looked at it", "looked at 1t", 1), "line 1 was changed"),
        (second + "\n", "line 1 does not follow"),
        (second + "\n" + first + "\n", "line 1 does not follow"),
        (whole + '{"action": "rel', "line 3 cannot be read"),
        (whole + "{}\n", "line 3 does not follow"),
        (re_signed(first) + "\n", "line 1 is not signed by SHA256:"),
    ):
        path.write_text(broken)
        with pytest.raises(ReleaseFileError, match=why):
            released_rows(project.runs)
        assert project.cli("list").exit_code == 2
    path.write_text(whole)
    assert [d["row_id"] for d in read_decisions(project.runs)] == ["long", "again"]


def re_signed(line: str) -> str:
    """The line signed by somebody else's key."""
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    body = json.loads(line)
    message = b"rl-pipeline-quarantine\0" + body["hash"].encode()
    body["signature"] = Ed25519PrivateKey.generate().sign(message).hex()
    return json.dumps(body)


def test_decisions_that_change_under_a_run_stop_data_prep(project: Project) -> None:
    project.prepare()
    project.release("long")
    inputs = released_rows(project.runs)
    project.release("again")
    out = project.runs / "store" / "data" / "late"
    with pytest.raises(ReleasesChangedError, match="Run again"):
        prepare(project.config, inputs, out, Reporter(out))


def test_a_decision_makes_data_prep_run_and_nothing_else_does(
    project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    from configs.schema import PipelineConfig

    def key() -> str | None:
        return plan(PipelineConfig(data=project.config), runs_dir=project.runs)[0].key

    project.prepare()
    before = key()
    assert key() == before
    project.release("long")
    after = key()
    assert after != before and key() == after


def test_an_empty_runs_folder_has_no_quarantine(tmp_path: Path) -> None:
    assert quarantined(tmp_path) == ([], [])
    assert released_rows(tmp_path) == {}
    assert not (tmp_path / "keys").exists()
    done = CliRunner().invoke(app, ["quarantine", "list", "--runs", str(tmp_path)])
    assert done.exit_code == 0 and "no row" in done.output
