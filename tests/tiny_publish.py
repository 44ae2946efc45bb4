"""A real learner and a real worker on the tiny model, for tests of publishing."""

import asyncio
from pathlib import Path

import pytest
import torch

from tasks.models.trainable import load_trainable, trainable_tensors
from tasks.rl.learner import Learner
from tasks.rl.rollout_worker import RolloutWorker
from tasks.rl.weight_sync import Receipt, SyncProof


class Pair:
    """A real learner and a real worker, and weights that move as an Adam step moves them."""

    def __init__(self, learner: Learner, worker: RolloutWorker, root: Path, lr: float) -> None:
        self.learner, self.worker, self.root, self.lr = learner, worker, root, lr
        self._generator = torch.Generator().manual_seed(1)

    def step(self) -> None:
        """Every weight moves by the learning rate, up or down."""
        moved = {}
        for name, tensor in trainable_tensors(self.learner._module.model).items():
            sign = torch.randn(tensor.shape, generator=self._generator).sign()
            moved[name] = (tensor.float() + self.lr * sign).to(tensor.dtype)
        load_trainable(self.learner._module.model, moved)
        self.learner._engine.steps_taken += 1

    def publish(self) -> Receipt:
        return self.learner.publish(self.root, attempt=0)

    def sync(self, receipt: Receipt) -> SyncProof:
        """Give the worker a publish, as the loop does."""
        return asyncio.run(self.worker.sync(receipt))


@pytest.fixture
def pair(tiny_config, tiny_snapshot, tiny_data, tmp_path):
    def build(lr: float, dtype: str) -> Pair:
        config = tiny_config(rl={"deepspeed": {"dtype": dtype}})
        learner = Learner(config, tiny_snapshot.folder, tiny_snapshot.sha256, tiny_data.rows)
        worker = RolloutWorker(config, tiny_snapshot.folder, tiny_data.rows)
        return Pair(learner, worker, tmp_path / "publish", lr)

    return build
