"""Wilson's interval against values worked out by hand."""

import pytest

from tasks.evaluation.intervals import wilson_interval


def test_half_of_hundred():
    # z² = 3.8415; centre .5 + .019207, half 1.96 * sqrt(.0025 + .000096), over 1.038415
    assert wilson_interval(0.5, 100) == pytest.approx((0.40383, 0.59617), abs=1e-5)


@pytest.mark.parametrize(("share", "n", "wanted"), [(0.0, 10, (0, 0.27753)), (1, 10, (0.72247, 1))])
def test_never_a_point_at_the_ends(share, n, wanted):
    assert wilson_interval(share, n) == pytest.approx(wanted, abs=1e-5)


@pytest.mark.parametrize(("share", "n"), [(0.5, 0), (1.1, 5), (-0.1, 5), (float("nan"), 5)])
def test_refuses_what_is_no_share(share, n):
    with pytest.raises(ValueError, match="expected a share"):
        wilson_interval(share, n)
