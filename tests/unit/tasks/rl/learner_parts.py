"""Learners on the tiny snapshot, real samples for them, and what is compared."""

import asyncio
import math
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file

from tasks.artifacts import hash_tensors
from tasks.models.trainable import trainable_tensors
from tasks.rl.batch import train_batches, without_credit
from tasks.rl.learner import Learner
from tasks.rl.prompt_queue import PromptQueue
from tasks.rl.rollout_worker import RolloutWorker
from tasks.rl.types import Group

FULL = {"type": "full"}
TURNS = {"type": "turn_gae"}


@pytest.fixture
def learner_of(tiny_config, tiny_snapshot, tiny_data):
    """Build a learner: `learner_of(updates_per_batch=2, …)`."""

    def build(**rl) -> Learner:
        rl = {"optimiser": {"lr": 1e-2, "warmup_steps": 0, "grad_clip": 1e6}} | rl
        config = tiny_config(rl=rl)
        return Learner(config, tiny_snapshot.folder, tiny_snapshot.sha256, tiny_data.rows)

    return build


@pytest.fixture(scope="module")
def groups(tiny_config, tiny_snapshot, tiny_data) -> list[Group]:
    """Six groups of four real samples of the snapshot, every other one rewarded."""
    return played(RolloutWorker(tiny_config(), tiny_snapshot.folder, tiny_data.rows), tiny_data)


def played(worker, data, temperature: float = 1.0, seed: int = 0) -> list[Group]:
    """Six groups of four samples a worker plays, every other one rewarded."""
    queue = PromptQueue([row.id for row in data.rows], seed)
    played = asyncio.run(worker.play(queue.take(6), 4, temperature))
    graded = worker.grade(played.rollouts)
    return [
        Group(
            g.group_id,
            g.row_id,
            tuple(
                replace(r, reward=float(i % 2), outcome=float(i % 2),
                        turn_rewards=(0.0,) * (len(r.rollout.turns) - 1) + (float(i % 2),))
                for i, r in enumerate(g.rollouts)
            ),
        )
        for g in graded
    ]  # fmt: skip


def weights(learner: Learner) -> str:
    """The content hash of what is trained."""
    return hash_tensors(trainable_tensors(learner._module.model))


def references(learner: Learner, groups) -> torch.Tensor:
    """The frozen snapshot's scores of the groups."""
    (batch,) = train_batches(without_credit(groups, with_values=False), 10**6)
    return learner.reference_logprobs(batch)


def spoilt(groups: list[Group]) -> list[Group]:
    """One sampled token whose μ is NaN: the loss is NaN and must not become a number."""
    first = groups[0].rollouts[1]
    at = first.rollout.action_mask.index(True)
    logprobs = list(first.rollout.sampler_logprobs)
    logprobs[at] = math.nan
    bad = replace(first, rollout=replace(first.rollout, sampler_logprobs=tuple(logprobs)))
    members = (groups[0].rollouts[0], bad, *groups[0].rollouts[2:])
    return [replace(groups[0], rollouts=members), *groups[1:]]


def hash_model_parts(folder) -> dict[str, str]:
    """The content hash of every file a learner saved, by its stem."""
    return {p.stem: hash_tensors(load_file(p)) for p in sorted(folder.iterdir())}


def replace_rewards(group: Group, reward: float) -> Group:
    """The group with every sample rewarded alike."""
    return Group(
        group.group_id,
        group.row_id,
        tuple(replace(r, reward=reward, turn_rewards=(reward,)) for r in group.rollouts),
    )


def moments(learner: Learner) -> torch.Tensor:
    """Adam's first moments, one after another."""
    state = learner._engine.state_tensors()
    return torch.cat([state[k].flatten() for k in sorted(state) if k.endswith("exp_avg")])


def scored(learner: Learner, groups):
    """The learner's scores of the groups, a micro-batch at a time."""
    return [
        learner._score(batch)
        for _, batch in learner.share(without_credit(groups, with_values=False))
    ]
