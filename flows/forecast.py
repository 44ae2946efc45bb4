"""Where a forecast's figures come from: the newest run of a profile, a probe, or assumptions."""

import json
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from multiprocessing import get_context
from pathlib import Path

from pydantic import ValidationError

from configs.schema import PipelineConfig
from configs.schema.rl import PublishSchedule
from flows.doctor.checklist import newest_run
from tasks.artifacts import ArtifactRecord
from tasks.events import Listener
from tasks.models.shapes import shape_of
from tasks.rl.figures import (
    Figures,
    assumed_figures,
    clip_of,
    layout_of,
    work_of,
)
from tasks.rl.figures_of_runs import UNHINDERED, NoFiguresError, figures_of_run
from tasks.rl.planner import Candidate, Plan, Report, predict
from tasks.rl.planner import plan as compare
from tasks.rl.simulated_work import synchronous

PROBE_STEPS = 12
PROBE_SUFFIX = "-probe"
"""A probe is a run of a profile of its own, so that it is never taken for a result."""
ALONE_SUFFIX = "-in-turns"
"""A probe's second half, in which the sides never work at once."""


@dataclass(frozen=True)
class Outlook:
    """One setting's prediction for the whole RL stage."""

    name: str
    candidate: Candidate
    samples: int
    wall_s: float
    usd: float
    usd_per_effective: float


def figures_for(config: PipelineConfig, runs: Path, *, probed: bool = False) -> Figures:
    """Figures for a config: of its profile's newest run, else of its probe, else assumed.

    The settings are those of `config`; what was measured are the times, lengths and filters.

    Args:
        probed: the probe goes first.

    Raises:
        UnknownShapeError: nothing was measured, and the model's shape is unknown.
    """
    own, probe_of = config.profile, config.profile + PROBE_SUFFIX
    for profile in (probe_of, own) if probed else (own, probe_of):
        found = _newest(runs, profile)
        if found is None:
            continue
        alone = _newest(runs, profile + ALONE_SUFFIX) if profile == probe_of else None
        return for_settings(found if alone is None else paired(found, alone), config)
    return assumed_figures(config, shape_of(config.model))


def _newest(runs: Path, profile: str) -> Figures | None:
    folder = newest_run(runs, profile)
    return measured(folder) if folder is not None else None


def paired(beside: Figures, alone: Figures) -> Figures:
    """Figures of a run whose sides worked at once, and of one in which they took turns.

    Processes that share cores slow each other, and an engine that is asked sample by sample does
    more than one that is given a batch.
    """
    left = tuple(sentence for sentence in beside.assumptions if sentence != UNHINDERED)
    return replace(beside, times_in_turns=alone.times, assumptions=left)


def measured(run_dir: Path) -> Figures | None:
    """Figures of a run's RL stage; None where it has none or they cannot be read."""
    try:
        body = json.loads((run_dir / "config.json").read_bytes())
        record = json.loads((run_dir / "records.json").read_bytes()).get("rl")
        if not isinstance(record, dict):
            return None
        folder = _where(str(record.get("uri", "")), run_dir)
        return figures_of_run(folder, PipelineConfig.model_validate_json(json.dumps(body)))
    except (OSError, ValueError, ValidationError, NoFiguresError):
        return None


def in_hindsight(record: ArtifactRecord | None, config: PipelineConfig) -> dict[str, float]:
    """Seconds a run's samples take in the model, and would take with η = 0; both without the start.

    Empty where the run was synchronous, or left too little to model it by.
    """
    if record is None or not config.rl.staleness_limit:
        return {}
    try:
        figures = figures_of_run(record.path, config)
    except NoFiguresError:
        return {}
    samples = -(-config.rl.steps // config.rl.updates_per_batch) * config.rl.batch_size
    lagged = predict("", figures, figures.work, figures.layout, figures.clip)
    alone = predict("", figures, synchronous(figures.work), figures.layout, figures.clip)
    return {
        "modelled_s": lagged.wall_s(samples),
        "modelled_synchronous_s": alone.wall_s(samples),
    }


def _where(uri: str, run_dir: Path) -> Path:
    """A stage's folder; relative ones were relative to where the run was started."""
    bases = (Path(), *run_dir.resolve().parents)
    return next((base / uri for base in bases if (base / uri).is_dir()), Path(uri))


def for_settings(figures: Figures, config: PipelineConfig) -> Figures:
    """The same figures under other settings of the loop; a batch takes its time by its size."""
    seen = figures.work
    asked = work_of(config, seen.steps)
    tokens = replace(asked.tokens, mean=min(seen.tokens.mean, float(asked.tokens.longest)))
    work = replace(asked, turns_mean=seen.turns_mean, tokens=tokens, filter_share=seen.filter_share)
    larger = asked.batch_size / seen.batch_size * asked.updates_per_batch / seen.updates_per_batch
    times, alone = figures.times, figures.times_in_turns
    return replace(
        figures,
        work=work,
        times=replace(times, train_s=times.train_s * larger),
        times_in_turns=alone and replace(alone, train_s=alone.train_s * larger),
    )


def forecast(
    config: PipelineConfig, figures: Figures, devices: int | None, report: Report | None = None
) -> Plan:
    """Compare synchronous and asynchronous training of a config on its devices, or so many."""
    devices = devices or layout_of(config).devices
    return compare(figures, clip_of(config.rl), devices, report)


def outlook(name: str, config: PipelineConfig, figures: Figures) -> Outlook:
    """What the settings of a config, as they stand, would take and cost."""
    asked = for_settings(figures, config)
    candidate = predict(name, asked, asked.work, layout_of(config), clip_of(config.rl))
    return looked_at(candidate, config, asked.startup_s)


def looked_at(candidate: Candidate, config: PipelineConfig, startup_s: float) -> Outlook:
    """A candidate over the whole RL stage of a config."""
    rl, price = config.rl, config.cost.usd_per_device_hour
    samples = -(-rl.steps // rl.updates_per_batch) * rl.batch_size
    start_usd = startup_s * candidate.layout.devices * price / 3600
    return Outlook(
        candidate.name,
        candidate,
        samples,
        wall_s=startup_s + candidate.wall_s(samples),
        usd=start_usd + candidate.usd(samples, price),
        usd_per_effective=candidate.usd_per_effective(price),
    )


def probe(config: PipelineConfig, runs: Path, on_event: Listener) -> None:
    """Run RL for a few steps, data and snapshot reused where they are there, and keep its figures.

    Where generator and learner work at once they do so once more in turns, in a process of its own:
    Prefect's client stays with the server of a process's first run.

    Raises:
        StageFailedError: a stage ended without a result.
    """
    from flows.launch import run_pipeline

    first, *others = probings(config)
    run_pipeline(first, stop_after="rl", on_event=on_event, runs_dir=runs)
    for short in others:
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as apart:
            apart.submit(_run_quietly, short, runs).result()


def _run_quietly(config: PipelineConfig, runs: Path) -> None:
    """A run nobody watches."""
    from flows.launch import run_pipeline

    run_pipeline(config, stop_after="rl", on_event=lambda event: None, runs_dir=runs)


def probings(config: PipelineConfig) -> list[PipelineConfig]:
    """A config's probe: a few steps, with a publish each; as configured, and with η = 0.

    Tools are left as fast as they are: waiting for slow ones would hide how fast it decodes.
    """
    tools = config.rl.tools.model_copy(update={"simulated_latency": None})
    once = PublishSchedule(start=1, end=1, over_steps=1)
    rl = config.rl.model_copy(update={"steps": PROBE_STEPS, "tools": tools, "publish": once})
    short = config.model_copy(update={"profile": config.profile + PROBE_SUFFIX, "rl": rl})
    if rl.in_turns:
        return [short]
    alone = rl.model_copy(update={"staleness_limit": 0})
    return [short, short.model_copy(update={"profile": short.profile + ALONE_SUFFIX, "rl": alone})]
