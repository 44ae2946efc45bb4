"""One rank of a learner in a process of its own, for the tests of several."""

import os
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import save_file

from configs.schema import PipelineConfig
from tasks.artifacts import write_json
from tasks.models.ranks import RankGroup
from tasks.rl.learner import Learner
from tasks.rl.types import Group


def first_moments(learner: Learner) -> dict[str, torch.Tensor]:
    """Adam's first moment of every trained weight, whole: (1 − β₁) × gradient after one step."""
    from deepspeed.utils import safe_get_full_optimizer_state

    module = learner._module
    named = [(n, p) for n, p in module.named_parameters() if p.requires_grad]
    if learner._engine._sharded:
        return {n: safe_get_full_optimizer_state(p, "exp_avg").clone() for n, p in named}
    state = learner._engine.state_tensors()
    return {n: state[f"{i}.exp_avg"] for i, (n, _) in enumerate(named)}


def run_rank(
    group: RankGroup,
    configs: dict[str, PipelineConfig],
    snapshot: tuple[Path, str],
    rows: Sequence,
    groups: Sequence[Group],
    out: Path,
) -> None:
    """Each config: one step, its moments; saved, taken back by a fresh learner, another step."""
    torch.set_num_threads(1)
    for name, config in configs.items():
        folder = out / name
        started_s = time.monotonic()
        learner = Learner(config, *snapshot, rows, threads=1, group=group)
        reports = [learner.train(groups, 0.1)]
        moments = first_moments(learner)
        hashes = learner.save(folder / "checkpoint")
        receipt = learner.publish(folder / "publish", 0)
        torch.distributed.barrier()
        resumed = Learner(config, *snapshot, rows, threads=1, group=group)
        again = resumed.load(folder / "checkpoint", 1)
        reports += [resumed.train(groups, 0.1), learner.train(groups, 0.1)]
        policy = resumed.save_policy(folder / "policy")
        after = [sorted(x.save(folder / kind).items()) for x, kind in
                 ((learner, "one"), (resumed, "two"))]  # fmt: skip
        if group.rank == 0:
            save_file(
                {k: v.contiguous() for k, v in moments.items()}, folder / "moments.safetensors"
            )
        write_json(
            folder / f"rank-{group.rank}.json",
            {
                "hashes": hashes, "again": again, "policy": policy, "same": after[0] == after[1],
                "published": receipt and receipt.sha256,
                "reports": [[r.learner_version, r.skipped, r.effective_samples,
                             {k: v for k, v in r.metrics.items() if k != "train_tokens_per_s"}]
                            for r in reports],
                "seconds": time.monotonic() - started_s,
            },
        )  # fmt: skip
    os._exit(0)  # gloo's threads may hang a process that ends the long way
