"""Every loss in a real learner: on-policy at first, guarded, tightened, several steps a batch."""

import pytest
from learner_parts import played, spoilt, weights

from tasks.rl.learner import Learner
from tasks.rl.rollout_worker import RolloutWorker

TYPES = ["ppo_clip", "ppo_widening", "decoupled_ppo", "cispo", "gspo", "icepop", "tis"]


@pytest.fixture(scope="module")
def groups(tiny_config, tiny_snapshot, tiny_data):
    return played(
        RolloutWorker(tiny_config(), tiny_snapshot.folder, tiny_data.rows), tiny_data, 0.7
    )


@pytest.fixture
def learner_of(tiny_config, tiny_snapshot, tiny_data):
    def build(**rl) -> Learner:
        rl = {"optimiser": {"lr": 3e-2, "warmup_steps": 0, "grad_clip": 1e6}} | rl
        config = tiny_config(rl=rl)
        return Learner(config, tiny_snapshot.folder, tiny_snapshot.sha256, tiny_data.rows)

    return build


@pytest.mark.parametrize("kind", TYPES)
def test_a05_a06_a07_every_loss_starts_on_policy_and_skips_what_is_not_a_number(
    learner_of, groups, kind
):
    learner = learner_of(loss={"type": kind, "geometric_reject": {}})
    start = weights(learner)
    skipped = learner.train(spoilt(groups), 0.1)
    assert (skipped.skipped, skipped.learner_version, skipped.effective_samples) == (True, 0, 0.0)
    assert weights(learner) == start
    report = learner.train(groups, 0.1)
    metrics = report.metrics
    assert (report.skipped, report.learner_version) == (False, 1)
    assert weights(learner) != start
    assert metrics["log_ratio_abs_max"] <= 1e-5
    assert abs(metrics["kl_k1_mean"]) <= 1e-6
    assert metrics["ess_share"] == pytest.approx(1.0, abs=1e-5)
    assert metrics["kept_token_share"] == pytest.approx(1.0, abs=1e-5)
    assert metrics["rejected_sample_share"] == 0.0
    # Off-policy now: the same samples once more, then with bounds a hundredth as wide.
    loose = learner.train(groups, 0.0).metrics
    tight = learner.train(groups, 0.0, tightness=0.01).metrics
    assert loose["log_ratio_abs_mean"] > 1e-2
    assert tight["kept_token_share"] < min(1.0, metrics["kept_token_share"])


@pytest.mark.parametrize("proximal", ["exact", "interpolated"])
def test_several_steps_on_a_batch_count_and_leave_the_first_on_policy(learner_of, groups, proximal):
    learner = learner_of(
        loss={"type": "decoupled_ppo", "proximal": proximal}, updates_per_batch=2, steps=4
    )
    report = learner.train(groups, 0.0)
    assert report.learner_version == 2
    # The second step's part is off-policy by the first step, and only that.
    assert 1e-4 < report.metrics["log_ratio_abs_max"] < 5
    assert 0 < report.effective_samples < sum(len(g.rollouts) for g in groups)
