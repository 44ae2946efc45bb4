"""The same ticket gives the same samples, whoever plays it and with whom."""

import pytest

from tasks.rl.prompt_queue import PromptQueue, Ticket
from tasks.rl.rollout_worker import RolloutWorker
from tasks.sampling.errors import EngineStartError


@pytest.fixture(scope="module")
def worker(tiny_config, tiny_snapshot, tiny_data) -> RolloutWorker:
    return RolloutWorker(tiny_config(), tiny_snapshot.folder, tiny_data.rows)


def ids(harvest) -> dict[str, tuple[int, ...]]:
    return {r.rollout_id: r.token_ids for r in harvest.rollouts}


def test_a_ticket_gives_the_same_samples_alone_and_among_others(worker, tiny_data):
    tickets = PromptQueue([r.id for r in tiny_data.rows], 0).take(6)
    together = ids(worker.play(tickets, 4, 1.0))
    assert len(together) == 24 and len(set(together.values())) > 12
    for ticket in tickets:
        alone = ids(worker.play([ticket], 4, 1.0))
        assert alone == {k: together[k] for k in alone} and len(alone) == 4


def test_a_reissued_ticket_gives_other_samples(worker, tiny_data):
    row = tiny_data.rows[0].id
    first, again = (ids(worker.play([Ticket(0, row, n)], 8, 1.0)) for n in (0, 1))
    assert set(first) == {f"0.0.{i}" for i in range(8)}
    assert set(again) == {f"0.1.{i}" for i in range(8)}
    assert sorted(first.values()) != sorted(again.values())


def test_groups_are_graded_whole_and_text_is_kept_once(worker, tiny_data):
    tickets = PromptQueue([r.id for r in tiny_data.rows], 0).take(3)
    harvest = worker.play(tickets, 4, 1.0)
    groups = worker.grade(harvest.rollouts)
    assert [g.group_id for g in groups] == ["0", "1", "2"]
    assert [g.row_id for g in groups] == [t.row_id for t in tickets]
    assert harvest.generated_tokens == sum(r.sampled_tokens for r in harvest.rollouts)
    for group in groups:
        assert [r.rollout.rollout_id for r in group.rollouts] == [
            f"{group.group_id}.0.{i}" for i in range(4)
        ]
        assert [bool(r.rollout.messages) for r in group.rollouts] == [True, False, False, False]
        assert all(r.outcome is not None and r.rollout.temperature == 1.0 for r in group.rollouts)
        assert group.oldest_step == 0


def test_probes_pass(worker):
    assert worker.probe() and all(p.passed for p in worker.probe())


def test_an_engine_this_machine_lacks_is_named(tiny_config, tiny_snapshot, tiny_data):
    config = tiny_config(rl={"engine": {"type": "vllm", "tensor_parallel_size": 2}})
    with pytest.raises(EngineStartError, match=r"rl\.engine\.tensor_parallel_size=2"):
        RolloutWorker(config, tiny_snapshot.folder, tiny_data.rows)
