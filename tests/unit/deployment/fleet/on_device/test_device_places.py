"""Paths, links, journal, pin and lock of the device's side, without a device."""

import io
import json
import os
import subprocess
import tarfile
import time

import pytest

from deployment.fleet.on_device import receive
from deployment.fleet.on_device.journal import locked, read_journal, write_journal
from deployment.fleet.on_device.places import DeviceError, Places, release_hash, write_whole
from deployment.fleet.on_device.state import facts, pin_key

SHAS = tuple(digit * 12 for digit in "abcdef")


@pytest.fixture
def places(tmp_path):
    places = Places(str(tmp_path), "agent")
    for number, sha in enumerate(SHAS):
        folder = places.releases / sha
        folder.mkdir(parents=True)
        (folder / "manifest.json").write_text(sha)
        os.utime(folder, (number, number))
    return places


@pytest.mark.parametrize("agent", ["", "..", "a/b", "A", "-a", "a b"])
def test_agent_that_is_a_path(tmp_path, agent):
    with pytest.raises(DeviceError, match="is not a name"):
        Places(str(tmp_path), agent)


@pytest.mark.parametrize("sha", ["", "..", "a" * 11, "a" * 13, "A" * 12, "../../../etc"])
def test_release_that_is_a_path(places, sha):
    with pytest.raises(DeviceError, match="12 hexadecimal"):
        places.release(sha)


def test_links_move_in_one_step_and_only_name_what_is_there(places):
    assert places.linked("current") is None
    for sha in SHAS[:2]:
        places.link("current", sha)
        assert (places.linked("current"), os.readlink(places.app / "current")) == (
            sha,
            f"releases/{sha}",
        )
    places.link("current", None)
    places.link("current", None)
    assert not (places.app / "current").is_symlink()
    (places.app / "previous").symlink_to("releases/000000000000")
    assert places.linked("previous") is None
    (places.app / "previous").unlink()
    (places.app / "previous").symlink_to("/etc")
    assert places.linked("previous") is None


def test_prune_keeps_the_linked_and_the_newest(places):
    places.link("current", SHAS[0])
    places.link("previous", SHAS[1])
    (places.releases / ".incoming.5").mkdir()
    places.prune(3)
    assert sorted(p.name for p in places.releases.iterdir()) == sorted([*SHAS[:2], SHAS[5]])
    places.prune(1)
    assert sorted(p.name for p in places.releases.iterdir()) == sorted(SHAS[:2])


def test_journal_takes_on_what_was_installed_by_hand(places):
    assert read_journal(places) == {"good": None, "trying": None}
    places.link("current", SHAS[0])
    assert read_journal(places) == {"good": SHAS[0], "trying": None}
    write_journal(places, SHAS[0], SHAS[1])
    assert read_journal(places) == {"good": SHAS[0], "trying": SHAS[1]}


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", '{"format": 2, "good": null, "trying": null}', '{"format": 1}']
    + [json.dumps({"format": 1, "good": bad, "trying": None}) for bad in ("..", 5, "A" * 12)],
)
def test_journal_of_another_format_stops_everything(places, text):
    places.journal.write_text(text)
    with pytest.raises(DeviceError, match="is not of format 1"):
        read_journal(places)


def test_the_lock_is_one_with_the_installer(places):
    with locked(places, 0.0):
        done = subprocess.run(["flock", "-n", str(places.lock), "true"], check=False)
        assert done.returncode == 1
        start_s = time.monotonic()
        with pytest.raises(DeviceError, match="another installation"), locked(places, 0.3):
            pass
        assert 0.3 <= time.monotonic() - start_s < 5
    with locked(places, 0.0):
        pass


def test_pin_is_kept_unless_told(tmp_path):
    assert pin_key(str(tmp_path), "key one\n", replace=False) == {"changed": True}
    path = tmp_path / "etc/rl-pipeline/allowed_signers"
    assert (path.read_text(), path.stat().st_mode & 0o777) == ("key one\n", 0o644)
    assert pin_key(str(tmp_path), "key one\n", replace=False) == {"changed": False}
    with pytest.raises(DeviceError, match="pins another key"):
        pin_key(str(tmp_path), "key two\n", replace=False)
    assert path.read_text() == "key one\n"
    assert pin_key(str(tmp_path), "key two\n", replace=True) == {"changed": True}
    for bad in ("", " \n", "x" * 70_000):
        with pytest.raises(DeviceError, match="empty or too long"):
            pin_key(str(tmp_path), bad, replace=True)


def test_facts_of_a_device_with_nothing_and_with_two_agents(tmp_path, places):
    found = facts(str(tmp_path), 1)
    assert found["agents"]["agent"]["releases"] == list(SHAS)
    assert (found["pin"], found["l4t"], found["served"]["answers"]) == (None, None, False)
    Places(str(tmp_path), "other").app.mkdir()
    places.link("current", SHAS[2])
    agents = facts(str(tmp_path), 1)["agents"]
    assert agents["agent"]["current"] == release_hash(places.release(SHAS[2]))
    assert agents["other"]["current"] is None
    with pytest.raises(DeviceError, match="is not a folder on the device"):
        facts(str(tmp_path / "none"), 1)


def _archive(path, members):
    with tarfile.open(path, "w:gz") as tar:
        for name, kind in members:
            info = tarfile.TarInfo(name)
            info.type = kind
            info.linkname = "/etc/passwd"
            info.size = 3 if kind == tarfile.REGTYPE else 0
            tar.addfile(info, io.BytesIO(b"abc"))
    return path


@pytest.mark.parametrize(
    "members",
    [
        [("../x", tarfile.REGTYPE)],
        [("/x/y", tarfile.REGTYPE)],
        [("top/../../x", tarfile.REGTYPE)],
        [("top/link", tarfile.SYMTYPE)],
        [("top/link", tarfile.LNKTYPE)],
        [("top/dev", tarfile.CHRTYPE)],
        [("top/a", tarfile.REGTYPE), ("top/a", tarfile.REGTYPE)],
        [("top/a", tarfile.REGTYPE), ("top/a/b", tarfile.REGTYPE)],
        [("alone", tarfile.REGTYPE)],
        [("one/a", tarfile.REGTYPE), ("two/a", tarfile.REGTYPE)],
        [],
        [(f"top/{n}", tarfile.REGTYPE) for n in range(5)],
    ],
)
def test_unsafe_archives_are_refused(tmp_path, members):
    into = tmp_path / "into"
    into.mkdir()
    with pytest.raises(DeviceError) as caught:
        receive.unpack(_archive(tmp_path / "a.tar.gz", members), into, 12)
    assert caught.value.kind == "refused"
    assert not (tmp_path / "x").exists()


def test_cut_or_other_archives_are_refused(tmp_path):
    whole = _archive(tmp_path / "a.tar.gz", [("top/a", tarfile.REGTYPE)]).read_bytes()
    for raw in (b"", b"PK", whole[:20], whole[: len(whole) // 2], b"\0" * 2048):
        (tmp_path / "b").write_bytes(raw)
        with pytest.raises(DeviceError, match=r"not a whole|must hold one"):
            receive.unpack(tmp_path / "b", tmp_path, 99)


def test_append_goes_on_only_where_it_is(tmp_path, places):
    sha = "1" * 64
    assert receive.arrived(places, sha, 6, 0)["have"] == 0
    with pytest.raises(DeviceError, match="does not reach byte 3"):
        receive.append(places, sha, 3, 6, io.BufferedReader(io.BytesIO(b"def")))
    assert receive.append(places, sha, 0, 6, io.BufferedReader(io.BytesIO(b"abc"))) == {"have": 3}
    assert receive.arrived(places, sha, 6, 0)["have"] == 3
    assert receive.append(places, sha, 3, 6, io.BufferedReader(io.BytesIO(b"defgh"))) == {"have": 6}
    assert receive.part_path(places, sha).read_bytes() == b"abcdef"
    assert receive.arrived(places, sha, 5, 0)["have"] == 0  # longer than it can be: anew
    with pytest.raises(DeviceError, match="hash is malformed"):
        receive.part_path(places, "../x")
    with pytest.raises(DeviceError) as caught:
        receive.arrived(places, sha, 1 << 60, 0)
    assert caught.value.kind == "disk_full"


def test_a_connection_that_died_without_a_word_is_given_up(places, monkeypatch):
    monkeypatch.setattr(receive, "IDLE_S", 1)
    reading, writing = os.pipe()
    os.write(writing, b"abc")
    with open(reading, "rb") as stream, pytest.raises(DeviceError, match="nothing arrived for 1 s"):
        receive.append(places, "1" * 64, 0, 6, stream)
    os.close(writing)
    assert receive.part_path(places, "1" * 64).read_bytes() == b"abc"


def test_write_whole_leaves_nothing_beside(tmp_path):
    write_whole(tmp_path / "a", b"1", 0o600)
    write_whole(tmp_path / "a", b"2", 0o600)
    assert [p.name for p in tmp_path.iterdir()] == ["a"]
    assert (tmp_path / "a").read_bytes() == b"2"
    assert (tmp_path / "a").stat().st_mode & 0o777 == 0o600
