"""Settings of data prep: where rows come from, how they are read, split and gated."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from configs.schema.base import Config, Seed


class CalculatorSource(Config):
    """Generated arithmetic problems in three difficulty bands; needs no file and no network."""

    type: Literal["calculator"] = "calculator"
    train_rows: int = Field(8192, ge=1)
    """Distinct training problems."""
    heldout_rows: int = Field(2048, ge=1)
    """Distinct held-out problems, none of them in training."""
    tool_share: float = Field(0.2, ge=0, le=1)
    """Of the demonstrations that begin with the problem, the share that calls the calculator; the
    others answer at once."""
    answer_share: float = Field(0.0, ge=0, lt=1)
    """Share of demonstrations that begin after the calculator has answered: only how to pass its
    result on is learnt, not when to call it."""
    demonstrations: int = Field(24576, ge=1)
    """SFT demonstrations, drawn from the training problems (a problem may be shown both ways)."""


class Mapping(Config):
    """Which columns of a user's file hold what; leave a field out to have it recognised."""

    prompt: str | None = None
    answer: str | None = None
    id: str | None = None
    band: str | None = None
    messages: str | None = None
    solution: str | None = None
    """Column with a worked solution; SFT trains on it."""


class FileSource(Config):
    """JSONL or Parquet files; `prompt`/`answer`, GSM8K and chat `messages` are recognised."""

    type: Literal["file"] = "file"
    train: str
    """Path of the training file, relative to the working directory, or a public dataset id."""
    heldout: str | None = None
    """Path of the held-out file; without one, `heldout_share` of the training rows is kept."""
    heldout_share: float = Field(0.1, gt=0, lt=1)
    max_train_rows: int | None = Field(None, ge=1)
    max_heldout_rows: int | None = Field(None, ge=1)
    mapping: Mapping = Mapping()
    answer_kind: Literal["number", "code", "math", "text"] = "number"
    """How answers are compared: `033` equals `33` as a number, not as a code."""


class ReasoningGymSource(Config):
    """Problems from a reasoning-gym generator."""

    type: Literal["reasoning_gym"] = "reasoning_gym"
    dataset: str = "chain_sum"
    """Name of the generator in the `reasoning_gym` package."""
    options: dict[str, int | float | str | bool] = {}
    train_rows: int = Field(1024, ge=1)
    heldout_rows: int = Field(256, ge=1)


Source = Annotated[CalculatorSource | FileSource | ReasoningGymSource, Field(discriminator="type")]


class DataGate(Config):
    """Thresholds of the Great Expectations suite over canonical rows."""

    min_train_rows: int = Field(64, ge=1)
    min_heldout_rows: int = Field(32, ge=1)
    max_prompt_chars: int = Field(4096, ge=1)
    """Longer prompts are quarantined."""
    max_quarantined_share: float = Field(0.05, ge=0, le=1)
    """More than this stops the run."""


class DataConfig(Config):
    """Data prep: source, seed of the split, gate."""

    source: Source = CalculatorSource()
    seed: Seed = 0
    rl_bands: tuple[str, ...] = ()
    """Bands RL draws its prompts from; empty means all of them."""
    gate: DataGate = DataGate()

    @model_validator(mode="after")
    def _heldout_can_pass_gate(self) -> "DataConfig":
        rows = getattr(self.source, "heldout_rows", None)
        if rows is not None and rows < self.gate.min_heldout_rows:
            raise ValueError(
                f"data.source.heldout_rows={rows} is under data.gate.min_heldout_rows="
                f"{self.gate.min_heldout_rows}; raise the first or lower the second"
            )
        return self
