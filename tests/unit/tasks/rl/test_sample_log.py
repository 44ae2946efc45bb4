"""The log of trained batches, and rewards replayed from it."""

from dataclasses import replace

import pytest

from tasks.artifacts.typed_file import TypedFileError
from tasks.rl.errors import ReplayError
from tasks.rl.replay import Replayer
from tasks.rl.sample_log import SampleLog, TrainedSamples, credited, rewards_tell
from tests.tiny_samples import ROWS, rl_config, trained_samples


@pytest.fixture
def renderer(tiny_renderer):
    return tiny_renderer


@pytest.fixture
def trained(renderer) -> TrainedSamples:
    return trained_samples(renderer)


def test_batches_come_back_in_order_and_a_resumed_run_forgets_later_ones(tmp_path, trained):
    log = SampleLog(tmp_path / "samples")
    assert list(log.read()) == []
    log.resume(0)
    for batch in (10, 2, 9):
        log.write(batch, replace(trained, began_at=batch))
    assert [(n, s.began_at) for n, s in log.read()] == [(2, 2), (9, 9), (10, 10)]
    assert next(log.read())[1] == replace(trained, began_at=2)
    log.resume(10)
    log.write(2, trained)
    assert [(n, s.began_at) for n, s in log.read()] == [(2, 5), (9, 9)]
    (tmp_path / "samples" / "batch-000009.json.gz").write_bytes(b"cut")
    with pytest.raises(TypedFileError, match="batch-000009"):
        list(log.read())


def test_the_same_code_gives_the_same_rewards_and_advantages(renderer, trained):
    found = list(Replayer(rl_config(), ROWS, renderer).replay(0, trained))
    assert [f.rollout_id for f in found] == [f"7.0.{i}" for i in range(4)]
    assert [f.outcome_now for f in found] == [1.0, 0.0, 1.0, trained.groups[0].rollouts[3].outcome]
    assert not any(f.outcome_differs or f.reward_differs or f.advantages_differ for f in found)
    assert len(found[2].advantages_now) == 2 and found[0].advantages_now[0] > 0


def test_another_answer_changes_outcomes_rewards_and_the_advantages_of_all(renderer, trained):
    rows = {"r": ROWS["r"].model_copy(update={"answer": "3"})}
    found = list(Replayer(rl_config(), rows, renderer).replay(0, trained))
    assert [(f.outcome_then, f.outcome_now) for f in found[:3]] == [(1, 0), (0, 1), (1, 0)]
    assert [f.reward_differs for f in found] == [True, True, True, False]
    assert all(f.advantages_differ for f in found[:3])


def test_another_weight_changes_rewards_and_not_outcomes(renderer, trained):
    changed = rl_config(reward={"outcome": 2.0})
    found = list(Replayer(changed, ROWS, renderer).replay(0, trained))
    assert [f.reward_differs for f in found] == [True, False, True, False]
    assert not any(f.outcome_differs for f in found)


def test_another_credit_changes_advantages_alone(renderer, trained):
    found = list(Replayer(rl_config(credit={"type": "rloo"}), ROWS, renderer).replay(0, trained))
    assert not any(f.reward_differs for f in found) and all(f.advantages_differ for f in found)
    rewards = [s.reward for s in trained.groups[0].rollouts]
    own = rewards[1] - (sum(rewards) - rewards[1]) / 3
    assert found[1].advantages_now == pytest.approx((own,))


def test_what_needs_the_learner_of_then_is_not_told(renderer, trained):
    for needy in ({"credit": {"type": "turn_gae"}}, {"kl": {"placement": "reward"}}):
        config = rl_config(**needy)
        assert not rewards_tell(config) and credited(trained.groups, config) == {}
        replayer = Replayer(config, ROWS, renderer)
        found = list(replayer.replay(0, trained))
        assert all(f.advantages_now is None and not f.advantages_differ for f in found)


def test_an_unscored_sample_stays_unscored(renderer, trained):
    first, *others = trained.groups[0].rollouts
    unknown = replace(first, outcome=None, reward=None)
    group = replace(trained.groups[0], rollouts=(unknown, *others))
    found = list(Replayer(rl_config(), ROWS, renderer).replay(0, replace(trained, groups=(group,))))
    assert found[0].outcome_differs and found[0].reward_differs and found[0].outcome_now == 1.0


def test_a_row_that_is_gone_is_named(renderer, trained):
    with pytest.raises(ReplayError, match=r"row r was trained on .* data stage"):
        list(Replayer(rl_config(), {}, renderer).replay(0, trained))
