"""Does the RL engine fit its GPUs, and is asynchronous training worth it with these settings?"""

from pathlib import Path

from configs.schema import PipelineConfig
from flows.doctor.findings import Finding
from flows.doctor.probes import MachineFacts
from flows.forecast import figures_for, forecast
from tasks.models.shapes import UnknownShapeError, shape_of
from tasks.rl.memory import DEVICES_GIB, Card, Fit, cards, fit
from tasks.rl.planner import WORTH_IT


def examine_engine(config: PipelineConfig, facts: MachineFacts, runs: Path) -> list[Finding]:
    """Memory of each kind of card, and whether a lag pays; none of them refuses a run."""
    return [*gpu_memory(config, facts), lag_pays(config, runs)]


def gpu_memory(config: PipelineConfig, facts: MachineFacts) -> list[Finding]:
    """One finding for each kind of card: on the GPUs found, else on the sizes that are sold."""
    kinds = dict.fromkeys(cards(config))
    if not kinds:
        return []
    try:
        shape = shape_of(config.model)
    except UnknownShapeError as error:
        return [Finding("GPU memory", "warn", str(error), "give a folder: model.path=...")]
    here = min((gpu.memory_gib for gpu in facts.gpus), default=None)
    found = []
    for card in kinds:
        name = f"GPU memory, {' and '.join(card.roles)}"
        if here is not None:
            found.append(_one(name, fit(shape, config, card, here)))
        else:
            sizes = {sold: fit(shape, config, card, gib) for sold, gib in DEVICES_GIB.items()}
            found.append(_by_size(name, card, sizes))
    return found


def _one(name: str, verdict: Fit) -> Finding:
    looked_at = f"{verdict.needs_gib:.1f} of {verdict.has_gib:.1f} GiB: {verdict.detail}"
    return Finding(name, "pass" if verdict.fits else "warn", looked_at, verdict.remedy)


def _by_size(name: str, card: Card, sizes: dict[str, Fit]) -> Finding:
    fits = [sold for sold, verdict in sizes.items() if verdict.fits]
    too_small = [sold for sold, verdict in sizes.items() if not verdict.fits]
    largest = sizes[(fits or too_small)[0 if fits else -1]]
    said = f"fits {', '.join(fits) or 'none'}"
    if too_small:
        said += f"; not {', '.join(too_small)}"
    remedy = f"on {too_small[-1]}: {sizes[too_small[-1]].remedy}" if too_small else ""
    return Finding(name, "pass" if fits else "warn", f"{said} ({largest.detail})", remedy)


def lag_pays(config: PipelineConfig, runs: Path) -> Finding:
    """Asynchronous over synchronous, from the newest run's figures or named assumptions."""
    name = "asynchronous or synchronous"
    try:
        figures = figures_for(config, runs)
    except UnknownShapeError as error:
        return Finding(name, "open", f"{error}", "rl-pipeline forecast --probe measures it")
    made = forecast(config, figures, None)
    assumed = "; assumed: " + "; ".join(figures.assumptions) if figures.assumptions else ""
    limit = config.rl.staleness_limit
    looked_at = (
        f"asynchronous gives {made.gain:.2f} × synchronous on {made.devices} device"
        f"{'s' if made.devices > 1 else ''} ({figures.source}{assumed})"
    )
    if made.stay_synchronous and limit > 0:
        remedy = (
            f"under {WORTH_IT:g}, the synchronous loop does as well: rl.staleness_limit=0 "
            "rl.publish.start=1 rl.publish.end=1; look closer: rl-pipeline forecast"
        )
        return Finding(name, "warn", looked_at, remedy)
    best = made.best
    if not made.stay_synchronous and limit == 0:
        remedy = f"rl.staleness_limit={best.staleness_limit}; look closer: rl-pipeline forecast"
        return Finding(name, "warn", looked_at, remedy)
    return Finding(name, "pass", looked_at)
