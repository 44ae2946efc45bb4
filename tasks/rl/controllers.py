"""Controllers of the loop as pure state machines: no clock, no I/O, no randomness.

Each gives its state as JSON-able `state_dict()` and takes it back with `load_state()`, so that a
resumed run controls on as if it had never stopped.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from configs.schema.rl import AdaptiveKl, Anneal, PublishSchedule
from configs.schema.rl_losses import ClipWidening, Loss, WeightAlarmConfig
from tasks.rl.losses import scaled


def linear_anneal(config: Anneal | PublishSchedule | AdaptiveKl | ClipWidening, step: int) -> float:
    """The value at optimiser step `step`: `start` until 0, `end` from `over_steps` on."""
    start, end = (
        (config.target_start, config.target_end)
        if isinstance(config, AdaptiveKl)
        else (config.start, config.end)
    )
    done = min(max(step / config.over_steps, 0.0), 1.0)
    return end if done == 1.0 else start + (end - start) * done


def loss_at(config: Loss, step: int, tightness: float = 1.0) -> Loss:
    """The loss with its bounds as they stand at optimiser step `step`, times `tightness`."""
    width = 1.0 if config.widening is None else linear_anneal(config.widening, step)
    return scaled(config, width * tightness)


class PublishInterval:
    """Says when the learner's weights go to the samplers: every N steps, N annealed."""

    def __init__(self, schedule: PublishSchedule) -> None:
        self._schedule = schedule
        self._last_published = 0

    def interval(self, step: int) -> int:
        """N at this step, a whole number between `start` and `end`."""
        return round(linear_anneal(self._schedule, step))

    def due(self, step: int, divisor: int = 1) -> bool:
        """True = N / `divisor` or more optimiser steps lie between the last publish and `step`."""
        return step - self._last_published >= max(1, self.interval(step) // divisor)

    def published(self, step: int) -> None:
        """Note that the weights after `step` optimiser steps are out."""
        self._last_published = step

    def lag(self, step: int) -> int:
        """Optimiser steps the published policy is behind the learner."""
        return step - self._last_published

    def state_dict(self) -> dict[str, Any]:
        """JSON-able state."""
        return {"last_published": self._last_published}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Take back what `state_dict` gave."""
        self._last_published = int(state["last_published"])


class AdaptiveKlController:
    """Moves β so that KL stays in a band around a target (after arXiv 1909.08593, section 2.2).

    Inside the band, |KL/target − 1| ≤ `band`, β rests. Outside,
    β ← β (1 + clip(KL/target − 1, ±0.2) · n / horizon). The target falls linearly, and the band, a
    share of it, narrows along. A KL that is not finite moves nothing and is counted.
    """

    MAX_ERROR = 0.2

    def __init__(self, config: AdaptiveKl, coefficient: float) -> None:
        """`coefficient`: β to start from, brought into the configured bounds."""
        self._config = config
        self._coefficient = self._bounded(coefficient)
        self._unknown = 0

    @property
    def coefficient(self) -> float:
        """β now."""
        return self._coefficient

    @property
    def unknown(self) -> int:
        """How many KL values were NaN or infinite so far."""
        return self._unknown

    def band(self, step: int) -> tuple[float, float]:
        """Lowest and highest KL, in nats per token, at which β rests."""
        target = linear_anneal(self._config, step)
        return target * (1 - self._config.band), target * (1 + self._config.band)

    def update(self, kl: float, step: int, n: float = 1.0) -> float:
        """Take the KL of step `step`, `n` optimiser steps after the last; return the new β."""
        if not math.isfinite(kl):
            self._unknown += 1
            return self._coefficient
        low, high = self.band(step)
        if low <= kl <= high:
            return self._coefficient
        error = kl / linear_anneal(self._config, step) - 1
        error = min(max(error, -self.MAX_ERROR), self.MAX_ERROR)
        self._coefficient = self._bounded(
            self._coefficient * (1 + error * n / self._config.horizon)
        )
        return self._coefficient

    def state_dict(self) -> dict[str, Any]:
        """JSON-able state."""
        return {"coefficient": self._coefficient, "unknown": self._unknown}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Take back what `state_dict` gave."""
        self._coefficient = float(state["coefficient"])
        self._unknown = int(state["unknown"])

    def _bounded(self, coefficient: float) -> float:
        return min(max(coefficient, self._config.min_coefficient), self._config.max_coefficient)


class Remedy(str, Enum):
    """What helps against large importance weights, in the order to try it."""

    PUBLISH_MORE_OFTEN = "publish_more_often"
    SMALLER_BUFFER = "smaller_buffer"
    TIGHTER_CLIP = "tighter_clip"


@dataclass(frozen=True)
class WeightAdvice:
    """One alarm: at `step` the largest weight was `largest_weight`; `remedy` helps."""

    step: int
    largest_weight: float
    threshold: float
    remedy: Remedy
    applied: bool
    """Whether the run does so from here on; else it is only said."""


class WeightAlarm:
    """Alarms when the largest importance weight π_θ/μ passes a threshold; advises, or acts.

    Each alarm names the next remedy in order, the last one again and again; a cooldown between two
    alarms lets a remedy act. After two cooldowns without a large weight the order starts anew.
    Whoever controls the thing a remedy is about reads it here: `publish_divisor`, `waits_less`,
    `tightness`. A weight of NaN is the non-finite guard's business, not this one's.
    """

    def __init__(self, config: WeightAlarmConfig) -> None:
        self._config = config
        self._next_remedy = 0
        self._last_alarm: int | None = None
        self._last_large: int | None = None
        self._applied = dict.fromkeys(Remedy, 0)

    @property
    def publish_divisor(self) -> int:
        """The publish interval is divided by this."""
        return int(2 ** self._applied[Remedy.PUBLISH_MORE_OFTEN])

    @property
    def tightness(self) -> float:
        """The bounds of the loss are multiplied by this."""
        return float(0.5 ** self._applied[Remedy.TIGHTER_CLIP])

    def admission_limit(self, staleness_limit: int, publish_lag_steps: int) -> int:
        """η as admission sees it: a step less for each smaller buffer, but never below the lag of
        the published policy, where not one batch could be admitted and the run would stand."""
        smaller = staleness_limit - self._applied[Remedy.SMALLER_BUFFER]
        return max(smaller, min(publish_lag_steps, staleness_limit))

    def observe(self, step: int, largest_weight: float) -> WeightAdvice | None:
        """Take the largest weight of a step; return advice, or None where all is well."""
        config = self._config
        if not largest_weight > config.threshold:
            return None
        cooldown = config.cooldown_steps
        if self._last_large is not None and step - self._last_large > 2 * cooldown:
            self._next_remedy = 0
        self._last_large = step
        if self._last_alarm is not None and step - self._last_alarm < cooldown:
            return None
        remedies = list(Remedy)
        remedy = remedies[self._next_remedy]
        applied = config.act and self._applied[remedy] < config.budget
        self._applied[remedy] += applied
        self._next_remedy = min(self._next_remedy + 1, len(remedies) - 1)
        self._last_alarm = step
        return WeightAdvice(step, largest_weight, config.threshold, remedy, applied)

    def state_dict(self) -> dict[str, Any]:
        """JSON-able state."""
        return {
            "next_remedy": self._next_remedy,
            "last_alarm": self._last_alarm,
            "last_large": self._last_large,
            "applied": {remedy.value: count for remedy, count in self._applied.items()},
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Take back what `state_dict` gave."""
        self._next_remedy = int(state["next_remedy"])
        self._last_alarm = state["last_alarm"]
        self._last_large = state["last_large"]
        self._applied = {remedy: int(state["applied"][remedy.value]) for remedy in Remedy}
