"""Charts: scales worked out by hand, gaps for what is unknown."""

import math
import re

import pytest

from flows.report.charts import (
    Bar,
    Part,
    Series,
    interval_bars,
    line_chart,
    moving_mean,
    nice_ticks,
    stacked_bar,
    thinned,
)


@pytest.mark.parametrize(
    ("low", "high", "ticks"),
    [
        (0, 1, [0, 0.25, 0.5, 0.75, 1]),
        (0.13, 0.87, [0, 0.2, 0.4, 0.6, 0.8, 1.0]),
        (0, 97, [0, 25, 50, 75, 100]),
        (5, 5, [4.5, 4.75, 5.0, 5.25, 5.5]),
        (0, 0, [-1, -0.5, 0, 0.5, 1]),
        (-3, 4, [-4, -2, 0, 2, 4]),
    ],
)
def test_ticks_are_round_and_cover(low, high, ticks):
    assert nice_ticks(low, high) == pytest.approx(ticks)


def test_unknown_values_break_the_line():
    points = ((0, 1.0), (1, 2.0), (2, None), (3, math.nan), (4, 3.0), (5, 1.0))
    drawn = str(line_chart("k", "t", [Series("a", points)]))
    path = re.search(r'class="line s0" d="([^"]*)"', drawn)[1]
    assert path.count("M") == 2
    assert path.count("L") == 2


def test_a_point_alone_is_still_drawn():
    drawn = str(line_chart("k", "t", [Series("a", ((0, 1.0), (1, None), (2, 2.0)))]))
    assert re.search(r'class="line s0" d="([^"]*)"', drawn)[1].count("h0.01") == 2


def test_one_step_and_one_value():
    drawn = str(line_chart("k", "t", [Series("a", ((7, 0.5),))]))
    assert "step 7" in drawn
    assert "nan" not in drawn


def test_nothing_known_draws_nothing():
    assert line_chart("k", "t", [Series("a", ((0, None), (1, math.inf)))]) == ""
    assert line_chart("k", "t", []) == ""
    assert stacked_bar("k", "t", [Part("a", 0.0, 0)], "s") == ""
    assert interval_bars("k", "t", []) == ""


def test_ends_of_the_scale():
    drawn = str(line_chart("k", "t", [Series("a", ((0, 0.0), (10, 1.0)))]))
    # 46 … 366 wide, 172 … 12 high
    assert 'd="M46 172 L366 12"' in drawn


def test_chart_says_in_words_what_it_shows():
    drawn = str(line_chart("k", "Reward", [Series("mean", ((1, 0.5), (2, 0.25)))]))
    assert '<title id="k-t">Reward</title>' in drawn
    assert "mean: first 0.5, last 0.25, lowest 0.25, highest 0.5." in drawn


def test_thinning_means_runs_and_keeps_unknown_runs():
    points = [(float(i), float(i)) for i in range(4)] + [(4.0, None), (5.0, None)]
    assert thinned(points, 3) == [(0.5, 0.5), (2.5, 2.5), (4.5, None)]
    assert thinned(points, 6) == points
    assert thinned([], 3) == []


def test_moving_mean_skips_unknown_values():
    points = [(0, 1.0), (1, None), (2, 3.0), (3, 5.0)]
    assert moving_mean(points, 3) == [(0, 1.0), (1, None), (2, 4.0), (3, 4.0)]


def test_bars_place_value_and_whisker():
    drawn = str(interval_bars("k", "t", [("easy", [Bar("after", 0.5, 0.4, 0.6)])]))
    # 78 + 422 · share
    assert 'width="211.0"' in drawn
    assert "M246.8 20.5H331.2" in drawn
    assert "easy, after: 50.0 % (95 % interval 40.0 to 60.0 %)." in drawn


def test_unknown_bar_is_said_and_not_drawn():
    drawn = str(interval_bars("k", "t", [("easy", [Bar("before", None)])]))
    assert "before: not measured" in drawn
    assert 'class="bar' not in drawn


def test_labels_are_escaped():
    hostile = '"><script>x</script>'
    drawn = str(line_chart("k", hostile, [Series(hostile, ((0, 1.0), (1, 2.0)))]))
    drawn += str(interval_bars("k", hostile, [(hostile, [Bar(hostile, 0.5, 0.4, 0.6)])]))
    drawn += str(interval_bars("k", hostile, [(hostile, [Bar(hostile, None)])]))
    drawn += str(stacked_bar("k", hostile, [Part(hostile, 1.0, 0)], hostile))
    assert "<script" not in drawn


def test_segments_share_the_whole():
    drawn = str(stacked_bar("k", "t", [Part("a", 3.0, 0), Part("b", 1.0, 1)], "s"))
    assert 'x="0.0" y="0" width="750.0"' in drawn
    assert 'x="750.0" y="0" width="250.0"' in drawn
    assert "a: 3 s (75.0 %)." in drawn
