"""The ledger balances when every second is measured, and says so when one is not."""

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tasks.rl.ledger import (
    ClockOrderError,
    CostLedger,
    LedgerError,
    SampleFate,
    SlotClock,
    SlotState,
)


class FakeTime:
    """A clock that moves only when told to."""

    def __init__(self):
        self.now_s = 100.0

    def __call__(self):
        return self.now_s

    def pass_(self, seconds):
        """Let time pass."""
        self.now_s += seconds


@pytest.fixture
def time():
    return FakeTime()


def ledger_of(*slots, usd=3600.0):
    """A ledger where a device-second costs a dollar."""
    return CostLedger(slots, usd)


def test_measured_time_balances():
    ledger = ledger_of("learner", "sampler")
    ledger.add("learner", "train", 6)
    ledger.add("learner", "idle", 4)
    ledger.add("sampler", SlotState.ROLLOUT, 10)
    balance = ledger.balance(10)
    assert (balance.expected_s, balance.measured_s, balance.miss_share) == (20, 20, 0)
    assert balance.balanced


def test_x3_an_unlogged_pause_breaks_the_balance(time):
    ledger = ledger_of("learner")
    clock = SlotClock(ledger, "learner", time)
    with clock.state("train"):
        time.pass_(97)
    time.pass_(2)  # nobody's time
    with clock.state("idle"):
        time.pass_(1)
    balance = ledger.balance(100)
    assert not balance.balanced
    assert balance.miss_share == pytest.approx(0.02)
    assert balance.missing_s_by_slot == {"learner": pytest.approx(2)}
    assert "off by 2.00%, most in learner (+2.00 s missing)" in str(balance)


@pytest.mark.parametrize(
    ("measured", "balanced"), [(99.0, True), (98.9, False), (101.0, True), (102, False)]
)
def test_x3_tolerance_is_one_percent_either_way(measured, balanced):
    ledger = ledger_of("learner")
    ledger.add("learner", "train", measured)
    assert ledger.balance(100).balanced is balanced


def test_x3_time_counted_twice_in_one_slot_does_not_hide_a_pause_in_another():
    ledger = ledger_of("learner", "sampler")
    ledger.add("learner", "train", 110)
    ledger.add("sampler", "rollout", 90)
    balance = ledger.balance(100)
    assert balance.measured_s == balance.expected_s
    assert balance.miss_share == pytest.approx(0.1)
    assert not balance.balanced


def test_x3_a_slot_that_never_reported_is_missed():
    ledger = ledger_of("learner", "sampler")
    ledger.add("learner", "train", 100)
    assert ledger.balance(100).missing_s_by_slot == {"learner": 0, "sampler": 100}


def test_an_empty_run_balances_and_costs_nothing():
    ledger = ledger_of("learner")
    assert ledger.balance(0).balanced
    cost = ledger.cost()
    assert (cost.device_s, cost.usd, cost.usd_per_effective_sample) == (0, 0, None)
    assert (cost.dropped_share, cost.filtered_share) == (0, 0)


def test_time_measured_in_no_time_is_out_of_balance():
    ledger = ledger_of("learner")
    ledger.add("learner", "train", 1)
    assert not ledger.balance(0).balanced


@pytest.mark.parametrize("seconds", [-1e-9, math.nan, math.inf, -math.inf])
def test_impossible_amounts_are_refused(seconds):
    ledger = ledger_of("learner")
    with pytest.raises(LedgerError):
        ledger.add("learner", "train", seconds)
    with pytest.raises(LedgerError):
        ledger.balance(seconds)
    with pytest.raises(LedgerError):
        ledger.add_effective(seconds)
    assert ledger.cost().device_s == 0


def test_unknown_and_repeated_slots_are_refused():
    with pytest.raises(LedgerError, match=r"'gpu9'.*'learner'"):
        ledger_of("learner").add("gpu9", "train", 1)
    with pytest.raises(LedgerError):
        ledger_of("learner", "learner")
    with pytest.raises(LedgerError):
        ledger_of()


def test_f2_cost_by_hand():
    # 60 + 20 + 20 = 100 device-seconds at a dollar each; of 10 samples 2 were dropped, 1 filtered:
    # of the 80 s of rollout and grading 16 and 8 are theirs. 25 effective samples: 4 dollars each.
    ledger = ledger_of("learner", "sampler")
    ledger.add("sampler", "rollout", 60)
    ledger.add("sampler", "grade", 20)
    ledger.add("learner", "train", 20)
    ledger.count(SampleFate.TRAINED, 7)
    ledger.count(SampleFate.DROPPED, 2)
    ledger.count(SampleFate.FILTERED, 1)
    ledger.add_effective(20)
    ledger.add_effective(5)
    cost = ledger.cost()
    assert (cost.device_s, cost.usd, cost.usd_per_effective_sample) == pytest.approx((100, 100, 4))
    assert (cost.dropped_share, cost.filtered_share) == pytest.approx((0.2, 0.1))
    assert cost.seconds_by_use == pytest.approx(
        {"rollout": 42, "grade": 14, "train": 20, "dropped": 16, "filtered": 8}
    )
    assert sum(cost.seconds_by_use.values()) == pytest.approx(cost.device_s)
    assert ledger.seconds_by_state() == {"rollout": 60, "grade": 20, "train": 20}


def test_f2_fewer_effective_samples_cost_more_each():
    def price(effective):
        ledger = ledger_of("learner")
        ledger.add("learner", "train", 100)
        ledger.add_effective(effective)
        return ledger.cost().usd_per_effective_sample

    assert price(10) == pytest.approx(2 * price(20))


def test_a_resumed_ledger_carries_time_wall_clock_and_samples():
    first = ledger_of("learner", "sampler")
    for slot in ("learner", "sampler"):
        first.add(slot, "train", 50)
    first.count(SampleFate.TRAINED, 4)
    first.add_effective(3.5)
    again = CostLedger.from_json(json.loads(json.dumps(first.to_json(50))))
    assert again.balance(0).balanced
    for slot in ("learner", "sampler"):
        again.add(slot, "train", 25)
    balance = again.balance(25)
    assert (balance.wall_s, balance.measured_s) == (75, 150)
    assert balance.balanced
    # A third attempt adds up both before it.
    third = CostLedger.from_json(json.loads(json.dumps(again.to_json(25))))
    assert third.to_json(0) == again.to_json(25)
    assert third.share(SampleFate.TRAINED) == 1.0
    assert third.cost().effective_samples == 3.5
    assert not third.balance(10).balanced


def test_a_nested_state_takes_the_time_from_the_outer_one(time):
    ledger = ledger_of("learner")
    clock = SlotClock(ledger, "learner", time)
    with clock.state("train"):
        time.pass_(3)
        with clock.state("sync"):
            time.pass_(2)
            with clock.state("checkpoint"):
                time.pass_(1)
            time.pass_(2)
        time.pass_(4)
    assert ledger.seconds_by_state() == {"train": 7, "sync": 4, "checkpoint": 1}
    assert ledger.balance(12).balanced


def test_a_state_that_raises_is_still_booked(time):
    ledger = ledger_of("learner")
    clock = SlotClock(ledger, "learner", time)
    with pytest.raises(KeyError), clock.state("train"):
        time.pass_(3)
        raise KeyError
    with clock.state("idle"):
        time.pass_(1)
    assert ledger.seconds_by_state() == {"train": 3, "idle": 1}


def test_flush_books_the_open_state_for_a_checkpoint(time):
    ledger = ledger_of("learner")
    clock = SlotClock(ledger, "learner", time)
    with clock.state("checkpoint"):
        time.pass_(2)
        clock.flush()
        assert CostLedger.from_json(ledger.to_json(2)).balance(0).balanced
        time.pass_(3)
    clock.flush()
    assert ledger.seconds_by_state() == {"checkpoint": 5}


def test_states_opened_beside_each_other_share_no_moment(time):
    ledger = ledger_of("rollout-0")
    clock = SlotClock(ledger, "rollout-0", time)
    first, second = clock.state("rollout"), clock.state("rollout")
    first.__enter__()
    time.pass_(1)  # rollout
    with clock.state("idle"):  # the slot waits for room and samples all the same
        time.pass_(2)  # rollout
        with clock.state("sync"):
            second.__enter__()
            time.pass_(4)  # sync, though a play began later
            first.__exit__(None, None, None)
        time.pass_(8)  # rollout: the second goes on
        second.__exit__(None, None, None)
        time.pass_(16)  # idle
    assert ledger.seconds_by_state() == {"rollout": 11, "sync": 4, "idle": 16}
    assert ledger.balance(31).balanced


def test_time_running_backwards_is_an_error(time):
    clock = SlotClock(ledger_of("learner"), "learner", time)
    with pytest.raises(ClockOrderError, match="monotonic"), clock.state("train"):
        time.pass_(-1)


@given(
    st.lists(st.tuples(st.sampled_from(["train", "sync", "idle"]), st.floats(0, 1e4)), max_size=30)
)
def test_any_unbroken_sequence_of_states_balances(spans):
    time = FakeTime()
    start, ledger = time(), ledger_of("learner")
    clock = SlotClock(ledger, "learner", time)
    for state, seconds in spans:
        with clock.state(state):
            time.pass_(seconds)
    balance = ledger.balance(time() - start)
    assert balance.balanced
    assert balance.measured_s == pytest.approx(time() - start, abs=1e-6)
