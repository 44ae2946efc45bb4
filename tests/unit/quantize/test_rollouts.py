"""Rollouts are read as sampled, or refused by line."""

import json

import pytest

from quantize.errors import RolloutsError
from quantize.rollouts import RolloutTokens, read_rollouts, take


def line(split="parity", ids=(1, 2, 3), mask=(False, True, True), **extra):
    return json.dumps({"token_ids": ids, "action_mask": mask, "split": split, **extra})


def test_splits_keep_their_order(tmp_path):
    path = tmp_path / "r.jsonl"
    path.write_text(
        "\n".join([line(ids=(1, 2, 3)), line("imatrix", note="\u2028"), line(ids=(7, 8, 9)), ""])
    )
    found = read_rollouts(path)
    assert [r.token_ids for r in found["parity"]] == [(1, 2, 3), (7, 8, 9)]
    assert found["imatrix"] == [RolloutTokens((1, 2, 3), (False, True, True))]


@pytest.mark.parametrize(
    ("bad", "said"),
    [
        ("{", "line 2: not JSON"),
        ("[]", "line 2: expected an object"),
        ('{"token_ids": [1]}', "line 2: no action_mask, split"),
        (line(mask=(True,)), "line 2: 3 token_ids and 1 entries"),
        (line(ids=(), mask=()), "line 2: 0 token_ids"),
    ],
)
def test_a_bad_line_is_named(bad, said, tmp_path):
    (tmp_path / "r.jsonl").write_text(line() + "\n" + bad + "\n")
    with pytest.raises(RolloutsError, match=said):
        read_rollouts(tmp_path / "r.jsonl")


def test_no_file(tmp_path):
    with pytest.raises(RolloutsError, match="run the rl stage"):
        read_rollouts(tmp_path / "r.jsonl")


def test_take_leaves_out_what_does_not_fit():
    rollouts = {"parity": [RolloutTokens((1,) * n, (True,) * n) for n in (3, 9, 4, 5)]}
    assert [len(r.token_ids) for r in take(rollouts, "parity", 2, 5)] == [3, 4]
    with pytest.raises(RolloutsError, match="at most 2 tokens"):
        take(rollouts, "parity", 2, 2)
    with pytest.raises(RolloutsError, match="'imatrix'"):
        take(rollouts, "imatrix", 2, 9)
