"""The two rules that bound staleness, in optimiser steps; pure.

η is the staleness limit, p how many steps the published policy is behind the learner, B the samples
an optimiser step trains on. A sample admitted now was sampled by learner step v − p. With at most
(η − p + 1)·B samples running, buffered or in training, it is trained on η − p steps from now at the
latest, when first in is first out, so at age η. Other orders, and episodes slower than their batch,
may leave a sample behind: the second rule drops it. η = 0 with a publish each step is the
synchronous trainer.
"""


class FutureSampleError(ValueError):
    """A sample claims weights the learner has not made yet: it belongs to another attempt."""

    def __init__(self, oldest_step: int, learner_version: int) -> None:
        super().__init__(oldest_step, learner_version)
        self.oldest_step, self.learner_version = oldest_step, learner_version

    def __str__(self) -> str:
        return (
            f"a sample of policy step {self.oldest_step} meets a learner at step "
            f"{self.learner_version}; expected a step no newer than the learner: discard samples "
            "of dead attempts on resume and reissue their prompts"
        )


def capacity(
    staleness_limit: int,
    publish_lag_steps: int,
    batch_size: int,
    running: int,
    buffered: int,
    steps_per_batch: int = 1,
) -> int:
    """How many more samples may start: running + buffered ≤ (⌊(η − p)/u⌋ + 1)·B; never below 0.

    With one optimiser step per batch (u = 1) that is (η − p + 1)·B.

    Args:
        publish_lag_steps: p = learner_version − step of the policy that would sample.
        running: samples admitted and not finished.
        buffered: finished samples not yet trained on, the batch in training included until its
            step is done: without it one batch too many starts during every step, only to be
            dropped as too old. What was dropped, filtered or evicted is in neither count and so
            gives its place back.
        steps_per_batch: u, optimiser steps a batch is trained on for: each ages what waits by one.
    """
    if publish_lag_steps < 0:
        raise ValueError(
            f"publish_lag_steps={publish_lag_steps}: the published policy is newer than the "
            "learner; expected 0 or more"
        )
    batches = (staleness_limit - publish_lag_steps) // steps_per_batch + 1
    return max(0, batches * batch_size - running - buffered)


def staleness_steps(oldest_step: int, learner_version: int) -> int:
    """Age of a sample's oldest token in optimiser steps.

    Raises:
        FutureSampleError: the sample is newer than the learner.
    """
    if oldest_step > learner_version:
        raise FutureSampleError(oldest_step, learner_version)
    return learner_version - oldest_step


def too_old(oldest_step: int, learner_version: int, staleness_limit: int) -> bool:
    """True = drop, count and reissue: the next optimiser step must not train on it."""
    return staleness_steps(oldest_step, learner_version) > staleness_limit


def fresh_lr_scale(fresh_share: float, floor: float) -> float:
    """What the learning rate is multiplied by when less than `floor` of a batch is fresh."""
    return 1.0 if fresh_share >= floor else fresh_share / floor
