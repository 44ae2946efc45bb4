"""Which file a wish picks, on points placed by hand; and what is said where none fits."""

import math
import pickle

import pytest

from quantize.errors import FrontierError
from quantize.frontier import Point, Wish, as_json, frontier, parse_size, pick, point_of
from tasks.artifacts.bootstrap import Interval


def point(name, size, kld, accuracy=None, half_width=0.01, ships=True):
    interval = (
        None
        if accuracy is None
        else Interval(accuracy, accuracy - half_width, min(1.0, accuracy + half_width))
    )
    return Point(name, size, 4.0, Interval(kld, kld / 2, kld * 2), interval, ships)


IQ2 = point("IQ2_M", 500_000, 2e-1, 0.90)
MIX = point("IQ2_M+2", 560_000, 5e-2, 0.95)
WASTE = point("IQ2_M+9", 790_000, 6e-2, 0.95)  # larger than the mix and further from F16
Q4 = point("Q4_K_M", 800_000, 1e-2, 0.97)
Q8 = point("Q8_0", 1_400_000, 1e-4, 0.985)
ALL = [Q8, WASTE, IQ2, Q4, MIX]


def test_the_frontier_leaves_out_what_a_smaller_file_beats():
    assert [p.name for p in frontier(ALL)] == ["IQ2_M", "IQ2_M+2", "Q4_K_M", "Q8_0"]
    assert frontier([]) == ()
    assert frontier([Q4]) == (Q4,)


def test_of_equal_sizes_the_nearer_and_of_equal_kl_the_smaller():
    twin = point("twin", 800_000, 9e-3)
    same_kl = point("same", 900_000, 9e-3)
    assert frontier([Q4, same_kl, twin]) == (twin,)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_kl_that_is_no_number_cannot_be_placed(value):
    broken = point("broken", 1, value)
    with pytest.raises(FrontierError, match="broken has a mean KL of"):
        frontier([Q4, broken])


@pytest.mark.parametrize(
    ("limit", "name"),
    [
        (500_000, "IQ2_M"),
        (559_999, "IQ2_M"),
        (560_000, "IQ2_M+2"),
        (795_000, "IQ2_M+2"),  # the larger WASTE fits too and is worse
        (10**9, "Q8_0"),
    ],
)
def test_by_size_the_nearest_to_f16_that_fits(limit, name):
    assert pick(ALL, Wish(size_bytes=limit)).point.name == name


def test_by_size_says_why_and_what_more_would_bring():
    why = pick(ALL, Wish(size_bytes=600_000)).why
    assert "of 2 files with at most 600,000 bytes" in why and "0.05 nats" in why
    assert "the next better, Q4_K_M, needs 800,000 bytes" in why
    assert "next better" not in pick(ALL, Wish(size_bytes=10**9)).why


def test_a_size_nothing_fits_names_the_smallest():
    with pytest.raises(FrontierError, match="at most 499,999 bytes; the smallest is IQ2_M"):
        pick(ALL, Wish(size_bytes=499_999))


@pytest.mark.parametrize(
    ("target", "name"),
    [(0.80, "IQ2_M"), (0.91, "IQ2_M+2"), (0.95, "Q4_K_M"), (0.97, "Q8_0")],
)
def test_by_accuracy_the_smallest_whose_interval_reaches_it(target, name):
    """IQ2_M+2 has 0.95 ± 0.01: for 0.95 itself that is not enough."""
    choice = pick(ALL, Wish(accuracy=target))
    assert choice.point.name == name and "whole 95 % interval" in choice.why


def test_an_accuracy_reached_by_value_only_asks_for_more_problems():
    with pytest.raises(FrontierError, match=r"best is Q8_0 with 0.9850 .*--problems"):
        pick(ALL, Wish(accuracy=0.98))


def test_an_accuracy_nothing_reaches():
    with pytest.raises(FrontierError, match="no file does"):
        pick(ALL, Wish(accuracy=0.999))


def test_accuracy_that_was_not_measured():
    with pytest.raises(FrontierError, match=r"not measured.*heldout.jsonl"):
        pick([point("Q8_0", 10, 1e-4)], Wish(accuracy=0.5))
    some = [point("Q8_0", 10, 1e-4), Q4]
    assert pick(some, Wish(accuracy=0.9)).point == Q4


def test_by_name():
    assert pick(ALL, Wish(name="Q4_K_M")).point == Q4
    with pytest.raises(FrontierError, match="--type Q2_K: not among"):
        pick(ALL, Wish(name="Q2_K"))


def test_no_points():
    with pytest.raises(FrontierError, match="no quantisation was made"):
        pick([], Wish(size_bytes=5))


@pytest.mark.parametrize(
    "wishes", [{}, {"size_bytes": 5, "name": "Q8_0"}, {"accuracy": 0.5, "name": "Q8_0"}]
)
def test_exactly_one_wish(wishes):
    with pytest.raises(FrontierError, match="exactly one of --target-size"):
        Wish(**wishes)


@pytest.mark.parametrize("accuracy", [0.0, -1.0, 1.01, 97.0, math.nan])
def test_an_accuracy_is_a_share(accuracy):
    with pytest.raises(FrontierError, match="expected a share"):
        Wish(accuracy=accuracy)


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("600KB", 600_000),
        ("600 kb", 600_000),
        ("1.5MiB", 1_572_864),
        ("2GB", 2_000_000_000),
        ("750000", 750_000),
        (" 1KiB ", 1024),
        ("7B", 7),
    ],
)
def test_sizes(text, size):
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "KB", "0", "-5KB", "1e6", "600 KBit", "NaN", "1,5MB"])
def test_what_is_no_size(text):
    with pytest.raises(FrontierError, match="--target-size"):
        parse_size(text)


def test_json_marks_the_frontier_and_the_pick():
    written = as_json(ALL, pick(ALL, Wish(size_bytes=600_000)))
    assert written["picked"]["name"] == "IQ2_M+2"
    assert {p["name"]: p["on_frontier"] for p in written["points"]} == {
        "Q8_0": True,
        "IQ2_M+9": False,
        "IQ2_M": True,
        "Q4_K_M": True,
        "IQ2_M+2": True,
    }
    assert as_json([])["points"] == [] and as_json([])["picked"] is None


ENTRY = {
    "size_bytes": 5,
    "bits_per_weight": 3.1,
    "kld_mean": 0.2,
    "kld_mean_ci95": [0.1, 0.3],
    "accuracy": 0.9,
    "accuracy_ci95": [0.8, 1.0],
    "ships": True,
    "repaired": {"of": "IQ2_M", "tensors": {"a": {"from": "IQ2_S", "to": "Q4_K"}}},
}


def test_a_point_from_parity_json():
    made = point_of("IQ2_M+1", ENTRY)
    assert made.raised == (("a", "Q4_K"),) and made.accuracy == Interval(0.9, 0.8, 1.0)
    assert point_of("x", ENTRY | {"accuracy": None}).accuracy is None
    assert point_of("x", ENTRY | {"ships": "yes"}).ships is None
    for missing in ("size_bytes", "kld_mean", "kld_mean_ci95"):
        with pytest.raises(FrontierError, match="too little about x"):
            point_of("x", {k: v for k, v in ENTRY.items() if k != missing})


def test_errors_survive_pickling():
    error = FrontierError("no file")
    assert str(pickle.loads(pickle.dumps(error))) == "no file"
