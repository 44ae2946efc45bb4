"""Interval of a single accuracy. Differences are paired: see `tasks.artifacts.bootstrap`."""

import math

Z_95 = 1.959963984540054


def wilson_interval(share: float, n: int, z: float = Z_95) -> tuple[float, float]:
    """Wilson's score interval of a share over `n` problems (Wilson 1927).

    Unlike a bootstrap it does not shrink to a point at 0 and 1. With several samples of each
    problem `share` is the mean over them while `n` stays the number of problems: a problem's
    mean never varies more than one answer does, so the interval is, if anything, too wide.

    Raises:
        ValueError: a share outside [0, 1] or not finite, or n below 1.
    """
    if n < 1 or not 0 <= share <= 1:
        raise ValueError(f"share={share!r} of n={n!r}; expected a share in [0, 1] of n ≥ 1")
    centre = share + z * z / (2 * n)
    half = z * math.sqrt(share * (1 - share) / n + z * z / (4 * n * n))
    scale = 1 + z * z / n
    return max(0.0, (centre - half) / scale), min(1.0, (centre + half) / scale)
