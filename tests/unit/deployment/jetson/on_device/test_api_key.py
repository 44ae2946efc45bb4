import os
import stat

import pytest

from deployment.jetson.on_device.api_key import ApiKeyError, allows, make_key, read_key

KEY = "abcdefghijklmnop"


def _file(tmp_path, text=KEY + "\n", mode=0o600):
    path = tmp_path / "api_key"
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    path.chmod(mode)
    return path


def test_key_of_a_private_file(tmp_path):
    assert read_key(_file(tmp_path)) == KEY
    assert read_key(_file(tmp_path, mode=0o400)) == KEY


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o601, 0o644, 0o666, 0o777])
def test_file_that_others_can_reach_is_refused(tmp_path, mode):
    with pytest.raises(ApiKeyError, match=rf"mode {mode:04o} .* chmod 600"):
        read_key(_file(tmp_path, mode=mode))


@pytest.mark.parametrize(
    "text",
    ["", "\n", "short", "a" * 15, "a" * 513, "abcdefgh ijklmnop", KEY + "\n" + KEY, b"\xff" * 20,
     "abcdefghijklmno\x00"],
)  # fmt: skip
def test_file_without_a_key(tmp_path, text):
    with pytest.raises(ApiKeyError, match=r"holds no key|more than one word"):
        read_key(_file(tmp_path, text))


def test_missing_key_says_how_to_make_one(tmp_path):
    with pytest.raises(ApiKeyError, match=r"make one: .*umask 077"):
        read_key(tmp_path / "none")


def test_folder_or_pipe_is_no_key(tmp_path):
    with pytest.raises(ApiKeyError, match="not a regular file"):
        read_key(tmp_path)
    os.mkfifo(tmp_path / "pipe", 0o600)
    with pytest.raises(ApiKeyError, match="not a regular file"):
        read_key(tmp_path / "pipe")


def test_made_key_is_random_private_and_kept(tmp_path):
    first, second = tmp_path / "a" / "key", tmp_path / "b"
    make_key(first)
    make_key(second)
    assert stat.S_IMODE(first.stat().st_mode) == 0o600
    key = read_key(first)
    assert key != read_key(second)
    make_key(first)
    assert read_key(first) == key


@pytest.mark.parametrize(
    ("header", "right"),
    [
        (f"Bearer {KEY}", True),
        (None, False),
        ("", False),
        (KEY, False),
        (f"bearer {KEY}", False),
        (f"Bearer {KEY} ", False),
        (f"Bearer {KEY[:-1]}", False),
        (f"Bearer {KEY}x", False),
        ("Bearer ключ\udcff", False),
    ],
)
def test_only_the_key_is_allowed(header, right):
    assert allows(header, KEY) is right
