"""A publish that goes wrong stops training before a step; 500 that go right raise no alarm."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from tasks.artifacts import hash_tensors
from tasks.artifacts.progress import Reporter, read_metrics
from tasks.models.errors import WeightsMismatchError
from tasks.models.trainable import trainable_tensors
from tasks.rl.errors import SyncProofError
from tasks.rl.stage import run
from tasks.sampling.transformers_engine import TransformersEngine
from tasks.sampling.types import PolicyVersion
from tests.figures.record import record
from tests.tiny_publish import pair
from tests.tiny_run import tiny_config, tiny_data, tiny_snapshot

__all__ = ["pair", "tiny_config", "tiny_data", "tiny_snapshot"]

pytestmark = [pytest.mark.faults, pytest.mark.timeout(1800)]
AT = 2
"""Optimiser steps before the publish that goes wrong."""
RATES = (5e-6, 1e-5)
DTYPES = ("float32", "bfloat16")
HEALTHY = 500
Load = Callable[[TransformersEngine, Path, PolicyVersion], str]


def withheld(load: Load, engine: TransformersEngine, weights: Path, version: PolicyVersion) -> str:
    """The engine keeps what it has; the hash is that of its memory, as always."""
    return hash_tensors(trainable_tensors(engine.model))


def truncated(load: Load, engine: TransformersEngine, weights: Path, version: PolicyVersion) -> str:
    """The file on disk lost its end."""
    weights.write_bytes(weights.read_bytes()[:-7])
    return load(engine, weights, version)


def swapped(load: Load, engine: TransformersEngine, weights: Path, version: PolicyVersion) -> str:
    """The file is that of another publish: whole, of the right shapes, and older."""
    others = [p for p in weights.parent.parent.glob(f"*/{weights.name}") if p != weights]
    shutil.copyfile(others[0], weights)
    return load(engine, weights, version)


class Seen(NamedTuple):
    """What a run did before it stopped."""

    error: str
    steps: int
    unproven_samples: int


@pytest.fixture
def stopped(tiny_config, tiny_data, tiny_snapshot, tmp_path, monkeypatch):
    """Run the stage with one bad publish; what it did."""

    def go(harm: Callable[..., str], lr: float, dtype: str) -> Seen:
        load, generate = TransformersEngine.load_policy, TransformersEngine.generate
        bad, after = [], []

        def loading(engine, weights, version):
            if version.step != AT:
                return load(engine, weights, version)
            bad.append(version)
            return harm(load, engine, weights, version)

        def generating(engine, requests):
            after.extend(requests if bad else [])
            return generate(engine, requests)

        out = tmp_path / f"{harm.__name__}-{lr}-{dtype}"
        config = tiny_config(
            rl={"steps": 6, "optimiser": {"lr": lr}, "deepspeed": {"dtype": dtype}}
        )
        with monkeypatch.context() as patch:
            patch.setattr(TransformersEngine, "load_policy", loading)
            patch.setattr(TransformersEngine, "generate", generating)
            with pytest.raises((SyncProofError, WeightsMismatchError)) as caught:
                inputs = {"data": tiny_data.record, "sft": tiny_snapshot.record}
                run(config, inputs, out, Reporter(out))
        return Seen(str(caught.value), len(read_metrics(out / "metrics.jsonl")), len(after))

    return go


@pytest.mark.figure("sync_proofs")
def test_bad_publishes_stop_training_and_healthy_ones_do_not(stopped, pair):
    expected = {
        withheld: "the engine holds weights",
        truncated: "not a whole safetensors file",
        swapped: "the engine holds weights",
    }
    caught, missed = [], {}
    for harm, message in expected.items():
        for dtype in DTYPES:
            for lr in RATES:
                name = f"{harm.__name__}, {dtype}, {lr:g}"
                seen = stopped(harm, lr, dtype)
                if message in seen.error and seen.steps <= AT and not seen.unproven_samples:
                    caught.append(name)
                else:
                    missed[name] = str(seen)
    alarms, proofs = [], 0
    for dtype in DTYPES:
        for lr in RATES:
            both = pair(lr, dtype)
            both.root = both.root / f"{dtype}-{lr:g}"
            for step in range(HEALTHY // 4):
                try:
                    both.sync(both.publish())
                    proofs += 1
                except SyncProofError as error:
                    alarms.append(f"{dtype}, {lr:g}, publish {step}: {error}")
                both.step()
    record(
        "sync_proofs",
        value=len(caught) / (len(caught) + len(missed)),
        met=not missed and not alarms and proofs == HEALTHY,
        note=f"{proofs} healthy publishes, {len(alarms)} false alarms; steps after a bad one: 0",
        details={"caught": caught, "missed": missed, "false_alarms": alarms},
    )
    assert not missed and not alarms and proofs == HEALTHY
