"""A checkpoint is whole or does not count, whichever byte is wrong and whenever the kill comes."""

import asyncio
import json
import os
import shutil
from pathlib import Path

import pytest

from tasks.artifacts import hash_bytes, write_atomic
from tasks.rl import checkpoint
from tasks.rl.checkpoint import KEEP, MANIFEST, Checkpoints
from tasks.rl.errors import CheckpointMismatchError

IDENTITY = {"config": "c" * 64, "snapshot": "s" * 64}


class Killed(BaseException):
    """Stands for SIGKILL: nothing in the code under test may catch it."""


def write(checkpoints: Checkpoints, step: int, attempt: int = 0) -> None:
    async def learner(folder: Path) -> dict[str, str]:
        for name in ("policy", "optimiser"):
            write_atomic(folder / f"{name}.safetensors", f"{name} at {step}".encode() * 9)
        return {"policy": hash_bytes(f"policy {step}".encode())}

    loop = {"queue": {"next_serial": 8 * step}, "meter": {"both_s": 0.1 + step, "last": None}}
    asyncio.run(checkpoints.write(step, attempt, loop, (), learner))


@pytest.fixture
def checkpoints(tmp_path) -> Checkpoints:
    return Checkpoints(tmp_path, IDENTITY)


def step_folder(root: Path, step: int) -> Path:
    return root / f"step-{step:06d}"


def test_none_is_none(checkpoints, tmp_path):
    assert checkpoints.latest() is None
    (tmp_path / ".step-000004.partial").mkdir()
    assert checkpoints.latest() is None


def test_what_was_written_comes_back(checkpoints, tmp_path):
    write(checkpoints, 3, attempt=2)
    saved = checkpoints.latest()
    assert (saved.step, saved.attempt, saved.folder) == (3, 2, step_folder(tmp_path, 3))
    assert saved.loop == {
        "queue": {"next_serial": 24}, "meter": {"both_s": 3.1, "last": None},
    }  # fmt: skip
    assert saved.learner == {"policy": hash_bytes(b"policy 3")}
    assert (saved.folder / "policy.safetensors").read_bytes() == b"policy at 3" * 9


def test_the_newest_counts_and_two_are_kept(checkpoints, tmp_path):
    for step in (1, 2, 3, 10, 9_999_99):
        write(checkpoints, step)
        assert checkpoints.latest().step == step
    assert len(list(tmp_path.glob("step-*"))) == KEEP == 2
    assert not list(tmp_path.glob(".*"))


def damage(path: Path, how: str) -> None:
    data = path.read_bytes()
    if how == "missing":
        path.unlink()
    elif how == "empty":
        path.write_bytes(b"")
    elif how == "cut":
        path.write_bytes(data[: len(data) // 2])
    elif how == "longer":
        path.write_bytes(data + b" 1")
    else:
        path.write_bytes(bytes([data[0] ^ 0xFF]) + data[1:])


@pytest.mark.parametrize("how", ["missing", "empty", "cut", "flipped", "longer"])
@pytest.mark.parametrize("file", ["policy.safetensors", "optimiser.safetensors", MANIFEST])
def test_a_damaged_newest_gives_way_and_none_whole_is_an_error(checkpoints, tmp_path, file, how):
    write(checkpoints, 1)
    write(checkpoints, 2)
    damage(step_folder(tmp_path, 2) / file, how)
    assert checkpoints.latest().step == 1
    damage(step_folder(tmp_path, 1) / file, how)
    with pytest.raises(
        CheckpointMismatchError, match=rf"damaged: step-000002 \({file}\); step-000001"
    ):
        checkpoints.latest()


@pytest.mark.parametrize(
    "change",
    [
        lambda m: m.update(step=7),
        lambda m: m.update(attempt=0),
        lambda m: m["loop"]["queue"].update(next_serial=9),
        lambda m: m["learner"].clear(),
        lambda m: m["files"].clear(),
        lambda m: m["loop"]["meter"].update(both_s=float("nan")),
        lambda m: m.pop("sha256"),
    ],
)
def test_a_manifest_that_says_something_else_is_damaged(checkpoints, tmp_path, change):
    write(checkpoints, 1)
    write(checkpoints, 2, attempt=1)
    path = step_folder(tmp_path, 2) / MANIFEST
    manifest = json.loads(path.read_text())
    change(manifest)
    path.write_text(json.dumps(manifest))
    assert checkpoints.latest().step == 1


@pytest.mark.parametrize("text", ["[]", "3", "null", '"x"', "[[1, 2]]", "\x00"])
def test_a_manifest_that_is_no_manifest_is_damaged(checkpoints, tmp_path, text):
    write(checkpoints, 1)
    write(checkpoints, 2)
    (step_folder(tmp_path, 2) / MANIFEST).write_text(text)
    assert checkpoints.latest().step == 1


def test_a_checkpoint_of_another_run_is_refused_by_name(checkpoints, tmp_path):
    write(checkpoints, 1)
    for other in ({"config": "x"}, {"snapshot": "x"}, {"data": "new"}):
        foreign = Checkpoints(tmp_path, IDENTITY | other)
        with pytest.raises(CheckpointMismatchError, match=f"{next(iter(other))} differ"):
            foreign.latest()
    with pytest.raises(CheckpointMismatchError, match="another run: snapshot"):
        Checkpoints(tmp_path, {"config": "c" * 64}).latest()


def test_a_kill_at_any_moment_leaves_the_old_or_the_new(checkpoints, tmp_path, monkeypatch):
    """Every call that touches the disk is a moment; the run after the kill writes step 2 again."""
    outcomes = []
    for moment in range(100):
        shutil.rmtree(tmp_path)
        tmp_path.mkdir()
        write(checkpoints, 0)
        write(checkpoints, 1)
        with monkeypatch.context() as patch:
            left = [moment]

            def killing(call, left=left):
                def wrapped(*args, **kwargs):
                    left[0] -= 1
                    if left[0] == -1:
                        raise Killed
                    return call(*args, **kwargs)

                return wrapped

            for owner, name in (
                (os, "replace"), (os, "fsync"), (os, "unlink"), (os, "rmdir"),
                (shutil, "rmtree"), (checkpoint, "fsync_folder"), (Path, "mkdir"),
            ):  # fmt: skip
                patch.setattr(owner, name, killing(getattr(owner, name)))
            try:
                write(checkpoints, 2)
            except Killed:
                killed = True
            else:
                killed = False
        step = checkpoints.latest().step
        assert step in (1, 2) if killed else step == 2
        outcomes.append((killed, step))
        if not killed:
            break
        write(checkpoints, 2)
        assert checkpoints.latest().step == 2
    assert {(True, 1), (True, 2), (False, 2)} == set(outcomes)


def test_no_attempt_takes_the_number_of_another(checkpoints, tmp_path):
    assert [checkpoints.begin_attempt() for _ in range(3)] == [0, 1, 2]
    write(checkpoints, 1, attempt=2)
    assert Checkpoints(tmp_path, IDENTITY).begin_attempt() == 3
    assert checkpoints.latest().step == 1
