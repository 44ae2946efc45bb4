"""Effective samples: how much learning the trained samples were worth.

effective = samples with a non-zero advantage × share of their tokens that masks and clips keep ×
ESS share of the *raw* sequence weights, ESS = (Σw)² / (n Σw²) (Kish, "Survey Sampling", 1965).

ESS alone would mislead: clipping pulls weights together, so the ESS of *clipped* weights rises
the tighter the clip, as if throwing signal away were progress. Taken from raw weights it does not
depend on the clip, while the kept-token share falls with it; so a tighter clip shows as fewer
effective samples, and a dearer one each.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass


class ShareError(ValueError):
    """A share is not a number between 0 and 1, or a count is negative."""


@dataclass(frozen=True)
class EffectiveSamples:
    """The three factors of one optimiser step, and their product `value`."""

    nonzero_advantage_samples: int
    kept_token_share: float
    ess_share: float

    def __post_init__(self) -> None:
        if self.nonzero_advantage_samples < 0:
            raise ShareError(
                f"nonzero_advantage_samples={self.nonzero_advantage_samples}: expected 0 or more"
            )
        for name in ("kept_token_share", "ess_share"):
            share = getattr(self, name)
            # Sums in float32 may end a rounding error above 1; NaN fails this comparison too.
            if not 0 <= share <= 1 + 1e-6:
                raise ShareError(
                    f"{name}={share}: expected between 0 and 1; a step skipped for non-finite "
                    "gradients has no effective samples and is not counted here"
                )

    @property
    def value(self) -> float:
        """Effective samples."""
        return self.nonzero_advantage_samples * self.kept_token_share * self.ess_share


def ess_share(log_weights: Sequence[float]) -> float | None:
    """(Σw)² / (n Σw²) of w = exp(log_weights); scale-free and safe from overflow.

    1 where all weights are equal, 1/n where one outweighs the rest, None without samples.
    """
    if not log_weights:
        return None
    largest = max(log_weights)
    weights = [math.exp(w - largest) for w in log_weights]
    return math.fsum(weights) ** 2 / (len(weights) * math.fsum(w * w for w in weights))
