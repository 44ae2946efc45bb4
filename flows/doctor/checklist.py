"""The pre-flight table: what goes wrong silently in RL, looked at before (and after) a run.

Rows that need artefacts read the newest run of the profile where there is one; without one they
say what will be compared, and what can be told from the config alone.
"""

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path

from configs.schema import PipelineConfig
from configs.schema.model import ScratchModel
from configs.schema.rl import AdaptiveKl
from configs.schema.rl_losses import Cispo, Gspo, IcePop, Loss, PpoBounds
from configs.schema.training import PROJECTIONS, Lora
from flows.doctor.checklist_prompts import MadeWith, earlier_settings, prompt_settings
from flows.doctor.checklist_run import golden_render, quantised_parity, reference_is_snapshot
from flows.doctor.findings import Finding
from tasks.artifacts import ArtifactRecord

ATTENTION = {"q_proj", "v_proj"}
NO_ANSWERS = ("", " \n", r"\boxed{}", "<think>", "<think>7</think>", "nan", "None")
"""Replies that answer nothing, whatever was asked of the probes' golds."""
Records = Mapping[str, ArtifactRecord]
Row = Callable[[PipelineConfig, Records], Finding]


def run_checklist(
    config: PipelineConfig, records: Records, made_with: tuple[MadeWith, ...] = ()
) -> list[Finding]:
    """Every row of the table; `records` are those of a run, or empty.

    `made_with` holds the settings of that run, and of what a night would start from.
    """
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
    first, *rest = [row(config, records) for row in rows]
    return [first, prompt_settings(config, records, made_with), *rest]


def check_profile(config: PipelineConfig, runs: Path) -> list[Finding]:
    """Every row of the table, about a profile and its newest run in `runs`.

    Raises:
        LedgerError: the promotion ledger cannot be relied on.
    """
    newest = newest_run(runs, config.profile)
    records = newest_records(runs, config.profile)
    made_with = earlier_settings(config, runs, newest.name if newest is not None else None)
    return run_checklist(config, records, made_with)


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
    if unknown := set(lora.targets) - PROJECTIONS:
        advice.append(f"{', '.join(sorted(unknown))}: no projection of Qwen or Llama models")
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
    if rate < low / 100:
        return Finding(
            "RL learning rate",
            "fail",
            looked_at,
            f"the policy would stay where it is: rl.optimiser.lr={low:g}",
        )
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
    start, end = train.temperature.start, final_temperature(config)
    looked_at = (
        f"temperature {start:g}→{end:g} over {config.rl.steps} steps in training, "
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
    if not math.isclose(end, held.temperature, abs_tol=1e-6):
        return Finding(
            "sampling temperature",
            "warn",
            looked_at,
            "accuracy is measured at a temperature training does not end at; meant so? "
            f"else evaluation.sampling.temperature={end:g}",
        )
    return Finding("sampling temperature", "pass", looked_at)


def final_temperature(config: PipelineConfig) -> float:
    """The temperature at the last step, which may come before the annealing is done."""
    anneal, steps = config.rl.sampling.temperature, config.rl.steps
    return anneal.start + (anneal.end - anneal.start) * min(1.0, steps / anneal.over_steps)


def reward_edge_cases(config: PipelineConfig, records: Records) -> Finding:
    """The verifier answers probes whose verdict is certain, None and NaN among them."""
    from tasks.rewards.probes import known_answer_probes
    from tasks.rewards.verdict import Outcome, Verdict
    from tasks.rewards.verifiers import gold_parses, verify

    kind = getattr(config.data.source, "answer_kind", "number")
    if "data" in records:
        kind = str(records["data"].meta.get("answer_kind", kind))
    probes = [
        *known_answer_probes(kind),
        ("nan", "nan", Outcome.UNSCORED) if kind == "number" else ("", "", Outcome.UNSCORED),
    ]
    wrong = []
    for gold, reply, right in probes:
        verdict = verify(kind, gold, reply)
        if verdict.outcome is not right or verdict.score != Verdict(right).score:
            said = f"{verdict.outcome.value} ({verdict.score})"
            wrong.append(f"gold {gold!r}, reply {reply!r}: {said}, not {right.value}")
    gold, reply, _ = probes[0]
    for empty in NO_ANSWERS:
        if verify(kind, gold, empty).score != 0.0:
            wrong.append(f"the empty reply {empty!r} scores {verify(kind, gold, empty).score}")
    if verify(kind, gold, reply, truncated=True).score != 0.0:
        wrong.append("a reply that was cut off scores")
    if gold_parses(kind, None) is None:
        wrong.append("a missing gold answer is taken for a good one")
    looked_at = (
        f"{len(probes) + len(NO_ANSWERS) + 2} known answers of kind {kind}: right, wrong, empty, "
        "cut off, no gold, NaN, None"
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
        f"KL {kl.coefficient:g} ({band}, in the {kl.placement}); {_bounds_text(loss)}; "
        f"publish every {config.rl.publish.start}→{config.rl.publish.end} steps, "
        f"staleness limit {config.rl.staleness_limit}"
    )
    advice = []
    if kl.coefficient == 0 and not kl.adaptive:
        advice.append("no KL to the snapshot: drift goes unseen; rl.kl.coefficient=0.001")
    if kl.coefficient > 0.1:
        advice.append("a KL coefficient above 0.1 holds the policy at the snapshot")
    if isinstance(loss, PpoBounds):
        advice += _clip_advice(loss)
    if kl.adaptive is not None:
        advice += _adaptive_advice(kl.adaptive)
    return Finding("KL and clipping", "warn" if advice else "pass", looked_at, "; ".join(advice))


def _bounds_text(loss: Loss) -> str:
    """The loss and its bounds, as a reader of papers knows them."""
    if isinstance(loss, PpoBounds | Gspo | Cispo):
        dual_clip = f", dual clip {loss.dual_clip}" if isinstance(loss, PpoBounds) else ""
        return f"{loss.type} clip [{1 - loss.clip_low:g}, {1 + loss.clip_high:g}]{dual_clip}"
    if isinstance(loss, IcePop):
        return f"{loss.type} band [{loss.low:g}, {loss.high:g}]"
    return f"{loss.type} weights per {loss.level} up to {loss.cap:g}"


def _clip_advice(loss: PpoBounds) -> list[str]:
    """What is out of the ordinary in the bounds of a PPO clip."""
    advice = []
    if max(loss.clip_low, loss.clip_high) > 0.4:
        advice.append("a clip wider than 0.4 hardly clips; 0.2 and 0.28 are usual")
    if min(loss.clip_low, loss.clip_high) < 0.05:
        advice.append("a clip under 0.05 throws nearly every step away; 0.2 and 0.28 are usual")
    if loss.dual_clip is not None and loss.dual_clip <= 1 + loss.clip_high:
        advice.append("rl.loss.dual_clip lies inside the clip and would cut kept tokens")
    return advice


def _adaptive_advice(band: AdaptiveKl) -> list[str]:
    """What an adaptive KL that can do nothing lacks."""
    advice = []
    if band.max_coefficient < 1e-4:
        advice.append(
            f"rl.kl.adaptive.max_coefficient={band.max_coefficient:g} holds nothing; 1.0 is usual"
        )
    if band.target_end > band.target_start:
        advice.append("the KL target widens: rl.kl.adaptive.target_end should be the smaller")
    return advice


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
    end = final_temperature(config)
    if not math.isclose(end, held.temperature, abs_tol=1e-6):
        return Finding(
            "evaluation settings",
            "warn",
            f"{looked_at}; temperature {end:g} at the end of training, {held.temperature:g} in "
            "evaluation",
            f"meant so? else evaluation.sampling.temperature={end:g}",
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
    idle = [
        name
        for name in wanted.types
        if name in wanted.gates and wanted.gates[name].accuracy_ci_low <= -0.5
    ]
    if idle:
        advice.append(
            f"quantize.gates.{idle[0]}.accuracy_ci_low={wanted.gates[idle[0]].accuracy_ci_low:g} "
            "lets a file pass that lost half its accuracy; -0.02 to -0.1 is usual"
        )
    heldout = getattr(config.data.source, "heldout_rows", None)
    if heldout is None and "data" in records:
        heldout = records["data"].meta.get("heldout_rows")
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
    folder = newest_run(runs, profile)
    if folder is None:
        return {}
    body = json.loads((folder / "records.json").read_bytes())
    return {name: ArtifactRecord.model_validate(value) for name, value in body.items()}


def newest_run(runs: Path, profile: str) -> Path | None:
    """The folder of the profile's newest run that left records; None where there is none."""
    folders = sorted(p.parent for p in runs.glob("*/records.json") if not p.parent.is_symlink())
    for folder in reversed(folders):
        try:
            made_by = json.loads((folder / "config.json").read_bytes()).get("profile")
            body = json.loads((folder / "records.json").read_bytes())
        except (OSError, ValueError):
            continue
        if made_by == profile and isinstance(body, dict):
            return folder
    return None
