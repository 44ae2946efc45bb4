"""Two real ranks over gloo: the gradient, the report and the resume of one."""

import asyncio
import json
import multiprocessing
import socket

import pytest
import torch
from safetensors.torch import load_file

from tasks.models.load import hash_model
from tasks.models.ranks import RankGroup
from tasks.rl.errors import CheckpointMismatchError
from tasks.rl.learner import Learner
from tasks.rl.prompt_queue import PromptQueue
from tasks.rl.rollout_worker import RolloutWorker
from tests.unit.tasks.rl.learner_rank import first_moments, run_rank

OPTIMISER = {"lr": 1e-2, "warmup_steps": 0, "grad_clip": 1e6}
KINDS = {
    "zero-0": {"deepspeed": {"zero_stage": 0}},
    "zero-2": {"deepspeed": {"zero_stage": 2, "micro_batch_tokens": 150}},
    "zero-3": {"deepspeed": {"zero_stage": 3}, "credit": {"type": "turn_gae"}},
}


def config_of(tiny_config, kind):
    return tiny_config(rl={"optimiser": OPTIMISER, **KINDS[kind]})


@pytest.fixture(scope="module")
def groups(tiny_config, tiny_snapshot, tiny_data):
    """Four groups of four, with rewards of their own, and a fifth of one sample."""
    from dataclasses import replace

    worker = RolloutWorker(tiny_config(), tiny_snapshot.folder, tiny_data.rows)
    queue = PromptQueue([row.id for row in tiny_data.rows], 0)
    graded = worker.grade(asyncio.run(worker.play(queue.take(5), 4, 1.0)).rollouts)
    scored = [
        replace(
            g,
            rollouts=tuple(
                replace(r, reward=float(i % 2), outcome=float(i % 2),
                        turn_rewards=(0.0,) * (len(r.rollout.turns) - 1) + (float(i % 2),))
                for i, r in enumerate(g.rollouts)
            ),
        )
        for g in graded
    ]  # fmt: skip
    return [*scored[:4], replace(scored[4], rollouts=scored[4].rollouts[:1])]


@pytest.fixture(scope="module")
def two(tiny_config, tiny_snapshot, tiny_data, groups, tmp_path_factory):
    """The folder in which two ranks left what every kind did."""
    out = tmp_path_factory.mktemp("ranks")
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    configs = {kind: config_of(tiny_config, kind) for kind in KINDS}
    snapshot = (tiny_snapshot.folder, tiny_snapshot.sha256)
    context = multiprocessing.get_context("spawn")
    ranks = [
        context.Process(
            target=run_rank,
            args=(
                RankGroup(i, 2, "127.0.0.1", port),
                configs,
                snapshot,
                tiny_data.rows,
                groups,
                out,
            ),
        )
        for i in range(2)
    ]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(200)
        if process.is_alive():
            process.kill()
    assert [process.exitcode for process in ranks] == [0, 0]
    return out


def told(two, kind):
    return [json.loads((two / kind / f"rank-{i}.json").read_text()) for i in range(2)]


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_of_two_ranks_equal_those_of_one(
    two, kind, tiny_config, tiny_snapshot, tiny_data, groups
):
    config = config_of(tiny_config, kind)
    single = tiny_config(rl=config.rl.model_dump() | {"deepspeed": {"zero_stage": 0}})
    learner = Learner(single, tiny_snapshot.folder, tiny_snapshot.sha256, tiny_data.rows)
    report = learner.train(groups, 0.1)
    one, other = first_moments(learner), load_file(two / kind / "moments.safetensors")
    assert one.keys() == other.keys()
    whole = torch.cat([one[k].flatten() for k in sorted(one)])
    shared = torch.cat([other[k].flatten() for k in sorted(one)])
    assert whole.norm() > 1e-4 and (whole - shared).norm() <= 1e-5 * whole.norm()
    version, skipped, effective, metrics = told(two, kind)[0]["reports"][0]
    assert (version, skipped) == (1, False) == (report.learner_version, report.skipped)
    assert effective == pytest.approx(report.effective_samples, rel=1e-5)
    for name in metrics:
        assert metrics[name] == pytest.approx(report.metrics[name], rel=1e-4, abs=1e-6), name


@pytest.mark.parametrize("kind", KINDS)
def test_both_ranks_report_alike_and_go_on_from_what_they_wrote(two, kind):
    first, second = told(two, kind)
    assert first["reports"] == second["reports"]
    assert first["reports"][1] == first["reports"][2]  # resumed as if never stopped
    for rank, own in enumerate((first, second)):
        assert own["same"] and own["again"] == own["hashes"]
        assert f"optimiser-{rank}-of-2" in own["hashes"]
    assert "policy" in first["hashes"] and "policy" not in second["hashes"]
    assert ("value_head" in first["hashes"]) == (kind == "zero-3")
    assert second["published"] is None and second["policy"] is None
    assert first["published"] == first["hashes"]["policy"]
    assert hash_model(two / kind / "policy" / "policy") == first["policy"]
    written = {p.stem for p in (two / kind / "checkpoint").iterdir()}
    assert written == set(first["hashes"]) | set(second["hashes"])


def test_another_number_of_ranks_is_refused(two, tiny_config, tiny_snapshot, tiny_data):
    config = config_of(tiny_config, "zero-2")
    learner = Learner(config, tiny_snapshot.folder, tiny_snapshot.sha256, tiny_data.rows)
    with pytest.raises(CheckpointMismatchError, match=r"optimiser-0-of-2.*rank 0 of 1.*ranks"):
        learner.load(two / "zero-2" / "checkpoint", 1)
