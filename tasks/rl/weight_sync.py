"""Publish weights to the engines, and prove that they arrived.

A publish is a folder: weights as safetensors, and a STABLE marker written last that names attempt,
step and hash. Its receipt carries the canary: log-probabilities of a few fixed sequences under the
new weights and under the ones before. An engine proves itself by the hash of its own memory and by
scores that lie nearer to the new version than to the old one. A fixed tolerance would prove
nothing: one publish at a small learning rate moves less than bf16 noise.
"""

import json
import logging
import math
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from tasks.artifacts.atomic import write_json
from tasks.artifacts.content_hash import hash_tensors
from tasks.models.weights_file import write_weights
from tasks.rl.errors import SyncProofError
from tasks.sampling.types import PolicyVersion

logger = logging.getLogger(__name__)

MARKER = "STABLE.json"
WEIGHTS = "weights.safetensors"
TOLERANCE = 0.05
"""Nats per token, root mean square: further off, engine and learner compute different models."""
NOISE_ROOM = 3.0
"""Times the engine's own noise that scores may lie off."""
NOISE_SIGMAS = 5.0
"""By so much the old weights must explain scores better before the canary speaks against them."""


@dataclass(frozen=True)
class Canary:
    """Fixed sequences and what each version says of them, nats, all tokens in one row."""

    sequences: tuple[tuple[int, ...], ...]
    logprobs: tuple[float, ...]
    previous_logprobs: tuple[float, ...] | None = None


@dataclass(frozen=True)
class Receipt:
    """One finished publish."""

    folder: Path
    version: PolicyVersion
    sha256: str
    canary: Canary

    @property
    def weights(self) -> Path:
        """The safetensors file."""
        return self.folder / WEIGHTS


def publish(
    root: Path,
    version: PolicyVersion,
    tensors: Mapping[str, torch.Tensor],
    canary: Canary,
    keep: int,
) -> Receipt:
    """Write weights, fsync, then the marker; keep the newest `keep` publishes."""
    sha256 = hash_tensors(tensors)
    folder = root / f"{version.attempt}-{version.step}-{sha256[:8]}"
    write_weights(folder / WEIGHTS, tensors)
    write_json(
        folder / MARKER,
        {"attempt": version.attempt, "step": version.step, "sha256": sha256},
        lasting=False,  # whoever comes after a power cut publishes anew
    )
    _forget_older(root, keep)
    return Receipt(folder, version, sha256, canary)


def _forget_older(root: Path, keep: int) -> None:
    """Remove all but the newest publishes, and what was never finished."""
    finished = []
    for folder in (path for path in root.iterdir() if path.is_dir()):
        version = _finished(folder)
        if version is not None:
            finished.append((version, folder))
        else:
            logger.warning("%s has no whole %s: it was never finished, removed", folder, MARKER)
            shutil.rmtree(folder)
    for _, folder in sorted(finished)[:-keep]:
        shutil.rmtree(folder)


def _finished(folder: Path) -> PolicyVersion | None:
    """Which version a publish is of; None where its marker is not there or not whole."""
    try:
        marker = json.loads((folder / MARKER).read_bytes())
        return PolicyVersion(int(marker["attempt"]), int(marker["step"]))
    except (OSError, ValueError, TypeError, KeyError):
        return None


@dataclass(frozen=True)
class SyncProof:
    """What an engine showed after a publish."""

    version: PolicyVersion
    distance: float
    """Root mean square to the new version's canary scores, nats."""
    previous_distance: float | None


def prove(
    receipt: Receipt,
    read_back_sha256: str,
    scores: Sequence[Sequence[float]],
    noise: float = 0.0,
) -> SyncProof:
    """Check an engine's read-back hash and canary scores against a publish.

    `noise` is what an engine with kernels of its own is off by with the right weights, nats, root
    mean square. In bfloat16 that is more than one publish moves: there the hash decides, and the
    canary speaks where new and old weights differ enough to be told apart.

    Raises:
        SyncProofError: another hash, scores that are not finite or too few, far from the new
            weights, or nearer to the weights before; or a canary that can prove nothing.
    """
    name = f"publish {receipt.version.attempt}/{receipt.version.step}"
    if read_back_sha256 != receipt.sha256:
        raise SyncProofError(
            f"{name}: the engine holds weights {read_back_sha256[:12]}, published were "
            f"{receipt.sha256[:12]}; no step trains on its samples. Resume to publish again"
        )
    _require_canary(name, receipt.canary)
    flat = [x for row in scores for x in row]
    if len(flat) != len(receipt.canary.logprobs) or not all(map(math.isfinite, flat)):
        raise SyncProofError(
            f"{name}: the engine scored {len(flat)} canary tokens, "
            f"{len(receipt.canary.logprobs)} finite ones were expected"
        )
    distance = _rms(flat, receipt.canary.logprobs)
    tolerance = max(TOLERANCE, NOISE_ROOM * noise)
    if distance > tolerance:
        raise SyncProofError(
            f"{name}: canary scores are {distance:.4f} nats off, expected at most {tolerance:g}; "
            "engine and learner do not compute the same model"
        )
    previous = receipt.canary.previous_logprobs
    if previous is None or tuple(previous) == tuple(receipt.canary.logprobs):
        return SyncProof(receipt.version, distance, None)
    previous_distance = _rms(flat, previous)
    # how far the scores lie beyond the middle between both, along the line that joins them; noise
    # there has the standard deviation `noise`, for that line is one direction out of many
    moved = _rms(previous, receipt.canary.logprobs) * math.sqrt(len(flat))
    beyond = len(flat) * (distance**2 - previous_distance**2) / (2 * moved)
    if beyond >= NOISE_SIGMAS * noise:
        raise SyncProofError(
            f"{name}: canary scores lie {distance:.3g} nats from the new weights and "
            f"{previous_distance:.3g} from the ones before; the publish did not take effect"
        )
    return SyncProof(receipt.version, distance, previous_distance)


def _require_canary(name: str, canary: Canary) -> None:
    """Refuse a canary that no comparison can fail against: NaN is never far from anything."""
    own, previous = canary.logprobs, canary.previous_logprobs
    if not own or not all(map(math.isfinite, own)):
        raise SyncProofError(
            f"{name}: {sum(map(math.isfinite, own))} of the learner's own {len(own)} canary scores "
            "are finite, expected all of at least one; its weights are broken: resume from an "
            "earlier checkpoint or lower the learning rate"
        )
    if previous is not None and (
        len(previous) != len(own) or not all(map(math.isfinite, previous))
    ):
        raise SyncProofError(
            f"{name}: the canary scores of the weights before are {len(previous)}, "
            f"{sum(map(math.isfinite, previous))} of them finite; expected {len(own)}. Resume to "
            "publish again"
        )


def _rms(left: Sequence[float], right: Sequence[float]) -> float:
    return math.dist(left, right) / math.sqrt(len(left))
