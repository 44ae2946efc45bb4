"""One handle on the bounds of every loss, whatever their keys are called."""

from configs.schema.rl_losses import BandedWeights, DecoupledPpo, Loss, TruncatedWeights

_WIDTHS = frozenset({"clip_low", "clip_high"})
"""Distances from 1."""
_EDGES = frozenset({"cap", "low", "high"})
"""Ratios themselves."""


def scaled(config: Loss, share: float) -> Loss:
    """`config` with every bound at `share` of its distance from 1, and nothing left to anneal.

    The dual clip stays: it is there for the rare huge ratio, not for the width of a step.
    """
    changed: dict[str, object] = {**_scaled_bounds(config, share), "widening": None}
    if isinstance(config, DecoupledPpo):
        inner = config.correction
        changed["correction"] = inner.model_copy(update=_scaled_bounds(inner, share))
    return config.model_copy(update=changed)


def _scaled_bounds(
    config: Loss | TruncatedWeights | BandedWeights, share: float
) -> dict[str, float]:
    fields = type(config).model_fields
    widths = {name: getattr(config, name) * share for name in _WIDTHS & fields.keys()}
    edges = {name: 1 + (getattr(config, name) - 1) * share for name in _EDGES & fields.keys()}
    return widths | edges
