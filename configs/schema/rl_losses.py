"""Policy losses: a tagged union whose members carry the defaults of their sources.

μ is the policy that sampled a token, π_p the learner at the step's start (the proximal policy), π_θ
the learner now. Every bound is a distance from 1, the ratio at which nothing has changed.
"""

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from configs.schema.base import Config

Aggregation = Literal["token_mean", "sequence_mean", "constant"]
"""`token_mean` counts every token alike (arXiv 2503.14476), `sequence_mean` every sample alike
(arXiv 2402.03300), `constant` divides by batch × max_new_tokens (Dr. GRPO, arXiv 2503.20783)."""


class GeometricReject(Config):
    """Leave a sample out whose geometric mean of π_p/μ lies outside the band.

    Only tokens count that the learner's present version sampled: there the ratio is the mismatch
    of two engines, elsewhere it is also what was learnt since.
    """

    low: float = Field(0.99, gt=0, lt=1)
    high: float = Field(1.01, gt=1)


class ClipWidening(Config):
    """Bounds go linearly from one share of their width to another: settle first, then let go."""

    start: float = Field(0.5, gt=0)
    end: float = Field(1.0, gt=0)
    over_steps: int = Field(100, ge=1)
    """Optimiser steps."""


class PolicyLoss(Config):
    """What every policy loss has."""

    aggregation: Aggregation = "token_mean"
    """`constant` divides by batch × max_new_tokens (Dr. GRPO); all denominators are global."""
    geometric_reject: GeometricReject | None = None
    """Drop samples whose two engines disagree; 0.99 to 1.01 is usual. null keeps all."""
    widening: ClipWidening | None = None
    """Anneal the bounds from narrow to wide; null keeps them."""

    @model_validator(mode="before")
    @classmethod
    def _weighted_once(cls, data: Any) -> Any:
        given = isinstance(data, dict) and data.get("correction") is not None
        if given and "correction" not in cls.model_fields:
            raise ValueError(
                f"rl.loss.correction={data['correction']} with rl.loss.type={data.get('type')}: "
                "its ratio is π_θ/μ and corrects for the sampler already, a second weight would "
                "do so twice; remove rl.loss.correction, or set rl.loss.type=decoupled_ppo"
            )
        return data


class PpoBounds(PolicyLoss):
    """The bounds of PPO's clipped surrogate."""

    clip_low: float = Field(0.2, gt=0, lt=1)
    """The ratio pushes down to 1 minus this."""
    clip_high: float = Field(0.28, gt=0)
    """The ratio pushes up to 1 plus this."""
    dual_clip: float | None = Field(3.0, gt=1)
    """Largest ratio that pushes a bad token down (arXiv 1912.09729); null leaves it open."""


class PpoClip(PpoBounds):
    """PPO clip on π_θ/μ with clip-higher and dual clip (arXiv 1707.06347, 2503.14476)."""

    type: Literal["ppo_clip"] = "ppo_clip"


class PpoSymmetric(PpoBounds):
    """Preset of `ppo_clip`: the ratio stays in [0.8, 1.2]."""

    type: Literal["ppo_symmetric"] = "ppo_symmetric"
    clip_high: float = Field(0.2, gt=0)
    """The ratio pushes up to 1 plus this."""


class PpoWidening(PpoBounds):
    """Preset of `ppo_clip`: the ratio stays in [0.9, 1.1] at first, in [0.8, 1.2] later."""

    type: Literal["ppo_widening"] = "ppo_widening"
    clip_high: float = Field(0.2, gt=0)
    """The ratio pushes up to 1 plus this."""
    widening: ClipWidening | None = ClipWidening()


class TruncatedWeights(Config):
    """Importance weights cut off at `cap`: some bias for bounded variance (arXiv 1802.01561)."""

    type: Literal["tis"] = "tis"
    level: Literal["token", "sequence"] = "token"
    """`sequence` weighs a whole sample by the product of its ratios."""
    cap: float = Field(2.0, gt=1)
    """Largest weight."""


class BandedWeights(Config):
    """Importance weights inside a band, nothing outside it (IcePop, arXiv 2510.18855)."""

    type: Literal["icepop"] = "icepop"
    low: float = Field(0.5, ge=0, lt=1)
    """Smallest weight that trains."""
    high: float = Field(5.0, gt=1)
    """Largest weight that trains."""


Correction = Annotated[TruncatedWeights | BandedWeights, Field(discriminator="type")]


class DecoupledPpo(PpoBounds):
    """sg(weight of π_p/μ) × PPO clip on π_θ/π_p (arXiv 2505.24298)."""

    type: Literal["decoupled_ppo"] = "decoupled_ppo"
    proximal: Literal["exact", "interpolated"] = "exact"
    """`exact` scores the batch once more where a batch trains several steps; `interpolated` puts
    log π_p between log μ and log π_θ by their versions, without a forward pass."""
    correction: Correction = TruncatedWeights()
    """What becomes of the weight π_p/μ."""

    @model_validator(mode="after")
    def _mismatch_measurable(self) -> "DecoupledPpo":
        if self.geometric_reject is not None and self.proximal == "interpolated":
            raise ValueError(
                "rl.loss.geometric_reject with rl.loss.proximal=interpolated: an interpolated π_p "
                "equals μ on tokens of the present version, so there is no mismatch to measure; "
                "use rl.loss.proximal=exact or rl.loss.geometric_reject=null"
            )
        return self


class Tis(TruncatedWeights, PolicyLoss):
    """Policy gradient weighted by sg(min(π_θ/μ, cap)); no clip (arXiv 1802.01561)."""

    type: Literal["tis"] = "tis"


class IcePop(BandedWeights, PolicyLoss):
    """Policy gradient weighted by sg(π_θ/μ) inside a band, masked outside (arXiv 2510.18855)."""

    type: Literal["icepop"] = "icepop"


class Cispo(PolicyLoss):
    """Policy gradient weighted by sg(clip(π_θ/μ)): no token falls silent (arXiv 2506.13585)."""

    type: Literal["cispo"] = "cispo"
    clip_low: float = Field(1.0, gt=0, le=1)
    """Weights rise to 1 minus this; 1 leaves small ones as they are."""
    clip_high: float = Field(4.0, gt=0)
    """Weights fall to 1 plus this."""


class Gspo(PolicyLoss):
    """PPO clip on the geometric mean of a sample's ratios (arXiv 2507.18071)."""

    type: Literal["gspo"] = "gspo"
    clip_low: float = Field(3e-4, gt=0, lt=1)
    """A sample's ratio pushes down to 1 minus this."""
    clip_high: float = Field(4e-4, gt=0)
    """A sample's ratio pushes up to 1 plus this."""
    aggregation: Aggregation = "sequence_mean"


Loss = Annotated[
    PpoClip | PpoSymmetric | PpoWidening | DecoupledPpo | Cispo | Gspo | IcePop | Tis,
    Field(discriminator="type"),
]


class WeightAlarmConfig(Config):
    """What to do about large importance weights π_θ/μ, whatever the loss."""

    threshold: float = Field(10.0, gt=1)
    """A token's weight above this alarms."""
    cooldown_steps: int = Field(10, ge=1)
    """Optimiser steps between two alarms, so that a remedy can act."""
    act: bool = False
    """Apply the remedies, in order: publish twice as often, let samples wait one step less, halve
    the loss's bounds. false only names them."""
    budget: int = Field(2, ge=1)
    """How often each remedy may be applied in a run."""


def takes_several_steps(loss: Loss) -> bool:
    """Whether a batch may train more than one optimiser step: the clip must be around π_p."""
    return isinstance(loss, DecoupledPpo)
