"""`rl-pipeline replay`: every sample a run trained on, graded again by the code of now."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from configs.load import load_config
from flows.report.data import RunFiles
from tasks.artifacts.atomic import write_jsonl
from tasks.environments.renderer import PromptRenderer
from tasks.environments.row import read_rows
from tasks.models.load import load_tokenizer
from tasks.rl.replay import Replayed, Replayer
from tasks.rl.sample_log import SAMPLES, SampleLog, rewards_tell

DIFFERENCES = "replay.jsonl"


class ReplayInputError(FileNotFoundError):
    """There is nothing to replay; says what is missing, and what to do."""


@dataclass
class ReplayResult:
    """What replaying a run gave."""

    run: str
    batches: int = 0
    samples: int = 0
    outcomes: int = 0
    """Samples the verifier now judges otherwise."""
    rewards: int = 0
    advantages: int | None = None
    """None: they cannot be told from rewards alone."""
    differences: list[Replayed] = field(default_factory=list)
    """Every sample of which anything differs."""

    def add(self, sample: Replayed) -> None:
        """Count a sample."""
        self.samples += 1
        self.outcomes += sample.outcome_differs
        self.rewards += sample.reward_differs
        if self.advantages is not None:
            self.advantages += sample.advantages_differ
        if sample.outcome_differs or sample.reward_differs or sample.advantages_differ:
            self.differences.append(sample)


def replay_run(
    run_dir: Path,
    overrides: Sequence[str] = (),
    progress: Callable[[int, int], None] = lambda done, of: None,
) -> ReplayResult:
    """Replay a finished run, under its own config with `overrides` laid over.

    Raises:
        ReplayInputError: no run, or its RL stage kept no samples.
        ConfigError: an override is wrong.
        TypedFileError: a file of samples is damaged.
        ReplayError: the run's data is not what it was.
    """
    files = RunFiles(run_dir)
    policy, data = files.folder("rl"), files.folder("data")
    if policy is None or data is None:
        gone = "rl" if policy is None else "data"
        raise ReplayInputError(
            f"{run_dir}: no output of the stage {gone}; give a finished run, as in runs/latest"
        )
    config = load_config(run_dir / "config.json", list(overrides))
    rows = {row.id: row for row in read_rows(data / "train.jsonl")}
    renderer = PromptRenderer(load_tokenizer(policy / "policy"), config.system_prompt)
    replayer = Replayer(config.rl, rows, renderer)
    log = SampleLog(policy / SAMPLES)
    batches = log.batches
    if not batches:
        raise ReplayInputError(
            f"{policy / SAMPLES} holds no samples: the run had rl.keep_samples=false, or was made "
            "by a version that kept none. Run its rl stage again: rl-pipeline run --force rl"
        )
    result = ReplayResult(run_dir.resolve().name)
    result.advantages = 0 if rewards_tell(config.rl) else None
    for number, samples in log.read():
        progress(result.batches, batches)
        for sample in replayer.replay(number, samples):
            result.add(sample)
        result.batches += 1
    return result


def write_differences(result: ReplayResult, path: Path) -> Path:
    """One JSON line for each sample that differs."""
    return write_jsonl(path, map(asdict, result.differences))
