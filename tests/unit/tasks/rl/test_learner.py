"""One real optimiser step after another: gradients, reference, value head, KL, and going on."""

import math
from dataclasses import replace

import pytest
import torch
from learner_parts import (
    FULL,
    TURNS,
    groups,
    learner_of,
    moments,
    played,
    references,
    replace_rewards,
    scored,
    spoilt,
    weights,
)

from configs.schema.rl_credit import GrpoCredit
from tasks.models.errors import NonFiniteStepError, WeightsMismatchError
from tasks.models.weights_file import read_weights, write_weights
from tasks.rl.batch import train_batches, without_credit
from tasks.rl.credit import group_credit
from tasks.rl.errors import ReferenceMismatchError
from tasks.rl.learner import Learner
from tasks.rl.rollout_worker import RolloutWorker
from tasks.rl.soundness import UnsoundSampleError
from tasks.rl.types import Group

__all__ = ["groups", "learner_of"]


@pytest.mark.parametrize("aggregation", ["token_mean", "constant"])
@pytest.mark.parametrize(
    "kind", [{}, {"credit": TURNS}, {"trainable": FULL}, {"kl": {"placement": "reward"}}]
)
def test_a03_micro_batches_give_the_gradient_of_the_whole_batch(
    learner_of, groups, kind, aggregation
):
    moments = []
    for budget in (10**6, 64):
        learner = learner_of(
            deepspeed={"micro_batch_tokens": budget},
            loss={"type": "ppo_clip", "aggregation": aggregation},
            **kind,
        )
        learner.train(groups, 0.5)  # move away from the reference, so that KL has a gradient too
        moments.append({})
        learner.train(groups, 0.5)
        for name, tensor in learner._engine.state_tensors().items():
            if name.endswith("exp_avg"):
                moments[-1][name] = tensor
    for name, whole in moments[0].items():
        difference = (moments[1][name] - whole).norm() / whole.norm()
        assert difference <= 1e-4, name
        assert whole.norm() > 0


@pytest.mark.parametrize("budget", [200, 64, 1])
def test_a03_one_step_from_the_same_weights_agrees_to_a_hundred_thousandth(
    learner_of, groups, budget
):
    whole, cut = (learner_of(deepspeed={"micro_batch_tokens": b}) for b in (10**6, budget))
    norms = [learner.train(groups, 0.0).metrics["grad_norm"] for learner in (whole, cut)]
    assert norms[0] == pytest.approx(norms[1], rel=1e-5) and norms[0] > 1e-3
    one, other = whole._engine.state_tensors(), cut._engine.state_tensors()
    for name in (n for n in one if n.endswith("exp_avg") and one[n].any()):
        assert (one[name] - other[name]).norm() <= 1e-5 * one[name].norm(), name


@pytest.mark.parametrize("kind", [{}, {"trainable": FULL}, {"credit": TURNS}])
@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_a05_a06_at_step_0_ratio_is_1_and_kl_is_0(
    learner_of, tiny_config, tiny_snapshot, tiny_data, kind, temperature
):
    worker = RolloutWorker(tiny_config(), tiny_snapshot.folder, tiny_data.rows)
    batch = played(worker, tiny_data, temperature)
    report = learner_of(**kind).train(batch, 0.1)
    assert report.metrics["log_ratio_abs_max"] <= 1e-5
    assert report.metrics["ratio_mean"] == pytest.approx(1.0, abs=1e-5)
    assert abs(report.metrics["kl_k1_mean"]) <= 1e-6 and report.metrics["kl_k3_mean"] <= 1e-6
    assert report.metrics["ess_share"] == pytest.approx(1.0, abs=1e-5)
    assert (report.learner_version, report.skipped) == (1, False)


@pytest.mark.parametrize("trainable", [None, FULL])
def test_a05_the_reference_does_not_move_with_the_policy(learner_of, groups, trainable):
    learner = learner_of(**({"trainable": trainable} if trainable else {}))
    before, start = references(learner, groups), weights(learner)
    for _ in range(3):
        learner.train(groups, 0.01)
    assert torch.equal(references(learner, groups), before)
    assert weights(learner) != start
    report = learner.train(groups, 0.01)
    assert report.metrics["kl_k3_mean"] > 1e-4  # and KL sees that


def test_full_weights_keep_a_frozen_copy_and_adapters_do_not(learner_of):
    full, lora = learner_of(trainable=FULL), learner_of()
    assert lora._frozen is None
    assert not any(p.requires_grad for p in full._frozen.parameters())
    own = {p.data_ptr() for p in full._module.parameters()}
    assert not own & {p.data_ptr() for p in full._frozen.parameters()}


def test_a_snapshot_other_than_recorded_is_refused(tiny_config, tiny_snapshot, tiny_data):
    with pytest.raises(ReferenceMismatchError, match=r"recorded was ffffffffffff.*--force sft"):
        Learner(tiny_config(), tiny_snapshot.folder, "f" * 64, tiny_data.rows)


def test_learning_raises_what_was_rewarded(learner_of, groups):
    learner = learner_of(optimiser={"lr": 1e-3, "warmup_steps": 0})  # 1e-2 overshoots
    (batch,) = train_batches(without_credit(groups, with_values=False), 10**6)
    arguments = (batch.token_ids_B_T, batch.valid_B_T, batch.action_mask_B_T, batch.temperature_B)

    # What the step ascends at ratio 1: Σ advantage × log-probability, each token alike.
    credits = [
        c for g in groups for c in group_credit([r.reward for r in g.rollouts], GrpoCredit())
    ]

    def objective() -> float:
        with torch.no_grad():
            totals = learner._module(*arguments).logprobs_B_T.sum(1)
        return float((torch.tensor(credits) * totals).sum())

    reached = [objective()]
    for _ in range(5):
        learner.train(groups, 0.0)
        reached.append(objective())
    assert reached == sorted(reached) and reached[-1] > reached[0] + 0.1


def test_turn_credit_trains_the_value_head(learner_of, groups):
    learner = learner_of(credit=TURNS)
    head = learner._module.value_head.weight.detach().clone()
    errors = [learner.train(groups, 0.0).metrics["value_mse"] for _ in range(12)]
    assert not torch.equal(learner._module.value_head.weight, head)
    assert errors[-1] < 0.7 * errors[0]


def test_a01_a07_nan_skips_the_step_is_counted_and_ends_the_run_at_last(learner_of, groups):
    learner = learner_of()
    learner.train(groups, 0.01)
    before, state = weights(learner), learner._engine.state_tensors()
    for _ in range(2):
        report = learner.train(spoilt(groups), 0.01)
        assert report.skipped and report.learner_version == 1 == learner.learner_version
        assert report.effective_samples == 0 and math.isnan(report.metrics["grad_norm"])
    assert weights(learner) == before
    after = learner._engine.state_tensors()
    assert all(torch.equal(state[k], after[k]) for k in state)
    assert learner.train(groups, 0.01).learner_version == 2
    with pytest.raises(NonFiniteStepError, match="3 optimiser steps in a row"):
        for _ in range(3):
            learner.train(spoilt(groups), 0.01)


def test_a04_an_unscored_sample_moves_nothing_of_its_own(learner_of, groups):
    unscored = [
        Group(
            g.group_id, g.row_id, tuple(replace(r, reward=None, outcome=None) for r in g.rollouts)
        )
        for g in groups
    ]
    learner = learner_of()
    before = weights(learner)
    report = learner.train(unscored, 0.0)
    assert weights(learner) == before  # no gradient, no weight decay: Adam stands still
    assert report.effective_samples == 0 and report.metrics["unscored_share"] == 1
    assert math.isnan(report.metrics["accuracy"])


def test_skipping_samples_without_advantage_takes_the_same_policy_gradient(learner_of, groups):
    """Without KL, a sample of advantage 0 adds nothing but its share of the denominator."""
    even = [replace_rewards(g, 1.0) for g in groups[:1]]  # a group solved by all
    both, skipping = learner_of(), learner_of(skip_zero_advantage=True)
    whole = both.train([*even, *groups[1:]], 0.0)
    part = skipping.train([*even, *groups[1:]], 0.0)
    assert part.metrics["accuracy"] == whole.metrics["accuracy"]  # shown for the whole batch
    assert part.effective_samples == pytest.approx(whole.effective_samples, rel=1e-6)
    assert part.metrics["grad_norm"] > whole.metrics["grad_norm"]  # the smaller denominator


@pytest.mark.parametrize("kind", [{}, {"credit": TURNS}, {"trainable": FULL}])
def test_packed_and_bucketed_take_the_same_step(learner_of, groups, kind):
    learners = [
        learner_of(deepspeed={"micro_batching": way, "micro_batch_tokens": 200}, **kind)
        for way in ("packed", "bucketed")
    ]
    packed, bucketed = (learner.train(groups, 0.1).metrics for learner in learners)
    one, other = map(moments, learners)
    assert one.norm() > 1e-3 and (one - other).norm() <= 1e-5 * one.norm()
    for name in packed.keys() - {"train_tokens_per_s"}:
        assert packed[name] == pytest.approx(bucketed[name], rel=1e-4, abs=1e-6), name


DECOUPLED = {"type": "decoupled_ppo"}


def test_several_steps_on_a_batch_train_each_part_of_it_once(learner_of, groups):
    both = learner_of(updates_per_batch=2, loss=DECOUPLED)
    report = both.train(groups, 0.1)
    assert (report.learner_version, report.skipped) == (2, False)
    assert report.metrics["updates"] == 2
    one = learner_of(loss=DECOUPLED)  # by hand: groups 0, 2, 4 first, then 1, 3, 5
    first = one.train(groups[0::2], 0.1)
    (proximal,) = [s.logprobs_B_T for s in scored(learner_of(loss=DECOUPLED), groups[1::2])]
    one._proximal = lambda shares: [[proximal] for _ in shares]
    second = one.train(groups[1::2], 0.1)
    assert weights(one) == weights(both)
    total = first.effective_samples + second.effective_samples
    assert report.effective_samples == pytest.approx(total)


def test_a_run_ends_on_its_last_step_where_a_skipped_one_shifted_the_batches(learner_of, groups):
    """At step 3 of 4 a batch of two steps has one left; its samples are all in that one."""
    learner = learner_of(updates_per_batch=2, loss=DECOUPLED, steps=4)
    learner._engine.steps_taken = 3
    assert learner.train(groups, 0.0).learner_version == 4
    whole = learner_of(loss=DECOUPLED, steps=4)
    whole._engine.steps_taken = 3
    whole.train(groups, 0.0)
    assert weights(whole) == weights(learner)


def test_the_rate_is_scaled_by_the_effective_sample_size(learner_of, groups):
    learner = learner_of(optimiser={"lr": 1e-2, "warmup_steps": 0, "scale_by_ess": True})
    first = learner.train(groups, 0.0).metrics
    assert first["lr"] == pytest.approx(1e-2, rel=1e-4)  # on-policy: every weight is 1
    for _ in range(3):
        metrics = learner.train(groups, 0.0).metrics
    assert metrics["ess_share"] < 0.99
    assert metrics["lr"] == pytest.approx(1e-2 * metrics["ess_share"] ** 0.5, rel=1e-6)
    assert learner.train(groups, 0.0, lr_scale=0.5).metrics["lr"] < 0.51e-2
    before = weights(learner)
    assert learner.train(spoilt(groups), 0.0).skipped and weights(learner) == before


def test_memory_saving_settings_reach_the_module(learner_of, groups):
    saving = learner_of(deepspeed={"gradient_checkpointing": True, "logits_chunk_tokens": 20})
    plain = learner_of()
    norms = [x.train(groups, 0.1).metrics["grad_norm"] for x in (saving, plain)]
    assert norms[0] == pytest.approx(norms[1], rel=1e-5)
    assert saving._module.causal_model.is_gradient_checkpointing


def test_chunks_of_logits_are_refused_where_weights_are_split(tiny_config):
    with pytest.raises(ValueError, match=r"logits_chunk_tokens=8 with deepspeed.zero_stage=3"):
        tiny_config(rl={"deepspeed": {"zero_stage": 3, "logits_chunk_tokens": 8}})


def test_tokens_the_model_has_not_stop_before_anything_is_computed(learner_of, groups):
    learner = learner_of()
    (first, *others), before = groups[0].rollouts, weights(learner)
    beyond = (*first.rollout.token_ids[:-1], 320)  # the embedding has rows 0 to 319
    bad = replace(first, rollout=replace(first.rollout, token_ids=beyond))
    with pytest.raises(UnsoundSampleError, match="is 320; the model has 0 to 319"):
        learner.train([replace(groups[0], rollouts=(bad, *others)), *groups[1:]], 0.1)
    assert weights(learner) == before and learner.learner_version == 0


@pytest.mark.parametrize("part", ["policy", "optimiser", "value_head"])
@pytest.mark.parametrize("how", ["cut off", "another name", "another shape"])
def test_a_state_that_does_not_fit_is_named_by_its_file_or_tensor(
    learner_of, groups, tmp_path, part, how
):
    learner = learner_of(credit=TURNS)
    learner.train(groups, 0.0)
    learner.save(tmp_path)
    file = tmp_path / f"{part}.safetensors"
    tensors = read_weights(file)
    name = next(n for n, t in tensors.items() if t.dim())
    said = "differ in names|does not fit"
    if how == "cut off":
        file.write_bytes(file.read_bytes()[:-1])
        said = f"{part}.safetensors is not a whole"
    elif how == "another name":
        tensors["foreign"] = tensors.pop(name)
        write_weights(file, tensors)
    else:
        write_weights(file, tensors | {name: torch.ones(7, 7)})
        said = f"{name} .*shape"
    with pytest.raises(WeightsMismatchError, match=said):
        learner.load(tmp_path, 1)


def silent(scored):
    """The sample as if the policy had found no room to say a token."""
    start = next(i for i, action in enumerate(scored.rollout.action_mask) if action)
    cut = {
        name: getattr(scored.rollout, name)[:start]
        for name in ("token_ids", "action_mask", "sampler_logprobs")
    }
    turn = replace(scored.rollout.turns[0], start=start, end=start)
    return replace(
        scored, rollout=replace(scored.rollout, **cut, turns=(turn,)), turn_rewards=(scored.reward,)
    )


@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean", "constant"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a03_a_step_with_nothing_to_train_on_is_counted_and_moves_nothing(
    learner_of, groups, aggregation, dtype
):
    learner = learner_of(
        loss={"type": "ppo_clip", "aggregation": aggregation},
        deepspeed={"dtype": dtype, "zero_stage": 1},
        optimiser={"lr": 1e-2, "warmup_steps": 0, "weight_decay": 0.1},
    )
    assert learner.train(groups, 0.1).metrics["empty_updates"] == 0  # there is momentum now
    before = weights(learner)
    empty = [replace(g, rollouts=tuple(map(silent, g.rollouts))) for g in groups]
    report = learner.train(empty, 0.1)
    assert report.metrics["empty_updates"] == 1 and report.metrics["lr"] == 0
    assert weights(learner) == before and report.effective_samples == 0
    assert learner.learner_version == report.learner_version == 2  # the run goes on to its end
    learner.train(groups, 0.1)
    assert weights(learner) != before
