"""Errors of sampling."""


class SamplingError(Exception):
    """Base of what an engine refuses."""


class PromptTooLongError(SamplingError, ValueError):
    """A prompt is empty or fills the whole context."""


class NonFiniteLogitsError(SamplingError, ArithmeticError):
    """The model's output is NaN or infinite."""


class FixedPolicyError(SamplingError, TypeError):
    """This engine's weights cannot be replaced."""


class AnswerRefusedError(SamplingError, ValueError):
    """An engine's answer cannot be trained on: its episode is left out, counted and shown."""
