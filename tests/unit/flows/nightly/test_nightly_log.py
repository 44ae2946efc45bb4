"""The night log: what it remembers, and what a kill cannot spoil."""

from datetime import UTC, datetime

from flows.nightly.log import NightLine, NightLog, night_logs
from tasks.artifacts import ArtifactRecord

RECORD = ArtifactRecord(kind="dataset", uri="runs/store/data/x", sha256="d" * 64, meta={"n": 1})


def line(outcome, day="2027-01-05", **more) -> NightLine:
    return NightLine(outcome, day, "Europe/Berlin", more.pop("scheduled", True), **more)


def test_lines_come_back_as_they_were_written(tmp_path):
    log = NightLog(tmp_path, "calc.v1")
    assert log.lines() == [] and log.last_trained() is None and log.done_on("2027-01-05") is None
    written = line("trained", data=RECORD.model_dump(mode="json"), reason="ünï\n", time_s=1e9)
    log.append(written)
    assert log.lines() == [written]
    assert log.lines()[0].record("data") == RECORD
    assert log.lines()[0].record("intake") is None
    assert log.lines()[0].time == datetime(2001, 9, 9, 1, 46, 40, tzinfo=UTC)
    assert log.path.name == "calc-v1.jsonl"
    assert [found.path for found in night_logs(tmp_path)] == [log.path]


def test_only_a_scheduled_night_that_ended_well_is_done(tmp_path):
    log = NightLog(tmp_path, "calc")
    for outcome in ("started", "failed", "killed", "skipped", "stopped"):
        log.append(line(outcome))
    log.append(line("trained", scheduled=False))
    assert log.done_on("2027-01-05") is None
    log.append(line("nothing new"))
    found = log.done_on("2027-01-05")
    assert found is not None and found.outcome == "nothing new"
    assert log.done_on("2027-01-06") is None


def test_the_next_night_goes_on_from_the_last_that_trained(tmp_path):
    log = NightLog(tmp_path, "calc")
    for outcome, run_id in (
        ("trained", "a"),
        ("trained", "b"),
        ("failed", "c"),
        ("nothing new", "d"),
    ):
        log.append(line(outcome, run_id=run_id))
    last, done = log.last_trained(), log.last_done()
    assert last is not None and last.run_id == "b"
    assert done is not None and done.run_id == "d"


def test_a_line_cut_off_by_a_kill_and_keys_of_a_later_version_do_not_stop_reading(tmp_path):
    log = NightLog(tmp_path, "calc")
    log.append(line("trained", run_id="a"))
    whole = log.path.read_bytes()
    log.path.write_bytes(whole + b'{"outcome": "train')
    assert [found.run_id for found in log.lines()] == ["a"]
    log.append(line("trained", run_id="b"))
    assert [found.run_id for found in log.lines()] == ["a", "b"]
    later = whole.replace(b'{"data"', b'{"colour":"blue","data"')
    log.path.write_bytes(later)
    assert [found.run_id for found in log.lines()] == ["a"]
