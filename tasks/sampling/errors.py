"""Errors of sampling."""


class SamplingError(Exception):
    """Base of what an engine refuses."""


class PromptTooLongError(SamplingError, ValueError):
    """A prompt is empty or fills the whole context."""


class ForeignPromptError(SamplingError, ValueError):
    """A prompt has a token that the model does not know."""


class SamplingParamsError(SamplingError, ValueError):
    """Nothing can be drawn the way that is asked."""


class NonFiniteLogitsError(SamplingError, ArithmeticError):
    """The model's output is NaN or infinite."""


class FixedPolicyError(SamplingError, TypeError):
    """This engine's weights cannot be replaced."""


class AnswerRefusedError(SamplingError, ValueError):
    """An engine's answer cannot be trained on: its episode is left out, counted and shown."""


class EngineStartError(SamplingError, RuntimeError):
    """An engine cannot start here, or did not come up."""


class EngineDiedError(SamplingError, RuntimeError):
    """The process that samples is gone."""


class WeightsReadBackError(SamplingError, RuntimeError):
    """An engine's workers hold other weights than each other, or than those they loaded."""


class ScoreTemperatureError(SamplingError, ValueError):
    """This engine cannot score at that temperature."""
