"""The real flow over the tiny stages, as a worker imports it."""

import tiny_stages

from tasks import stages

stages.STAGES.update(tiny_stages.specs())
stages.BESIDE.update(tiny_stages.beside_specs())

from flows.pipeline import rl_pipeline  # noqa: E402 - the stages must be in place first

__all__ = ["rl_pipeline"]
