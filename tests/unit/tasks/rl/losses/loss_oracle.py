"""Every policy loss once more, in plain Python and token by token, to hold the tensors against.

What a loss treats as a constant (`sg`) is computed from `frozen`, what it differentiates from
`learner`; moving `learner` alone gives finite differences of exactly the function whose gradient
the loss promises.
"""

from dataclasses import dataclass, field
from math import exp, log

import torch

from configs.schema.rl_losses import (
    Cispo,
    DecoupledPpo,
    GeometricReject,
    Gspo,
    IcePop,
    PpoClip,
    PpoSymmetric,
    PpoWidening,
    Tis,
)
from tasks.rl.losses import StepVersions, policy_loss
from tasks.rl.types import TrainBatch

ICEPOP = {"type": "icepop"}
BY_SAMPLE = {"type": "tis", "level": "sequence"}
LOSSES = {
    "ppo_clip": PpoClip(),
    "ppo_clip_no_dual": PpoClip(dual_clip=None),
    "ppo_clip_constant": PpoClip(aggregation="constant"),
    "ppo_symmetric": PpoSymmetric(),
    "ppo_widening": PpoWidening(),
    "decoupled": DecoupledPpo(),
    "decoupled_icepop": DecoupledPpo(correction=ICEPOP, aggregation="sequence_mean"),
    "decoupled_by_sample": DecoupledPpo(correction=BY_SAMPLE),
    "decoupled_interpolated": DecoupledPpo(proximal="interpolated"),
    "decoupled_reject": DecoupledPpo(geometric_reject=GeometricReject(low=0.9, high=1.1)),
    "cispo": Cispo(),
    "cispo_narrow": Cispo(clip_low=0.1, clip_high=0.1),
    "gspo": Gspo(),
    "gspo_wide": Gspo(clip_low=0.1, clip_high=0.1),
    "gspo_token_mean": Gspo(clip_low=0.1, clip_high=0.1, aggregation="token_mean"),
    "icepop": IcePop(),
    "icepop_reject": IcePop(geometric_reject=GeometricReject(low=0.9, high=1.1)),
    "tis": Tis(),
    "tis_constant": Tis(cap=1.1, aggregation="constant"),
    "tis_by_sample": Tis(level="sequence", aggregation="sequence_mean"),
}
"""Every member of the union, and every branch within one."""


@dataclass
class Example:
    """A batch as nested lists of floats, each row with its own mask."""

    learner: list[list[float]]
    sampler: list[list[float]]
    advantages: list[list[float]]
    mask: list[list[bool]]
    steps: list[list[int]] | None = None
    proximal: list[list[float]] | None = None
    versions: StepVersions = field(default_factory=lambda: StepVersions(3, 3))
    dtype: torch.dtype = torch.float64
    extra: dict = field(default_factory=dict)

    def batch(self) -> TrainBatch:
        mask = torch.tensor(self.mask, dtype=torch.bool).reshape(len(self.mask), -1)
        steps = [[self.versions.proximal] * len(r) for r in self.mask]
        return TrainBatch(
            token_ids_B_T=torch.ones(mask.shape, dtype=torch.int64),
            valid_B_T=torch.ones_like(mask),
            action_mask_B_T=mask,
            sampler_logprobs_B_T=torch.tensor(self.sampler, dtype=self.dtype),
            advantages_B_T=torch.tensor(self.advantages, dtype=self.dtype),
            temperature_B=torch.ones(len(self.mask)),
            sampler_steps_B_T=torch.tensor(self.steps or steps),
            **self.extra,
        )

    def run(self, config, denominator: float):
        """(loss, gradient as nested lists, metrics) of the real loss."""
        learner = torch.tensor(self.learner, dtype=self.dtype, requires_grad=True)
        proximal = None if self.proximal is None else torch.tensor(self.proximal, dtype=self.dtype)
        output = policy_loss(
            learner, self.batch(), config, denominator, proximal, versions=self.versions
        )
        output.loss.backward()
        return output.loss.item(), learner.grad, output.metrics


def oracle(example: Example, config, denominator: float, learner, frozen) -> float:
    """The loss in plain Python."""
    total = 0.0
    for i, mask in enumerate(example.mask):
        places = [t for t, trained in enumerate(mask) if trained]
        if not places or _rejected(example, config, i, places, frozen):
            continue
        share = 1 / len(places) if config.aggregation == "sequence_mean" else 1.0
        total += share * sum(_objectives(example, config, i, places, learner, frozen))
    return -total / denominator


def _objectives(example, config, i, places, learner, frozen):
    advantage, mu = example.advantages[i], example.sampler[i]
    ratio = {t: exp(learner[i][t] - mu[t]) for t in places}
    held = {t: exp(frozen[i][t] - mu[t]) for t in places}
    if isinstance(config, DecoupledPpo):
        log_p = {t: _proximal(example, config, i, t, frozen) for t in places}
        weight = _weights(config.correction, {t: exp(log_p[t] - mu[t]) for t in places})
        return [
            weight[t] * _clip(exp(learner[i][t] - log_p[t]), advantage[t], config) for t in places
        ]
    if isinstance(config, Gspo):
        # The sequence objective itself; the same for each token where advantages are.
        s = exp(sum(log(r) for r in ratio.values()) / len(places))
        return [_clip(s, advantage[t], config) for t in places]
    if isinstance(config, Cispo):
        low, high = 1 - config.clip_low, 1 + config.clip_high
        weight = {t: min(max(r, low), high) for t, r in held.items()}
    elif isinstance(config, Tis | IcePop):
        weight = _weights(config, held)
    else:
        return [_clip(ratio[t], advantage[t], config) for t in places]
    return [weight[t] * advantage[t] * learner[i][t] for t in places]


def _proximal(example, config, i, t, frozen):
    if config.proximal == "interpolated":
        taken, now = example.versions.proximal, example.versions.learner
        v_mu = example.steps[i][t] if example.steps else taken
        alpha = 1.0 if now == v_mu else (taken - v_mu) / (now - v_mu)
        return example.sampler[i][t] + alpha * (frozen[i][t] - example.sampler[i][t])
    return frozen[i][t] if example.proximal is None else example.proximal[i][t]


def _weights(config, raw):
    if config.type == "icepop":
        return {t: (r if config.low <= r <= config.high else 0.0) for t, r in raw.items()}
    if config.level == "sequence":
        product = exp(sum(log(r) for r in raw.values()))
        return dict.fromkeys(raw, min(product, config.cap))
    return {t: min(r, config.cap) for t, r in raw.items()}


def _clip(ratio, advantage, config):
    bounded = min(max(ratio, 1 - config.clip_low), 1 + config.clip_high)
    objective = min(ratio * advantage, bounded * advantage)
    if advantage < 0 and getattr(config, "dual_clip", None) is not None:
        objective = max(objective, config.dual_clip * advantage)
    return objective


def _rejected(example, config, i, places, frozen):
    band = config.geometric_reject
    if band is None:
        return False
    steps = example.steps[i] if example.steps else [example.versions.proximal] * len(frozen[i])
    present = [t for t in places if steps[t] == example.versions.proximal]
    if not present:
        return False
    reference = frozen if example.proximal is None else example.proximal
    mean = sum(reference[i][t] - example.sampler[i][t] for t in present) / len(present)
    return not band.low <= exp(mean) <= band.high
