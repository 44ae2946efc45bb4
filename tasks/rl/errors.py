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


class RayImportedEarlyError(RlError, RuntimeError):
    """Ray read its settings, which it does at import, before the run had made them."""


class RewardGateError(RlError, RuntimeError):
    """Rewards failed their gate `rl.reward_gate.stop_after` cycles in a row."""


class StalledError(RlError, TimeoutError):
    """Somebody waited longer than `rl.stall_abort_s`; the message names the chain."""


class WorkerLostError(RlError, RuntimeError):
    """A rollout worker died or hangs; its prompts are reissued and a replacement is started."""

    def __init__(self, worker: int, reason: str) -> None:
        super().__init__(worker, reason)
        self.worker, self.reason = worker, reason

    def __str__(self) -> str:
        return f"rollout worker {self.worker} is lost: {self.reason}"


class TooManyWorkersLostError(RlError, RuntimeError):
    """More rollout workers died than `rl.runtime.max_worker_losses` allows."""


class LearnerLostError(RlError, RuntimeError):
    """The learner, or a rank of it, died: the stage goes on from its last checkpoint."""


class RefillLimitError(RlError, RuntimeError):
    """Dynamic sampling threw away more groups than `rl.max_refill_factor` allows."""


class RewardShapeError(RlError, ValueError):
    """A grader did not answer for the samples it was given, one reward each."""


class ReplayError(RlError, ValueError):
    """A run's rewards cannot be replayed: something they were made from is gone."""
