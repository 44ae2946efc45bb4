"""Settings of GGUF quantisation and its parity gates."""

from typing import Literal

from pydantic import Field

from configs.schema.base import Config

QuantType = Literal["Q8_0", "Q5_K_M", "Q4_K_M", "IQ2_M"]


def recipe_of(name: str) -> str:
    """The type a file's name stands on: `IQ2_M` of `IQ2_M+3`, which has three tensors raised."""
    return name.partition("+")[0]


class QuantGate(Config):
    """When one quantisation ships."""

    accuracy_ci_low: float = Field(-0.03, ge=-1, le=0)
    """Lower end of the paired 95 % interval of greedy accuracy, quantisation minus F16."""
    max_kld: float = Field(0.5, gt=0)
    """Mean per-token KL to F16 on rollout tokens, nats."""
    min_top1: float = Field(0.8, ge=0, le=1)


class RepairConfig(Config):
    """What happens to a quantisation that its gate rejects: tensors are raised until it passes.

    The repaired file, as in `IQ2_M+3`, passes the same gates, or nothing of it ships.
    """

    enabled: bool = True
    max_tensors: int = Field(32, ge=1)
    """Tensors that may be raised to a larger type."""
    time_limit_s: float = Field(900.0, gt=0)
    """For each rejected type; half of it at most goes into ranking the tensors."""
    rollouts: int = Field(32, ge=1)
    """Parity rollouts on which each tensor's share of the KL is measured; all of them judge."""
    groups: int = Field(64, ge=12)
    """Measurements at most; more tensors than that are ranked in groups of neighbouring blocks."""


class QuantizeConfig(Config):
    """Merge, convert, importance matrix, quantise, parity."""

    types: tuple[QuantType, ...] = Field(("Q8_0", "Q4_K_M", "IQ2_M"), min_length=1)
    gates: dict[QuantType, QuantGate] = {
        "Q8_0": QuantGate(accuracy_ci_low=-0.01, max_kld=0.01, min_top1=0.97),
        "Q5_K_M": QuantGate(accuracy_ci_low=-0.02, max_kld=0.05, min_top1=0.95),
        "Q4_K_M": QuantGate(accuracy_ci_low=-0.03, max_kld=0.1, min_top1=0.91),
        "IQ2_M": QuantGate(accuracy_ci_low=-0.05, max_kld=0.5, min_top1=0.8),
    }
    imatrix_rollouts: int = Field(256, ge=1)
    """The policy's own rollouts that make the importance matrix."""
    imatrix_weights: Literal["all", "assistant", "gradient"] = "all"
    """What a token counts for in the importance matrix: every token alike, only the positions from
    which the policy samples, or by how much it moves the policy's own choices."""
    row_choice_below: int = Field(200_000_000, ge=0)
    """Models with fewer weights than this are rounded with several weighings of the importance
    matrix, and every row keeps the one that harms its output least; takes six times as long, and
    memory for the square of a row's length. 0 turns it off."""
    imatrix_compare: bool = False
    """Also quantise with a matrix of generic text, and with none where the type allows it, and
    report the difference in KL."""
    side_by_side_problems: int = Field(64, ge=0)
    """Held-out problems whose whole answers are kept, F16 beside every quantisation, for the
    report; flipped answers come on top. 0 keeps none."""
    parity_rollouts: int = Field(128, ge=1)
    """Other rollouts, on which KL, top-1 and perplexity are measured."""
    accuracy_problems: int = Field(2000, ge=1)
    """Held-out problems answered greedily by every variant through llama.cpp."""
    parallel_sequences: int = Field(64, ge=1)
    max_f16_kld: float = Field(1e-4, gt=0)
    """Gate on HF float32 → GGUF F16."""
    min_f16_top1: float = Field(0.995, ge=0, le=1)
    repair: RepairConfig = RepairConfig()
