"""RL: from the frozen snapshot to a policy, resumable at its last checkpoint."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from configs.schema import PipelineConfig
from configs.schema.rl_runtimes import InlineRuntime
from tasks.artifacts.atomic import write_json, write_jsonl
from tasks.artifacts.content_hash import hash_json
from tasks.artifacts.progress import Reporter
from tasks.artifacts.record import ArtifactRecord
from tasks.environments.row import Row, read_rows
from tasks.rl.checkpoint import Checkpoints
from tasks.rl.errors import NoPromptsError
from tasks.rl.exchange import slots_of
from tasks.rl.grader import weigh
from tasks.rl.ledger import SampleFate
from tasks.rl.loop import AsyncLoop
from tasks.rl.loop_state import LoopState
from tasks.rl.prompt_queue import PromptQueue
from tasks.rl.reward_gate import RewardGate
from tasks.rl.runtime.types import Runtime
from tasks.rl.sample_log import SAMPLES, SampleLog
from tasks.rl.types import Group, ScoredRollout

FINAL_BATCHES = 3
"""Batches sampled from the finished policy: the last for parity, the others for the imatrix."""


def run(
    config: PipelineConfig, inputs: Mapping[str, ArtifactRecord], out_dir: Path, report: Reporter
) -> ArtifactRecord:
    """Train, or go on training, and write `policy/`, `rollouts.jsonl`, ledger and summary."""
    return asyncio.run(_run(config, inputs, out_dir, report))


async def _run(
    config: PipelineConfig, inputs: Mapping[str, ArtifactRecord], out_dir: Path, report: Reporter
) -> ArtifactRecord:
    rows = training_rows(inputs["data"].path / "train.jsonl", config.data.rl_bands)
    snapshot, sha256 = inputs["sft"].path / "snapshot", inputs["sft"].sha256
    runtime = _runtime(config, snapshot, sha256, rows, out_dir)
    state = LoopState(
        config.rl, PromptQueue([row.id for row in rows], config.rl.seed), slots_of(runtime)
    )
    checkpoints = Checkpoints(
        out_dir / "checkpoints",
        {
            "config": hash_json(config.rl.model_dump(mode="json")),
            "snapshot": sha256,
            "data": inputs["data"].sha256,
        },
    )
    saved = checkpoints.latest()
    state.attempt = checkpoints.begin_attempt()
    if saved is not None:
        state.resume(saved)
        report.drop_metrics_after(saved.step)
    gate = RewardGate(config.rl, out_dir)
    gate.resume(state.learner_version)
    samples = SampleLog(out_dir / SAMPLES) if config.rl.keep_samples else None
    if samples is not None:
        samples.resume(len(state.trained))
    loop = AsyncLoop(
        config.rl, runtime, state, checkpoints, out_dir / "publish", report, gate, samples
    )
    try:
        await loop.run(saved)
        wall_s = loop.wall_s()  # the books close here: what follows is the stage's, not the loop's
        balance = state.ledger.balance(wall_s)
        final = await final_rollouts(config, runtime, state)
        policy_sha256 = await runtime.save_policy(out_dir)
    finally:
        await runtime.stop()
    write_jsonl(out_dir / "rollouts.jsonl", final)
    write_jsonl(out_dir / "trained_rows.jsonl", map(asdict, state.trained))
    summary = summarise(config, state) | {
        "reward_gate": gate.summary(),
        "ledger": {
            "seconds": state.ledger.seconds_by_state(),
            "wall_s": balance.wall_s,
            "slots": balance.slots,
            "miss_share": balance.miss_share,
            "balanced": balance.balanced,
        },
    }
    write_json(out_dir / "ledger.json", state.ledger.to_json(wall_s))
    write_json(out_dir / "summary.json", summary)
    return ArtifactRecord(kind="model", uri=out_dir.as_posix(), sha256=policy_sha256, meta=summary)


def training_rows(path: Path, bands: Sequence[str]) -> list[Row]:
    """The rows RL draws prompts from.

    Raises:
        NoPromptsError: the bands leave none.
    """
    rows = read_rows(path)
    chosen = [row for row in rows if not bands or row.band in bands]
    if not chosen:
        raise NoPromptsError(
            f"data.rl_bands={list(bands)} leaves no training row; the data has bands "
            f"{sorted({row.band for row in rows})}"
        )
    return chosen


def _runtime(
    config: PipelineConfig, snapshot: Path, sha256: str, rows: Sequence[Row], folder: Path
) -> Runtime:
    if isinstance(config.rl.runtime, InlineRuntime):
        from tasks.rl.runtime.inline import InlineRuntimeDriver

        return InlineRuntimeDriver(config, snapshot, sha256, rows)
    from tasks.rl.runtime.ray_runtime import RayDriver

    return RayDriver(config, snapshot, sha256, rows, folder)


async def final_rollouts(
    config: PipelineConfig, runtime: Runtime, state: LoopState
) -> list[dict[str, Any]]:
    """Sample the finished policy on fresh training prompts at temperature 1."""
    count = FINAL_BATCHES * config.rl.batch_size
    harvest = await runtime.play(0, state.queue.take(count), 1, 1.0)
    groups = await runtime.grade(0, harvest.rollouts)
    scored = [r for g in groups for r in _weighed(g, config)]
    parity_from = (FINAL_BATCHES - 1) * config.rl.batch_size
    return [
        rollout_line(r, "imatrix" if i < parity_from else "parity") for i, r in enumerate(scored)
    ]


def _weighed(group: Group, config: PipelineConfig) -> list[ScoredRollout]:
    return weigh(group.rollouts, config.rl.reward, config.rl.steps)


def rollout_line(scored: ScoredRollout, split: str) -> dict[str, Any]:
    """One line of `rollouts.jsonl`: ids, mask, turns and text of one rollout."""
    rollout = scored.rollout
    return {
        "rollout_id": rollout.rollout_id,
        "row_id": rollout.row_id,
        "split": split,
        "token_ids": list(rollout.token_ids),
        "action_mask": list(rollout.action_mask),
        "sampler_logprobs": list(rollout.sampler_logprobs),
        "turns": [
            {
                "start": t.start,
                "end": t.end,
                "stop_reason": t.stop_reason.value,
                "policy_version": list(t.policy_version),
            }
            for t in rollout.turns
        ],
        "messages": [dict(m) for m in rollout.messages],
        "reward": scored.reward,
        "outcome": scored.outcome,
        "temperature": rollout.temperature,
    }


def summarise(config: PipelineConfig, state: LoopState) -> dict[str, Any]:
    """The run's figures, over all its attempts."""
    meter, ledger = state.meter, state.ledger
    overlap, counts = meter.overlap, meter.counts
    episodes = counts["episodes"]
    return {
        "steps": state.learner_version,
        "samples": counts["samples"],
        "effective_samples": meter.effective_samples,
        "staleness_limit": config.rl.staleness_limit,
        "max_staleness_seen": meter.max_staleness_seen,
        "resumes": state.attempt,
        "skipped_steps": counts["skipped_steps"],
        "sync_proofs": counts["proofs"],
        "suspicious_batches": counts["suspicions"],
        "overlap_share": overlap.both_s / overlap.any_s if overlap.any_s else None,
        "prompts_dispatched": state.queue.dispatched,
        "dropped_share": ledger.share(SampleFate.DROPPED),
        "filtered_share": ledger.share(SampleFate.FILTERED),
        "carried_share": counts["carried_episodes"] / episodes if episodes else None,
        "tool_calls": counts["tool_calls"],
        "tool_timeouts": counts["tool_timeouts"],
        "abandoned_tool_calls": counts["abandoned_tool_calls"],
        "refused_samples": counts["refused_samples"],
        "overdue_plays": counts["overdue_plays"],
        "abandoned_prompts": counts["abandoned_prompts"],
        "worker_losses": counts["worker_losses"],
        "divergences": counts["divergences"],
    }
