"""The alarm's remedies reach what they are about: publishes, admission, the loss's bounds."""

from dataclasses import replace

import pytest
from loop_run import Run
from sleepy_runtime import SleepyRuntime


@pytest.mark.parametrize("act", [True, False])
def test_large_weights_publish_sooner_admit_less_and_tighten(tiny_config, tmp_path, act):
    # Weights of 99 from the first step on, published every second step at first (η = 2).
    runtime = SleepyRuntime(2, 1, {"play": 0.001, "train": 0.001})
    train, publish, tightness, published = runtime.train, runtime.publish, [], []

    async def large(groups, kl, lr_scale=1.0, tight=1.0):
        tightness.append(tight)
        report = await train(groups, kl, lr_scale)
        return replace(report, metrics=report.metrics | {"weight_max": 99.0})

    async def noted(root, attempt):
        published.append(runtime.learner_version)
        return await publish(root, attempt)

    runtime.train, runtime.publish = large, noted
    settings = {
        "steps": 6,
        "staleness_limit": 2,
        "publish": {"start": 2, "end": 2},
        "runtime": {"type": "ray", "rollout_workers": 1},
        "weight_alarm": {"act": act, "cooldown_steps": 1, "budget": 1},
    }
    run = Run(tiny_config(rl=settings), runtime, tmp_path).go()
    # Step 1 alarms: publish sooner; step 2: admit less; step 3: tighten, from step 4 on.
    assert tightness == ([1, 1, 1, 0.5, 0.5, 0.5] if act else [1.0] * 6)
    assert published == ([0, 1, 2, 3, 4, 5, 6] if act else [0, 2, 4, 6])
    assert run.state.alarm.admission_limit(2, 0) == (1 if act else 2)
    assert max(runtime.ages) <= 2
