"""Errors that stop the engine; every one of them leaves a checkpoint to resume from."""


class RlError(Exception):
    """Base of what can stop RL."""


class ReferenceMismatchError(RlError, ValueError):
    """The snapshot on disk is not the one whose hash was recorded (A6)."""


class SyncProofError(RlError, RuntimeError):
    """An engine does not hold the weights that were published to it."""


class NothingToLearnError(RlError, RuntimeError):
    """Batch after batch had no solved problem."""


class NoPromptsError(RlError, ValueError):
    """There is no training row to draw prompts from."""


class CheckpointMismatchError(RlError, ValueError):
    """A checkpoint belongs to another config, snapshot or world size, or is damaged."""


class EngineUnavailableError(RlError, RuntimeError):
    """The configured engine or runtime cannot run on this machine."""


class RewardGateError(RlError, RuntimeError):
    """Rewards failed their gate `rl.reward_gate.stop_after` cycles in a row."""
