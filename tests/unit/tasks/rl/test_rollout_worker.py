"""The same ticket gives the same samples, whoever plays it and with whom."""

import asyncio
import threading
from dataclasses import replace

import pytest

from tasks.environments.tool_runner import ToolRunner
from tasks.environments.toolcall import render_tool_call
from tasks.models.trainable import trainable_tensors
from tasks.rl.prompt_queue import PromptQueue, Ticket
from tasks.rl.rollout_worker import Harvest, RolloutWorker
from tasks.rl.weight_sync import Canary, Receipt, publish
from tasks.sampling.errors import EngineStartError
from tasks.sampling.types import PolicyVersion, StopReason


@pytest.fixture(scope="module")
def worker(tiny_config, tiny_snapshot, tiny_data) -> RolloutWorker:
    return RolloutWorker(tiny_config(), tiny_snapshot.folder, tiny_data.rows)


def play(worker: RolloutWorker, tickets, samples: int = 4) -> Harvest:
    return asyncio.run(worker.play(tickets, samples, 1.0))


def ids(harvest) -> dict[str, tuple[int, ...]]:
    return {r.rollout_id: r.token_ids for r in harvest.rollouts}


def test_a_ticket_gives_the_same_samples_alone_and_among_others(worker, tiny_data):
    tickets = PromptQueue([r.id for r in tiny_data.rows], 0).take(6)
    together = ids(play(worker, tickets))
    assert len(together) == 24 and len(set(together.values())) > 12
    for ticket in tickets:
        alone = ids(play(worker, [ticket]))
        assert alone == {k: together[k] for k in alone} and len(alone) == 4


def test_a_reissued_ticket_gives_other_samples(worker, tiny_data):
    row = tiny_data.rows[0].id
    first, again = (ids(play(worker, [Ticket(0, row, n)], 8)) for n in (0, 1))
    assert set(first) == {f"0.0.{i}" for i in range(8)}
    assert set(again) == {f"0.1.{i}" for i in range(8)}
    assert sorted(first.values()) != sorted(again.values())


def test_groups_are_graded_whole_and_text_is_kept_once(worker, tiny_data):
    tickets = PromptQueue([r.id for r in tiny_data.rows], 0).take(3)
    harvest = play(worker, tickets)
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


LATENCY = {"median_s": 0.3, "sigma": 0.0}
END = StopReason.END_OF_TURN


@pytest.fixture(scope="module")
def streaming(tiny_config, tiny_snapshot, tiny_data):
    """Build a worker whose episodes go their own ways; its tools are slow where asked."""

    def build(on_publish="carry", latency=None, **tools) -> RolloutWorker:
        rl = {
            "staleness_limit": 2,
            "runtime": {"type": "ray"},
            "sampling": {"max_new_tokens": 40 if latency or tools else 12},
            "engine": {"type": "transformers", "on_publish": on_publish},
            "tools": {"simulated_latency": latency} | tools,
        }
        return RolloutWorker(tiny_config(rl=rl), tiny_snapshot.folder, tiny_data.rows)

    return build


def receipt_of(worker: RolloutWorker, root, step: int) -> Receipt:
    """A publish of what a worker holds already: another version, the same samples."""
    model = worker._engine._engine.model
    sequences = ((1, 2, 3), (4, 5, 6, 7))
    scores = worker._engine._engine.score(sequences, temperature=1.0)
    canary = Canary(sequences, tuple(x for row in scores for x in row))
    return publish(root, PolicyVersion(0, step), trainable_tensors(model), canary, keep=3)


def test_episodes_that_go_their_own_ways_sample_what_lockstep_samples(worker, streaming, tiny_data):
    tickets = PromptQueue([r.id for r in tiny_data.rows], 0).take(6)
    apart = streaming()

    async def one_play_each():
        return await asyncio.gather(*(apart.play([t], 4, 1.0) for t in tickets))

    played = {k: v for h in asyncio.run(one_play_each()) for k, v in ids(h).items()}
    assert played == ids(play(worker, tickets))


def call_first(worker: RolloutWorker, renderer, monkeypatch) -> None:
    """Have every episode begin with a tool call, whatever the tiny model would say."""
    text = render_tool_call("calc", {"expression": "1+1"})
    said = (*renderer.encode(text), renderer.end_of_turn_id)
    inner, begun = worker._engine._engine, set()
    generate = inner.generate

    def calls(requests):
        first = {r.request_id for r in requests} - begun
        begun.update(first)
        return [
            replace(c, token_ids=said, logprobs=(-1.0,) * len(said), stop_reason=END)
            if c.request_id in first
            else c
            for c in generate(requests)
        ]

    monkeypatch.setattr(inner, "generate", calls)


async def publish_meanwhile(worker: RolloutWorker, tickets, receipt: Receipt):
    """Episodes that a publish overtakes between their turns, and some that begin after it."""
    early = asyncio.create_task(worker.play(tickets, 4, 1.0))
    await asyncio.sleep(LATENCY["median_s"] / 2)  # first turns are sampled, tools are being slow
    sync = asyncio.create_task(worker.sync(receipt))
    await asyncio.sleep(0)
    late = asyncio.create_task(worker.play(tickets[:1], 2, 1.0))
    done, _ = await asyncio.wait({early, sync}, return_when=asyncio.FIRST_COMPLETED)
    return sync in done, await early, await late, await sync


@pytest.mark.parametrize("on_publish", ["carry", "finish"])
def test_a_publish_overtakes_episodes(
    streaming, tiny_data, tiny_renderer, tmp_path, on_publish, monkeypatch
):
    worker = streaming(on_publish, LATENCY)
    call_first(worker, tiny_renderer, monkeypatch)
    tickets = PromptQueue([r.id for r in tiny_data.rows], 0).take(8)
    receipt = receipt_of(worker, tmp_path, step=7)
    loaded_first, early, late, proof = asyncio.run(publish_meanwhile(worker, tickets, receipt))
    assert proof.version == PolicyVersion(0, 7)
    assert {t.policy_version.step for r in late.rollouts for t in r.turns} == {7}
    steps = {tuple(t.policy_version.step for t in r.turns) for r in early.rollouts}
    assert loaded_first == (on_publish == "carry")
    assert steps == ({(0, 7)} if on_publish == "carry" else {(0, 0)})
    assert {r.oldest_version.step for r in early.rollouts} == {0}


def test_calls_left_running_are_told_by_the_next_harvest_once(
    streaming, tiny_data, tiny_renderer, monkeypatch
):
    over = threading.Event()
    worker = streaming(timeout_s=0.05, retries=1)
    call_first(worker, tiny_renderer, monkeypatch)
    monkeypatch.setattr(
        worker,
        "_tools",
        ToolRunner({"calc": lambda arguments: f"{over.wait(60)}"}, worker._config.rl.tools),
    )
    first, second = PromptQueue([r.id for r in tiny_data.rows], 0).take(2)
    harvest = play(worker, [first], 3)
    assert [(r.tool_calls, r.tool_timeouts) for r in harvest.rollouts] == [(1, 1)] * 3
    assert harvest.abandoned_tool_calls == 6 == worker._tools.abandoned  # two tries of each
    over.set()
    assert play(worker, [second], 2).abandoned_tool_calls == 0


def test_an_answer_that_cannot_be_trained_on_leaves_its_group_the_others(
    streaming, tiny_data, monkeypatch
):
    worker = streaming()
    inner = worker._engine._engine
    generate = inner.generate

    def broken(requests):
        return [
            replace(c, logprobs=(float("nan"), *c.logprobs[1:])) if c.request_id == "0.0.2" else c
            for c in generate(requests)
        ]

    monkeypatch.setattr(inner, "generate", broken)
    harvest = play(worker, PromptQueue([r.id for r in tiny_data.rows], 0).take(2))
    (refusal,) = harvest.refused
    assert (refusal.rollout_id, refusal.group_id) == ("0.0.2", "0")
    assert "token 0 has log-probability nan" in refusal.reason
    assert set(ids(harvest)) == {f"{g}.0.{i}" for g in range(2) for i in range(4)} - {"0.0.2"}
    assert [len(g.rollouts) for g in worker.grade(harvest.rollouts)] == [3, 4]


def test_an_engine_this_machine_lacks_is_named(tiny_config, tiny_snapshot, tiny_data):
    config = tiny_config(rl={"engine": {"type": "vllm", "tensor_parallel_size": 2}})
    with pytest.raises(EngineStartError, match=r"rl\.engine\.tensor_parallel_size=2"):
        RolloutWorker(config, tiny_snapshot.folder, tiny_data.rows)
