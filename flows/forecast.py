"""Where a forecast's figures come from: the newest run of a profile, a probe, or assumptions."""

import json
from dataclasses import dataclass, replace
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
    NoFiguresError,
    assumed_figures,
    clip_of,
    figures_of_run,
    layout_of,
    work_of,
)
from tasks.rl.planner import Candidate, Plan, Report, predict
from tasks.rl.planner import plan as compare
from tasks.rl.simulated_work import synchronous

PROBE_STEPS = 12
PROBE_SUFFIX = "-probe"
"""A probe is a run of a profile of its own, so that it is never taken for a result."""


@dataclass(frozen=True)
class Outlook:
    """One setting's prediction for the whole RL stage."""

    name: str
    candidate: Candidate
    samples: int
    wall_s: float
    usd: float
    usd_per_effective: float


def figures_for(config: PipelineConfig, runs: Path) -> Figures:
    """Figures for a config: of its profile's newest run, else of its probe, else assumed.

    The settings are those of `config`; what was measured are the times, lengths and filters.

    Raises:
        UnknownShapeError: nothing was measured, and the model's shape is unknown.
    """
    for profile in (config.profile, config.profile + PROBE_SUFFIX):
        folder = newest_run(runs, profile)
        found = measured(folder) if folder is not None else None
        if found is not None:
            return for_settings(found, config)
    return assumed_figures(config, shape_of(config.model))


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
    times = replace(
        figures.times,
        train_s=figures.times.train_s * asked.batch_size / seen.batch_size
        * asked.updates_per_batch / seen.updates_per_batch,
    )  # fmt: skip
    return replace(figures, work=work, times=times)


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

    Raises:
        StageFailedError: a stage ended without a result.
    """
    from flows.launch import run_pipeline

    run_pipeline(probing(config), stop_after="rl", on_event=on_event, runs_dir=runs)


def probing(config: PipelineConfig) -> PipelineConfig:
    """A config's probe: a few steps, with a publish each.

    Tools are left as fast as they are: waiting for slow ones would hide how fast it decodes.
    """
    tools = config.rl.tools.model_copy(update={"simulated_latency": None})
    once = PublishSchedule(start=1, end=1, over_steps=1)
    rl = config.rl.model_copy(update={"steps": PROBE_STEPS, "tools": tools, "publish": once})
    return config.model_copy(update={"profile": config.profile + PROBE_SUFFIX, "rl": rl})
