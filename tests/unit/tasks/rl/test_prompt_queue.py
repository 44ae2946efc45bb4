"""No ticket lost or doubled, whatever is taken, trained on, dropped, saved and resumed."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tasks.rl.errors import NoPromptsError
from tasks.rl.prompt_queue import PromptQueue, Ticket

ROWS = [f"row{i}" for i in range(7)]


def saved(queue: PromptQueue) -> dict:
    return json.loads(json.dumps(queue.state_dict()))


def resumed(state: dict, seed: int = 3) -> PromptQueue:
    queue = PromptQueue(ROWS, seed)
    queue.load_state(state)
    return queue


def rows_by_serial(count: int, seed: int = 3) -> list[str]:
    return [t.row_id for t in PromptQueue(ROWS, seed).take(count)]


ACTIONS = st.lists(
    st.tuples(
        st.sampled_from(["take", "consume", "reissue", "save", "die"]), st.integers(0, 2**30)
    ),
    max_size=60,
)


@settings(deadline=None, max_examples=150)
@given(ACTIONS)
def test_every_ticket_is_open_waiting_or_done_once(actions):
    """A model of the queue: what is done never comes back, what is not always does."""
    queue, done, out = PromptQueue(ROWS, 3), set(), {}
    kept = (saved(queue), set())
    for name, number in actions:
        some = sorted(out)[: number % 4]
        if name == "take":
            for ticket in queue.take(number % 5):
                assert ticket.serial not in done and ticket.serial not in out
                out[ticket.serial] = ticket
        elif name == "consume":
            queue.consumed(some)
            done |= {out.pop(s).serial for s in some}
        elif name == "reissue":
            queue.reissue(some)
            for serial in some:
                del out[serial]
        elif name == "save":
            kept = (saved(queue), set(done))
        else:
            queue, done, out = resumed(kept[0]), set(kept[1]), {}
    # Everything handed out and not done comes again before anything new, and then nothing is left.
    for serial in list(out):
        queue.reissue([serial])
    owed = set(range(queue.dispatched)) - done
    again = queue.take(len(owed))
    assert {t.serial for t in again} == owed
    rows = rows_by_serial(queue.dispatched + 1)
    assert all(t.row_id == rows[t.serial] for t in again)
    assert queue.take(1)[0].serial == len(rows) - 1


def test_every_epoch_shows_every_row_once_in_an_order_of_its_own():
    rows = rows_by_serial(21)
    epochs = [rows[i : i + 7] for i in (0, 7, 14)]
    assert all(sorted(e) == ROWS for e in epochs)
    assert len({tuple(e) for e in epochs}) == 3
    assert rows_by_serial(21) == rows != rows_by_serial(21, seed=4)


def test_reissued_tickets_come_first_with_another_seed():
    queue = PromptQueue(ROWS, 3)
    first, second = queue.take(2)
    queue.reissue([first.serial])
    again, new = queue.take(2)
    assert (again.serial, again.row_id, again.reissue) == (0, first.row_id, 1)
    assert new.serial == 2
    assert again.seed(0, 0) != first.seed(0, 0)
    queue.reissue([again.serial])
    assert queue.take(1)[0].reissue == 2
    queue.consumed([second.serial])


def test_a_resumed_queue_draws_what_was_open_under_the_same_seeds():
    queue = PromptQueue(ROWS, 3)
    tickets = queue.take(10)
    queue.consumed(t.serial for t in tickets[:4])
    queue.reissue([tickets[5].serial])
    state = saved(queue)
    assert saved(queue) == state  # looking changes nothing
    again = resumed(state).take(7)
    expected = [tickets[4], *tickets[6:], Ticket(5, tickets[5].row_id, 1)]
    assert again[:6] == expected
    assert [t.seed(9, 2) for t in again[:6]] == [t.seed(9, 2) for t in expected]
    assert again[6].serial == 10


def test_a_resumed_queue_goes_on_in_the_middle_of_an_epoch():
    queue = PromptQueue(ROWS, 3)
    queue.consumed(t.serial for t in queue.take(10))
    assert [t.row_id for t in resumed(saved(queue)).take(8)] == rows_by_serial(18)[10:]


def test_seeds_differ_by_sample_ticket_reissue_and_run():
    seeds = {
        Ticket(serial, "r", reissue).seed(run, sample)
        for serial in range(5)
        for reissue in range(3)
        for run in range(3)
        for sample in range(4)
    }
    assert len(seeds) == 180 and min(seeds) >= 0 and max(seeds) < 2**60


def test_closing_a_ticket_twice_is_an_error():
    queue = PromptQueue(ROWS, 3)
    queue.take(2)
    queue.consumed([0])
    with pytest.raises(KeyError):
        queue.consumed([0])
    with pytest.raises(KeyError):
        queue.reissue([0])


def test_no_rows_is_named():
    with pytest.raises(NoPromptsError, match="rl_bands"):
        PromptQueue([], 0)
