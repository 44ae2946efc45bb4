"""Everything of the loop that a checkpoint keeps, in one place."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from configs.schema.rl import RLConfig
from tasks.rl.checkpoint import Saved
from tasks.rl.controllers import AdaptiveKlController, PublishInterval, WeightAlarm
from tasks.rl.divergence import DivergenceFlag
from tasks.rl.ledger import CostLedger
from tasks.rl.loop_metrics import CycleMeter
from tasks.rl.prompt_queue import PromptQueue
from tasks.rl.sentinel import RewardSentinel
from tasks.rl.types import Group


@dataclass(frozen=True)
class TrainedBatch:
    """What one optimiser step trained on."""

    step: int
    row_ids: list[str]
    """Of each group."""
    tickets: list[int]
    """Serial number of each group's ticket; no number comes twice in a run."""


class LoopState:
    """Queue, controllers, sentinel, meter and ledger of one run, over all its attempts."""

    def __init__(self, config: RLConfig, queue: PromptQueue, slots: list[str]) -> None:
        self.queue = queue
        self.interval = PublishInterval(config.publish)
        self.kl = (
            AdaptiveKlController(config.kl.adaptive, config.kl.coefficient)
            if config.kl.adaptive
            else None
        )
        self._fixed_kl_coefficient = config.kl.coefficient
        self.sentinel = RewardSentinel(config.sentinel)
        self.alarm = WeightAlarm(config.weight_alarm)
        self.divergence = DivergenceFlag()
        self.meter = CycleMeter()
        self.ledger = CostLedger(slots, usd_per_device_hour=0.0)
        self.attempt = 0
        self.learner_version = 0
        self.trained: list[TrainedBatch] = []
        """For every optimiser step, the rows whose groups it trained on."""

    @property
    def kl_coefficient(self) -> float:
        """β now."""
        return self.kl.coefficient if self.kl else self._fixed_kl_coefficient

    def state_dict(self, wall_s: float, buffered: Sequence[Group]) -> dict[str, Any]:
        """JSON-able state at `wall_s` into this attempt, whose buffer holds `buffered`."""
        return {
            "queue": self.queue.state_dict(),
            "buffered": [int(group.group_id) for group in buffered],
            "interval": self.interval.state_dict(),
            "kl": self.kl.state_dict() if self.kl else None,
            "sentinel": self.sentinel.state_dict(),
            "alarm": self.alarm.state_dict(),
            "divergence": self.divergence.state_dict(),
            "meter": self.meter.state_dict(),
            "ledger": self.ledger.to_json(wall_s),
            "trained": [asdict(batch) for batch in self.trained],
        }

    def resume(self, saved: Saved) -> None:
        """Go on from a checkpoint as a new attempt. Samples of the dead attempt that were not in
        its buffer are gone; their prompts are dispatched again."""
        state: Mapping[str, Any] = saved.loop
        self.attempt = max(self.attempt, saved.attempt + 1)
        self.learner_version = saved.step
        self.queue.load_state(state["queue"], state["buffered"])
        self.interval.load_state(state["interval"])
        if self.kl and state["kl"]:
            self.kl.load_state(state["kl"])
        self.sentinel.load_state(state["sentinel"])
        self.alarm.load_state(state["alarm"])
        self.divergence.load_state(state["divergence"])
        self.meter.load_state(state["meter"])
        self.ledger = CostLedger.from_json(state["ledger"])
        self.trained = [TrainedBatch(**batch) for batch in state["trained"]]
