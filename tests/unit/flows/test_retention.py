"""What gc keeps and takes, on a real store."""

import os

import pytest
from test_lineage_sources import build
from typer.testing import CliRunner

from configs.schema.operations import RetentionConfig
from flows.cli import app
from flows.lineage.sources import gather
from flows.nightly.log import NightLine, NightLog
from flows.retention import DOOMED, collect_garbage, newest_first, plan_retention
from flows.run_lock import RunLock, RunLockedError
from tasks.artifacts import ArtifactRecord, write_json
from tasks.artifacts.store import StageFolder
from tasks.tracking.promotion_ledger import LedgerError


@pytest.fixture
def runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    runs = build(tmp_path)
    for path in runs.glob("2026*"):
        write_json(path / "config.json", {})
    return runs


def add_run(runs, name, letter):
    """A later run that made only data of its own."""
    folder = StageFolder(runs / "store", "data", letter * 64)
    write_json(folder.path / "train.jsonl", {"id": name})
    record = ArtifactRecord(kind="dataset", uri=str(folder.path), sha256=letter * 64)
    write_json(folder.control / "key.json", {"inputs": {}})
    folder.finish(record, wall_s=1.0)
    write_json(runs / name / "config.json", {})
    write_json(runs / name / "records.json", {"data": record.model_dump(mode="json")})
    return folder.path


def paths(plan):
    return {str(d.path) for d in plan.doomed}


def test_everything_the_newest_runs_need_stays(runs):
    assert plan_retention(runs, RetentionConfig()).doomed == []


def test_champion_device_and_all_they_came_from_outlive_their_run(runs):
    for day in range(2, 5):
        add_run(runs, f"2026010{day}-000000-x-000{day}", str(day))
    plan = plan_retention(runs, RetentionConfig(keep_runs=1))
    gone = {p.name for p in map(type(runs), paths(plan))}
    assert gone == {
        "20260102-000000-x-0002",
        "20260103-000000-x-0003",
        "2" * 16,
        "3" * 16,
    }
    assert {"champion of micro", "device jetson-1", "run 20260104-000000-x-0004"} <= set(plan.kept)


def test_without_champion_and_device_the_old_run_and_its_outputs_go(runs):
    for path in (runs / "promotions").iterdir():
        path.unlink()
    (runs / "devices" / "jetson-1.json").unlink()
    kept = add_run(runs, "20270101-000000-x-0001", "7")
    done = collect_garbage(runs, RetentionConfig(keep_runs=1))
    assert {p.stage for p, _ in _outputs(runs)} == {"data"} and kept.is_dir()
    assert newest_first(runs) == [runs / "20270101-000000-x-0001"]
    assert done.bytes > 0 and not list(runs.rglob(f"{DOOMED}*"))
    assert plan_retention(runs, RetentionConfig(keep_runs=1)).doomed == []


def _outputs(runs):
    from tasks.artifacts.store import finished_outputs

    return list(finished_outputs(runs / "store"))


def test_a_stage_half_way_stays_while_its_run_is_kept(runs):
    half = runs / "store" / "rl" / ("8" * 16)
    write_json(half / ".stage" / "key.json", {})
    assert str(half) not in paths(plan_retention(runs, RetentionConfig()))
    os.utime(half / ".stage", (0, 0))
    assert str(half) in paths(plan_retention(runs, RetentionConfig()))


def test_leftovers_and_what_a_killed_gc_left_go(runs):
    for name in (f"{DOOMED}{'a' * 16}", "b" * 16 + ".corrupt", "c" * 16 + ".discarded"):
        (runs / "store" / "rl" / name).mkdir(parents=True)
    collect_garbage(runs, RetentionConfig())
    assert sorted(p.name for p in (runs / "store" / "rl").iterdir()) == ["b" * 16]


def test_old_backups_go_and_foreign_folders_are_not_looked_at(runs):
    for day in range(4):
        write_json(runs / "backups" / f"2026010{day}" / "x.json", {})
    (runs / "my-notes").mkdir()
    plan = plan_retention(runs, RetentionConfig(keep_backups=2))
    assert paths(plan) == {str(runs / "backups" / "20260100"), str(runs / "backups" / "20260101")}


def test_a_run_in_progress_refuses(runs):
    with RunLock(runs, "busy"), pytest.raises(RunLockedError, match="busy"):
        collect_garbage(runs, RetentionConfig())


def test_a_ledger_that_lies_stops_gc_before_anything_goes(runs):
    path = next((runs / "promotions").glob("*.jsonl"))
    path.write_bytes(path.read_bytes().replace(b"first", b"forst"))
    with pytest.raises(LedgerError):
        collect_garbage(runs, RetentionConfig(keep_runs=1))
    assert gather_sizes(runs)


def gather_sizes(runs):
    return [p for p, _ in _outputs(runs)]


def test_the_command_is_dry_unless_told(runs):
    for day in range(2, 4):
        add_run(runs, f"2026010{day}-000000-x-000{day}", str(day))
    call = ["gc", "--runs", str(runs), "--keep-runs", "1"]
    dry = CliRunner().invoke(app, call)
    assert dry.exit_code == 0 and "nothing was taken away" in dry.output
    assert len(newest_first(runs)) == 3
    wet = CliRunner().invoke(app, [*call, "--yes"])
    assert wet.exit_code == 0 and "freed" in wet.output
    # the first run stays: its bundle is the champion's
    assert [p.name[:8] for p in newest_first(runs)] == ["20260103", "20260101"]
    assert len(gather(runs)) > 0


def test_the_dataset_of_the_last_night_that_trained_outlives_its_run(runs):
    for day in range(2, 5):
        add_run(runs, f"2026010{day}-000000-x-000{day}", str(day))
    data = ArtifactRecord(kind="dataset", uri=f"runs/store/data/{'3' * 16}", sha256="3" * 64)
    line = NightLine("trained", "2026-01-03", "UTC", True, data=data.model_dump(mode="json"))
    NightLog(runs, "calc").append(line)
    plan = plan_retention(runs, RetentionConfig(keep_runs=1))
    assert plan.kept["last night of calc"] == ["3" * 64]
    gone = {p.name for p in map(type(runs), paths(plan))}
    assert "2" * 16 in gone and "3" * 16 not in gone
