"""The staleness rules, by hand and in a discrete-event model of the whole loop."""

import heapq
import pickle
import random
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from configs.schema.rl import PublishSchedule
from tasks.rl.controllers import PublishInterval
from tasks.rl.staleness import (
    FutureSampleError,
    capacity,
    fresh_lr_scale,
    staleness_steps,
    too_old,
)


@pytest.mark.parametrize(
    ("limit", "lag", "running", "buffered", "room"),
    [
        (0, 0, 0, 0, 8),  # (0 − 0 + 1)·8: one batch, the synchronous trainer
        (0, 0, 8, 0, 0),
        (0, 1, 0, 0, 0),  # a policy one step behind may not sample for η = 0
        (2, 0, 8, 8, 8),  # 3·8 − 16
        (2, 1, 8, 8, 0),  # 2·8 − 16
        (2, 3, 0, 0, 0),
        (2, 9, 0, 0, 0),  # never below 0
        (2, 0, 40, 0, 0),
        (4, 1, 3, 5, 24),  # 4·8 − 8
    ],
)
def test_capacity_by_hand(limit, lag, running, buffered, room):
    assert capacity(limit, lag, 8, running, buffered) == room


@pytest.mark.parametrize(
    ("limit", "lag", "updates", "room"),
    [
        (0, 0, 4, 8),  # one batch, whatever it is trained on for
        (1, 0, 2, 8),  # a second batch would be two steps old after the first
        (2, 0, 2, 16),  # (⌊2/2⌋ + 1)·8
        (4, 1, 2, 16),  # (⌊3/2⌋ + 1)·8
        (4, 5, 2, 0),
    ],
)
def test_several_steps_on_a_batch_age_what_waits(limit, lag, updates, room):
    assert capacity(limit, lag, 8, 0, 0, steps_per_batch=updates) == room


@pytest.mark.parametrize(
    ("share", "floor", "scale"),
    [(0.25, 0.5, 0.5), (0.5, 0.5, 1.0), (1.0, 0.5, 1.0), (0.0, 0.5, 0.0), (0.0, 0.0, 1.0)],
)
def test_a_batch_with_too_little_fresh_in_it_moves_the_weights_less(share, floor, scale):
    assert fresh_lr_scale(share, floor) == scale


def test_capacity_refuses_a_policy_from_the_future():
    with pytest.raises(ValueError, match="publish_lag_steps=-1"):
        capacity(2, -1, 8, 0, 0)


@pytest.mark.parametrize(
    ("oldest", "learner", "limit", "drop"),
    [(5, 5, 0, False), (4, 5, 0, True), (3, 5, 2, False), (2, 5, 2, True), (0, 0, 0, False)],
)
def test_too_old_by_hand(oldest, learner, limit, drop):
    assert too_old(oldest, learner, limit) is drop
    assert staleness_steps(oldest, learner) == learner - oldest


def test_a_sample_newer_than_the_learner_is_an_error():
    with pytest.raises(FutureSampleError, match="policy step 6") as caught:
        too_old(6, 5, 9)
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


@dataclass
class Outcome:
    """What a simulated run did."""

    steps: int
    ages: list[int]
    dropped: int
    most_in_flight: int


class Loop:
    """A discrete-event model of the loop: groups take random time, a step takes its own, and the
    learner, the generator and the filter act by the rules under test and no others."""

    counts_batch_in_training = True

    def __init__(self, limit, groups_per_batch, group_size, publish, filter_rate, freshest, seed):
        self.limit, self.group_size, self.freshest = limit, group_size, freshest
        self.batch_size = groups_per_batch * group_size
        self.filter_rate, self.random = filter_rate, random.Random(seed)
        self.publish = PublishInterval(publish)
        self.version = self.published = 0
        self.running = 0
        self.buffer: list[tuple[int, int]] = []  # (policy step, order of arrival), one a group
        self.events: list[tuple[float, int, str, int]] = []
        self.now, self.serial, self.training = 0.0, 0, False
        self.outcome = Outcome(0, [], 0, 0)

    def run(self, steps, deadline=20_000):
        """Until `steps` optimiser steps, or nothing is left that could ever happen."""
        self._act()
        while self.events and self.outcome.steps < steps and deadline:
            deadline -= 1
            self.now, _, kind, policy_step = heapq.heappop(self.events)
            if kind == "group":
                self.running -= self.group_size
                if self.random.random() >= self.filter_rate:
                    self.serial += 1
                    self.buffer.append((policy_step, self.serial))
            else:
                self._stepped()
            self._act()
        return self.outcome

    def _stepped(self):
        self.training = False
        self.version += 1
        self.outcome.steps += 1
        if self.publish.due(self.version):
            self.publish.published(self.version)
            self.published = self.version

    def _act(self):
        kept = [g for g in self.buffer if not too_old(g[0], self.version, self.limit)]
        self.outcome.dropped += len(self.buffer) - len(kept)
        self.buffer = kept
        needed = self.batch_size // self.group_size
        if not self.training and len(self.buffer) >= needed:
            self.buffer.sort(key=lambda g: (-g[0], g[1]) if self.freshest else g[1])
            batch, self.buffer = self.buffer[:needed], self.buffer[needed:]
            self.outcome.ages += [staleness_steps(step, self.version) for step, _ in batch]
            self.training = True
            self._schedule("step", 0, self.random.expovariate(1))
        in_training = self.batch_size * (self.training and self.counts_batch_in_training)
        buffered = len(self.buffer) * self.group_size + in_training
        lag = self.version - self.published
        room = capacity(self.limit, lag, self.batch_size, self.running, buffered)
        for _ in range(room // self.group_size):
            self.running += self.group_size
            # Heavy tail: some groups take many steps, so the drop rule has work to do.
            self._schedule("group", self.published, self.random.paretovariate(1.2) / 4)
        self.outcome.most_in_flight = max(self.outcome.most_in_flight, self.running + buffered)

    def _schedule(self, kind, policy_step, duration):
        self.serial += 1
        heapq.heappush(self.events, (self.now + duration, self.serial, kind, policy_step))


@st.composite
def loops(draw):
    """Any loop the config validator lets through: publish_every ≤ η + 1."""
    limit = draw(st.integers(0, 4))
    start, end = draw(st.integers(1, limit + 1)), draw(st.integers(1, limit + 1))
    return Loop(
        limit=limit,
        groups_per_batch=draw(st.integers(1, 5)),
        group_size=draw(st.integers(1, 4)),
        publish=PublishSchedule(start=start, end=end, over_steps=draw(st.integers(1, 20))),
        filter_rate=draw(st.sampled_from([0.0, 0.3, 0.7])),
        freshest=draw(st.booleans()),
        seed=draw(st.integers(0, 2**32)),
    )


@settings(max_examples=150, deadline=None)
@given(loops())
def test_no_sample_is_older_than_the_limit_and_the_loop_never_starves(loop):
    outcome = loop.run(steps=25)
    assert outcome.steps == 25
    assert max(outcome.ages) <= loop.limit
    assert outcome.most_in_flight <= (loop.limit + 1) * loop.batch_size


class SteadyLoop(Loop):
    """Quick episodes of equal length: none overtakes another."""

    def _schedule(self, kind, policy_step, duration):
        super()._schedule(kind, policy_step, 1.0 if kind == "step" else 0.01)


@pytest.mark.parametrize("limit", [0, 1, 3])
@pytest.mark.parametrize("filter_rate", [0.0, 0.3])
def test_first_in_first_out_reaches_the_limit_and_drops_nothing(limit, filter_rate):
    # With episodes that overtake nobody the admission rule alone bounds the age.
    loop = SteadyLoop(limit, 4, 2, PublishSchedule(), filter_rate, False, 0)
    outcome = loop.run(steps=40)
    assert (outcome.steps, outcome.dropped, max(outcome.ages)) == (40, 0, limit)


@pytest.mark.parametrize("limit", [0, 1, 3])
def test_the_batch_in_training_counts_or_samples_are_made_to_be_dropped(limit):
    loop = SteadyLoop(limit, 4, 2, PublishSchedule(), 0.0, False, 0)
    loop.counts_batch_in_training = False
    outcome = loop.run(steps=40)
    assert max(outcome.ages) <= limit  # the second rule still holds
    assert outcome.dropped > 0


def test_limit_zero_is_synchronous():
    loop = Loop(0, 4, 2, PublishSchedule(), 0.3, True, 0)
    outcome = loop.run(steps=30)
    assert (outcome.steps, set(outcome.ages), outcome.dropped) == (30, {0}, 0)
    assert outcome.most_in_flight == loop.batch_size


@pytest.mark.parametrize("limit", [0, 1, 3])
def test_publishing_more_rarely_than_the_limit_allows_starves(limit):
    # What the config validator refuses: with publish_every = η + 2 the policy is η + 1 behind, no
    # sample may start, no step follows, nothing is ever published again.
    every = PublishSchedule(start=limit + 2, end=limit + 2)
    outcome = Loop(limit, 4, 2, every, 0.0, True, 0).run(steps=40)
    assert outcome.steps == limit + 1
