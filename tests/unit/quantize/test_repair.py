"""The search on made-up tensors whose costs are known: which are raised, in what order, how far."""

import pytest

from quantize.errors import RepairError
from quantize.repair import (
    Group,
    Limits,
    Raise,
    Rung,
    affordable,
    mix_of,
    neighbours,
    raise_order,
    runs_within,
    search,
)


def group(name, harm, *rungs, count=1):
    """`rungs` are (type, bytes, share of the error left)."""
    members = tuple(f"{name}{i}" if count > 1 else name for i in range(count))
    made = tuple(Rung((kind,) * count, size, left) for kind, size, left in rungs)
    return Group(members, harm, made)


# harm per byte: a 0.4/100 = 4e-3 to q4, then 0.1/100 to q8; b 0.2/100; c nothing to gain
A = group("a", 0.5, ("q2", 100, 1.0), ("q4", 200, 0.2), ("q8", 300, 0.0))
B = group("b", 0.2, ("q2", 100, 1.0), ("q8", 200, 0.0))
C = group("c", -0.01, ("q2", 100, 1.0), ("q8", 200, 0.0))


class Additive:
    """Rejects while the KL that is left is above the gate; counts what it is asked."""

    def __init__(self, groups, gate, also=None):
        self.groups, self.gate, self.also = groups, gate, also
        self.asked = []

    def left(self, mix):
        total = 0.0
        for one in self.groups:
            at = next((r for r in one.rungs if r.types[0] == mix.get(one.tensors[0])), one.rungs[0])
            total += one.harm * at.left
        return total

    def problem(self, mix):
        self.asked.append(dict(mix))
        if self.left(mix) > self.gate + 1e-12:
            return f"KL {self.left(mix):.2f}"
        return self.also(mix) if self.also else None


def limits(ceiling=10_000, tensors=99, time=lambda: False):
    return Limits(ceiling, tensors, time)


def test_raises_come_by_kl_per_byte_and_useless_ones_not_at_all():
    order = raise_order([A, B, C])
    assert [(r.group, r.rung, r.added_bytes) for r in order] == [
        (0, 1, 100),
        (1, 1, 100),
        (0, 2, 100),
    ]
    assert [r.gain for r in order] == pytest.approx([0.4, 0.2, 0.1])


def test_a_rung_below_the_hull_is_skipped():
    """q5 costs as much per byte as q8 brings twice over: one goes to q8 at once."""
    one = group("a", 1.0, ("q2", 100, 1.0), ("q5", 190, 0.9), ("q8", 200, 0.0))
    assert [(r.rung, r.added_bytes) for r in raise_order([one])] == [(2, 100)]


def test_a_rung_that_is_worse_than_as_quantised_is_no_raise():
    one = group("a", 1.0, ("q2", 100, 1.0), ("q5", 150, 1.3))
    assert raise_order([one]) == []


def test_no_groups_no_raises():
    assert raise_order([]) == [] and mix_of([], []) == {}


def test_the_largest_rung_of_a_group_counts_in_any_order():
    steps = raise_order([A, B])
    assert mix_of([A, B], steps) == mix_of([A, B], steps[::-1]) == {"a": "q8", "b": "q8"}
    assert mix_of([A, B], steps[:1]) == {"a": "q4"}


def test_a_tensor_of_a_group_that_does_not_change_is_not_named():
    """Two tensors, one of which already has the larger type."""
    mixed = Group(("x", "y"), 1.0, (Rung(("q2", "q8"), 300, 1.0), Rung(("q8", "q8"), 400, 0.0)))
    assert mix_of([mixed], raise_order([mixed])) == {"x": "q8"}


@pytest.mark.parametrize(
    ("gate", "mix"),
    [
        (0.69, {"a": "q4"}),  # 0.1 + 0.2 = 0.3 is left
        (0.30, {"a": "q4"}),
        (0.29, {"a": "q4", "b": "q8"}),
        (0.05, {"a": "q8", "b": "q8"}),
    ],
)
def test_the_cheapest_passing_mix_is_found(gate, mix):
    found = search([A, B], 200, "Q4", Additive([A, B], gate), limits())
    assert found.mix == mix


def test_what_turns_out_not_to_be_needed_is_taken_back():
    """The dear tensor comes first by expectation; measured, the cheap second one does it alone."""
    dear = group("dear", 0.9, ("q2", 100, 1.0), ("q8", 200, 0.0))
    cheap = group("cheap", 0.3, ("q2", 100, 1.0), ("q8", 140, 0.0))

    class OnlyCheap:
        def problem(self, mix):
            return None if "cheap" in mix else "no"

    found = search([dear, cheap], 200, "Q4", OnlyCheap(), limits())
    assert found.mix == {"cheap": "q8"} and found.why == "1 tensor raised"


def test_nothing_under_the_next_larger_type_passes():
    judge = Additive([A, B], gate=0.0)
    found = search([A, B], 200, "Q4_K_M", judge, limits(ceiling=401))  # a→q4 and b fit: 400
    assert found.mix is None
    assert "below the size of Q4_K_M (401 bytes)" in found.why
    assert found.why.endswith("KL 0.10")
    assert judge.asked[-1] == {"a": "q4", "b": "q8"}


def test_a_file_as_large_as_the_next_type_has_no_point():
    order = raise_order([A, B])
    assert len(affordable([A, B], order, 200, limits(ceiling=400))) == 1
    assert len(affordable([A, B], order, 200, limits(ceiling=401))) == 2


def test_a_raise_too_large_is_passed_over_and_so_is_what_stands_on_it():
    big = group("big", 9.0, ("q2", 100, 1.0), ("q4", 900, 0.2), ("q8", 1000, 0.0))
    kept = affordable([big, B], raise_order([big, B]), 200, limits(ceiling=500))
    assert kept == [Raise(1, 1, 100, pytest.approx(0.2))]


def test_at_most_so_many_tensors():
    three = group("t", 1.0, ("q2", 100, 1.0), ("q8", 130, 0.0), count=3)
    assert affordable([three], raise_order([three]), 100, limits(tensors=2)) == []
    found = search([three], 100, "Q4", Additive([three], 0.5), limits(tensors=2))
    assert found.mix is None and found.tried == 0 and "at most 2 tensors" in found.why
    assert len(search([three], 100, "Q4", Additive([three], 0.5), limits(tensors=3)).mix) == 3


def test_a_second_gate_counts_too():
    """KL passes with a alone; accuracy asks for b as well."""
    judge = Additive([A, B], 0.3, also=lambda mix: None if "b" in mix else "accuracy")
    assert search([A, B], 200, "Q4", judge, limits()).mix == {"a": "q4", "b": "q8"}


def test_no_mix_is_measured_twice():
    judge = Additive([A, B], 0.29)
    found = search([A, B], 200, "Q4", judge, limits())
    asked = [tuple(sorted(mix.items())) for mix in judge.asked]
    assert len(asked) == len(set(asked)) == found.tried


def test_time_runs_out_before_anything_passes():
    found = search([A, B], 200, "Q4", Additive([A, B], 0.0), limits(time=lambda: True))
    assert found.mix is None and found.tried == 0 and "time limit" in found.why


def test_time_runs_out_while_pruning_and_the_mix_found_is_kept():
    ticks = iter([False, False, True, True, True])
    found = search([A, B], 200, "Q4", Additive([A, B], 0.29), limits(time=lambda: next(ticks)))
    assert found.mix == {"a": "q4", "b": "q8"} and "stopped by the time limit" in found.why


NAMES = [f"blk.{i}.{kind}.weight" for i in range(4) for kind in ("attn_q", "ffn_up")]


def test_groups_hold_neighbouring_blocks_of_one_kind():
    names = ["token_embd.weight", *NAMES]
    assert neighbours(names, 9) == [
        *((f"blk.{i}.attn_q.weight",) for i in range(4)),
        *((f"blk.{i}.ffn_up.weight",) for i in range(4)),
        ("token_embd.weight",),
    ]
    assert neighbours(names, 5) == [
        ("blk.0.attn_q.weight", "blk.1.attn_q.weight"),
        ("blk.2.attn_q.weight", "blk.3.attn_q.weight"),
        ("blk.0.ffn_up.weight", "blk.1.ffn_up.weight"),
        ("blk.2.ffn_up.weight", "blk.3.ffn_up.weight"),
        ("token_embd.weight",),
    ]


def test_block_ten_follows_block_nine():
    names = [f"blk.{i}.ffn_up.weight" for i in (10, 9, 2, 1)]
    assert neighbours(names, 2) == [
        ("blk.1.ffn_up.weight", "blk.2.ffn_up.weight"),
        ("blk.9.ffn_up.weight", "blk.10.ffn_up.weight"),
    ]


def test_fewer_groups_than_kinds_is_an_error():
    with pytest.raises(RepairError, match="groups=1; expected at least 2"):
        neighbours(NAMES, 1)


def test_no_tensors_no_groups():
    assert neighbours([], 5) == []


def test_runs_that_fit_target_sizes_each_mix_once():
    """From 200 bytes: a→q4 makes 300, b→q8 400, a→q8 500."""
    assert runs_within([A, B], 200, [250, 300, 399, 400, 9999]) == [
        {"a": "q4"},
        {"a": "q4", "b": "q8"},
        {"a": "q8", "b": "q8"},
    ]
    assert runs_within([A, B], 200, []) == runs_within([], 200, [500]) == []
