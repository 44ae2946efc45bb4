"""The pre-flight table: what goes wrong silently in RL, looked at before (and after) a run.

Rows that need artefacts read the newest run of the profile where there is one; without one they
say what will be compared, and what can be told from the config alone.
"""

import json
from collections.abc import Callable, Mapping
from pathlib import Path

from configs.schema import PipelineConfig
from configs.schema.model import ScratchModel
from configs.schema.training import Lora
from flows.checklist_run import golden_render, quantised_parity, reference_is_snapshot
from flows.findings import Finding
from tasks.artifacts import ArtifactRecord

ATTENTION = {"q_proj", "v_proj"}
Records = Mapping[str, ArtifactRecord]
Row = Callable[[PipelineConfig, Records], Finding]


def run_checklist(config: PipelineConfig, records: Records) -> list[Finding]:
    """Every row of the table; `records` are those of a run, or empty."""
    rows: tuple[Row, ...] = (
        golden_render,
        reference_is_snapshot,
        lora_settings,
        learning_rate,
        sampling_blocks,
        reward_edge_cases,
        kl_and_clipping,
        evaluation_settings,
        quantisation_format,
        quantised_parity,
    )
    return [row(config, records) for row in rows]


def lora_settings(config: PipelineConfig, records: Records) -> Finding:
    """Rank 16–32, alpha 32, query and value projections."""
    name, lora = "LoRA", config.rl.trainable
    if not isinstance(lora, Lora):
        small = isinstance(config.model, ScratchModel)
        return Finding(
            name,
            "pass" if small else "warn",
            "rl.trainable.type=full: every weight is trained",
            ""
            if small
            else "needs an optimiser state for every weight, and publishes all of them; "
            "try rl.trainable.type=lora",
        )
    looked_at = f"r={lora.r}, alpha={lora.alpha}, targets={', '.join(lora.targets)}"
    advice = []
    if not 16 <= lora.r <= 32:
        advice.append("rl.trainable.r is usually 16 to 32")
    if not 1 <= lora.alpha / lora.r <= 2:
        advice.append(f"alpha/r={lora.alpha / lora.r:g} scales every update; 1 to 2 is usual")
    if missing := ATTENTION - set(lora.targets):
        advice.append(f"rl.trainable.targets lacks {', '.join(sorted(missing))}")
    return Finding(name, "warn" if advice else "pass", looked_at, "; ".join(advice))


def learning_rate(config: PipelineConfig, records: Records) -> Finding:
    """5e-6 to 1e-5 for a pretrained model; a small one made from scratch needs far more."""
    rate = config.rl.optimiser.lr
    low, high, kind = 5e-6, 1e-5, "a pretrained model"
    if isinstance(config.model, ScratchModel):
        low, high, kind = 1e-4, 2e-3, "a small model made from scratch"
    looked_at = f"rl.optimiser.lr={rate:g}; usual for {kind}: {low:g} to {high:g}"
    if low <= rate <= high:
        return Finding("RL learning rate", "pass", looked_at)
    if rate > 10 * high:
        return Finding(
            "RL learning rate",
            "fail",
            looked_at,
            f"the policy would leave the snapshot within a few steps: rl.optimiser.lr={high:g}",
        )
    closest = low if rate < low else high
    return Finding("RL learning rate", "warn", looked_at, f"try rl.optimiser.lr={closest:g}")


def sampling_blocks(config: PipelineConfig, records: Records) -> Finding:
    """Training may anneal; evaluation has one block; both are shown side by side."""
    train, held = config.rl.sampling, config.evaluation.sampling
    start, end = train.temperature.start, train.temperature.end
    looked_at = (
        f"temperature {start:g}→{end:g} over {train.temperature.over_steps} steps in training, "
        f"{held.temperature:g} in evaluation"
    )
    if not 0.5 <= end <= start <= 1.5:
        return Finding(
            "sampling temperature",
            "warn",
            looked_at,
            "anneal downwards, inside 0.5 to 1.5: rl.sampling.temperature.start=1.2 "
            "rl.sampling.temperature.end=0.8",
        )
    if end != held.temperature:
        return Finding(
            "sampling temperature",
            "warn",
            looked_at,
            "accuracy is measured at a temperature training does not end at; meant so? "
            f"else evaluation.sampling.temperature={end:g}",
        )
    return Finding("sampling temperature", "pass", looked_at)


def reward_edge_cases(config: PipelineConfig, records: Records) -> Finding:
    """The verifier answers probes whose verdict is certain, None and NaN among them."""
    from tasks.rewards.probes import known_answer_probes
    from tasks.rewards.verdict import Outcome
    from tasks.rewards.verifiers import gold_parses, verify

    kind = getattr(config.data.source, "answer_kind", "number")
    probes = [
        *known_answer_probes(kind),
        ("nan", "nan", Outcome.UNSCORED) if kind == "number" else ("", "", Outcome.UNSCORED),
    ]
    wrong = []
    for gold, reply, right in probes:
        found = verify(kind, gold, reply).outcome
        if found is not right:
            wrong.append(f"gold {gold!r}, reply {reply!r}: {found.value}, not {right.value}")
    if gold_parses(kind, None) is None:
        wrong.append("a missing gold answer is taken for a good one")
    looked_at = (
        f"{len(probes)} known answers of kind {kind}: right, wrong, empty, no gold, NaN, None"
    )
    if wrong:
        return Finding(
            "reward edge cases",
            "fail",
            f"{looked_at}; {'; '.join(wrong)}",
            "training on this grader teaches its mistakes; fix tasks/rewards",
        )
    return Finding("reward edge cases", "pass", looked_at)


def kl_and_clipping(config: PipelineConfig, records: Records) -> Finding:
    """A KL term, a clip inside the usual range, dual clip outside it, publishing within η."""
    kl, loss = config.rl.kl, config.rl.loss
    band = "adaptive" if kl.adaptive else "fixed"
    looked_at = (
        f"KL {kl.coefficient:g} ({band}, in the {kl.placement}); clip "
        f"[{1 - loss.clip_low:g}, {1 + loss.clip_high:g}], dual clip {loss.dual_clip}; "
        f"publish every {config.rl.publish.start}→{config.rl.publish.end} steps, "
        f"staleness limit {config.rl.staleness_limit}"
    )
    advice = []
    if kl.coefficient == 0 and not kl.adaptive:
        advice.append("no KL to the snapshot: drift goes unseen; rl.kl.coefficient=0.001")
    if kl.coefficient > 0.1:
        advice.append("a KL coefficient above 0.1 holds the policy at the snapshot")
    if max(loss.clip_low, loss.clip_high) > 0.4:
        advice.append("a clip wider than 0.4 hardly clips; 0.2 and 0.28 are usual")
    if loss.dual_clip is not None and loss.dual_clip <= 1 + loss.clip_high:
        advice.append("rl.loss.dual_clip lies inside the clip and would cut kept tokens")
    return Finding("KL and clipping", "warn" if advice else "pass", looked_at, "; ".join(advice))


def evaluation_settings(config: PipelineConfig, records: Records) -> Finding:
    """Evaluation must let the agent do what training let it do."""
    train, held = config.rl.sampling, config.evaluation.sampling
    pairs = {
        "max_new_tokens": (train.max_new_tokens, held.max_new_tokens),
        "max_turns": (train.max_turns, held.max_turns),
    }
    looked_at = ", ".join(f"{k} {a} in training, {b} in evaluation" for k, (a, b) in pairs.items())
    looked_at += f"; {config.evaluation.max_problems} problems × {held.samples} samples"
    less = [key for key, (a, b) in pairs.items() if b < a]
    if less:
        todo = " ".join(f"evaluation.sampling.{key}={pairs[key][0]}" for key in less)
        return Finding(
            "evaluation settings",
            "fail",
            looked_at,
            f"evaluation would cut off what training allows: {todo}",
        )
    if config.tools and held.max_turns < 2:
        return Finding(
            "evaluation settings",
            "fail",
            looked_at,
            "a tool call needs a second turn: evaluation.sampling.max_turns=2",
        )
    if any(a != b for a, b in pairs.values()):
        todo = " ".join(f"evaluation.sampling.{key}={a}" for key, (a, b) in pairs.items() if a != b)
        return Finding(
            "evaluation settings", "warn", looked_at, f"same as training would be: {todo}"
        )
    return Finding("evaluation settings", "pass", looked_at)


def quantisation_format(config: PipelineConfig, records: Records) -> Finding:
    """Rows that K-quants can cut, gates that can be decided, context that holds a conversation."""
    wanted = config.quantize
    looked_at = f"{', '.join(wanted.types)}; {wanted.accuracy_problems} greedy problems each"
    advice = []
    if isinstance(config.model, ScratchModel) and config.model.hidden_size % 256:
        advice.append(
            f"model.hidden_size={config.model.hidden_size} is no multiple of 256: K-quants and "
            "IQ2_M fall back to larger types, as the report will show"
        )
    if missing := [t for t in wanted.types if t not in wanted.gates]:
        advice.append(f"no gate for {', '.join(missing)}: set quantize.gates.{missing[0]}")
    heldout = getattr(config.data.source, "heldout_rows", None)
    if heldout is not None and heldout < wanted.accuracy_problems:
        advice.append(
            f"only {heldout} held-out problems: the paired interval will be wide; "
            f"data.source.heldout_rows={wanted.accuracy_problems}"
        )
    turns = config.rl.sampling.max_turns * config.rl.sampling.max_new_tokens
    if config.package.context_length < turns:
        advice.append(
            f"package.context_length={config.package.context_length} is under "
            f"max_turns × max_new_tokens={turns}"
        )
    return Finding(
        "quantisation format", "warn" if advice else "pass", looked_at, "; ".join(advice)
    )


def newest_records(runs: Path, profile: str) -> dict[str, ArtifactRecord]:
    """The records of the profile's newest run; empty where there is none, or it has none yet."""
    folders = sorted(p.parent for p in runs.glob("*/records.json") if not p.parent.is_symlink())
    for folder in reversed(folders):
        try:
            made_by = json.loads((folder / "config.json").read_bytes()).get("profile")
            body = json.loads((folder / "records.json").read_bytes())
        except (OSError, ValueError):
            continue
        if made_by == profile:
            return {name: ArtifactRecord.model_validate(value) for name, value in body.items()}
    return {}
