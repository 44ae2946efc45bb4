"""Every figure the project promises: what it is held against, and what is asked of it."""

from dataclasses import dataclass
from typing import Literal

Suite = Literal["bench", "faults"]


@dataclass(frozen=True)
class Figure:
    """One promised figure. `target` is said in words; `met` is judged where it is measured."""

    name: str
    suite: Suite
    unit: str
    against: str
    target: str


FIGURES: tuple[Figure, ...] = (
    Figure(
        "worker_run_from_checkout",
        "faults",
        "share of checks",
        "a fresh clone with `make up` and `prefect deployment run rl-pipeline --watch`",
        "Completed, all artefacts in MLflow, lineage from the bundle reaches the prompt rows",
    ),
    Figure(
        "kill_matrix",
        "faults",
        "share of killed pairs",
        "kill -9 of flow, RL child, worker, Prefect server, MLflow server, all; in each stage",
        "every pair: terminal state, resume, nothing lost or half-written, no process left",
    ),
    Figure(
        "nights",
        "faults",
        "share of nights",
        "two nights overlapping, a late night, both clock changes",
        "one run at a time, one a day",
    ),
    Figure(
        "promotion_ledger",
        "faults",
        "share of random steps",
        "50 random promote, rollback and crash steps",
        "aliases agree with the ledger and the chain verifies after every step",
    ),
    Figure(
        "tampered_bundle",
        "faults",
        "share refused",
        "200 random one-byte changes, a signature by another key, a key inside the bundle",
        "all refused",
    ),
    Figure(
        "deploy_fleet",
        "faults",
        "share of failures",
        "5 devices over sshd on loopback, one failing in each of 6 ways",
        "four on the new release, the failing one on its old, all serving; else the waves stop",
    ),
    Figure(
        "rl_kill_points",
        "faults",
        "share of points",
        "RL killed at a named point and resumed, deterministic mode; a run never killed",
        "at least 12 points, each: same rows in the same order, same weights",
    ),
    Figure(
        "rl_kills_async",
        "faults",
        "share of kills",
        "asynchronous RL over Ray: driver at named points, rollout actor, learner actor, all of it",
        "every run ends; no ticket trained on twice, none lost, no sample older than the limit",
    ),
    Figure(
        "sync_proofs",
        "faults",
        "share caught",
        "a publish withheld, cut off, swapped; float32 and bfloat16; learning rates 5e-6 and 1e-5",
        "all caught before a step or a sample, no false alarm in 500 healthy publishes",
    ),
    Figure(
        "two_nodes_one_cut_off",
        "faults",
        "share of checks",
        "RL over two Ray nodes in two network namespaces without a shared disk, one cut off",
        "all: trained on both, one loss, a replacement, every step once, none too old",
    ),
    Figure(
        "imatrix_on_policy_iq2_m",
        "bench",
        "ratio of KL",
        "IQ2_M with a matrix of generic text, on held-out rollouts, two models",
        "< 1, interval of the difference excludes 0",
    ),
    Figure(
        "imatrix_on_policy_q4_k_m",
        "bench",
        "ratio of KL",
        "Q4_K_M without a matrix, on held-out rollouts, two models",
        "< 1, interval of the difference excludes 0",
    ),
    Figure(
        "parity_over_llama_perplexity",
        "bench",
        "ratio of time",
        "llama.cpp's perplexity tool with --kl-divergence, same tokens",
        "<= 1.2, and the same KL within 2 %",
    ),
    Figure(
        "quantise_over_llama_quantize",
        "bench",
        "ratio of time",
        "llama.cpp's quantize tool, same file",
        "<= 1.2, and the same bytes or the difference explained",
    ),
    Figure(
        "async_over_sync_tool_latency",
        "bench",
        "ratio of samples/s",
        "synchronous, same resources, log-normal tool latency",
        ">= 1.8",
    ),
    Figure(
        "async_over_sync_no_latency",
        "bench",
        "ratio of samples/s",
        "synchronous, same resources, no tool latency, 2 cores",
        "reported; doctor advises synchronous under 1.05",
    ),
    Figure(
        "forecast_over_measured",
        "bench",
        "ratio of samples/s",
        "the settings as they run: η 0 to 4, N 1 and 3, with and without slow tools; a probe",
        "each within 25 %, and the faster of synchronous and asynchronous foreseen",
    ),
    Figure(
        "trl_multi_turn_time_to_accuracy",
        "bench",
        "ratio of time",
        "TRL GRPOTrainer, calculator with tool latency, three seeds",
        ">= 2",
    ),
    Figure(
        "trl_single_turn_time_to_accuracy",
        "bench",
        "ratio of time",
        "TRL GRPOTrainer, single turn, no latency, three seeds",
        ">= 1.3",
    ),
    Figure(
        "async_minus_sync_accuracy",
        "bench",
        "points",
        "synchronous at equal samples, three seeds",
        "lower end of the interval above -3",
    ),
    Figure(
        "learner_over_bare_loop",
        "bench",
        "ratio of tokens/s",
        "a bare forward-backward-step loop on the same packed batches",
        ">= 0.85",
    ),
    Figure(
        "padding_share_gsm8k",
        "bench",
        "share",
        "computed tokens on GSM8K lengths",
        "<= 0.05",
    ),
    Figure(
        "shared_prompts_over_each_alone",
        "bench",
        "ratio of time",
        "the same samples, prompts of a group made unlike, GSM8K lengths, groups of eight",
        "> 1",
    ),
    Figure(
        "vllm_over_transformers",
        "bench",
        "ratio of tokens/s",
        "transformers generation, SmolLM2-135M, 64 requests of mixed length",
        ">= 2",
    ),
    Figure(
        "publish_share_of_cycle",
        "bench",
        "share",
        "one cycle, publish and canary",
        "<= 0.03",
    ),
    Figure(
        "checkpoint_share_of_cycle",
        "bench",
        "share",
        "one cycle, checkpoint",
        "<= 0.05",
    ),
    Figure(
        "sampling_over_generate",
        "bench",
        "ratio of tokens/s",
        "generate of transformers, same model and number of tokens",
        ">= 1",
    ),
)


def figure(name: str) -> Figure:
    """The promised figure of this name.

    Raises:
        KeyError: nothing of that name is promised.
    """
    return {f.name: f for f in FIGURES}[name]
