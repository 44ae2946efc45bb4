"""Who shares the driver's disk, and where others read and write; Ray itself carries in
`tests/faults/test_two_nodes.py`."""

from tasks.artifacts import write_atomic
from tasks.rl.runtime.ray_freight import Depot, beacon


def test_a_beacon_is_a_new_file_each_time(tmp_path):
    first, second = beacon(tmp_path), beacon(tmp_path)
    assert first != second and {first, second} == set(tmp_path.iterdir())


def test_who_sees_the_beacon_uses_the_folders_themselves(tmp_path):
    depot = Depot(beacon(tmp_path))
    assert depot.shared
    assert depot.incoming(tmp_path / "snapshot", None) == tmp_path / "snapshot"
    assert depot.outgoing(tmp_path / "out") == tmp_path / "out"
    assert depot.parcel(tmp_path) is None


def test_who_does_not_writes_to_a_folder_of_its_own(tmp_path):
    seen = beacon(tmp_path)
    seen.unlink()
    depot = Depot(seen)
    assert not depot.shared
    out = depot.outgoing(tmp_path / "step-1")
    assert out.is_dir() and not out.is_relative_to(tmp_path) and out.name == "step-1"
    write_atomic(out / "old", "x")
    assert depot.outgoing(tmp_path / "step-1") == out and not list(out.iterdir())
    assert depot.outgoing(tmp_path / "step-2") != out and out.exists()


def test_its_copies_go_with_it(tmp_path):
    depot = Depot(tmp_path / "never")
    copy = depot.outgoing(tmp_path / "out")
    del depot
    assert not copy.exists()
