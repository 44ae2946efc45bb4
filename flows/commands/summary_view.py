"""The end of a run in one screen: accuracy, quantisations, cost, where things are, what next."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from flows.report.data import dig, table
from tasks.stages import STAGES

UNKNOWN = "–"
STATUS_MARKS = {"failed": "[bold red]{}[/]", "cancelled": "[yellow]{}[/]", "not run": "[dim]{}[/]"}


def is_number(value: Any) -> bool:
    """Whether a figure is known; a truth value is no figure."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def percent(value: Any, *, signed: bool = False) -> str:
    """A share in percent; a dash where it is unknown."""
    if not is_number(value):
        return UNKNOWN
    return f"{100 * value:{'+' if signed else ''}.1f} %"


def interval(value: Any) -> str:
    """`[low, high]` in percentage points; a dash where it is unknown."""
    if isinstance(value, Mapping):
        value = [value.get("low"), value.get("high")]
    if not (isinstance(value, list | tuple) and len(value) == 2):
        return UNKNOWN
    if not all(is_number(end) for end in value):
        return UNKNOWN
    return f"[{100 * value[0]:+.1f}, {100 * value[1]:+.1f}]"


def size(value: Any) -> str:
    """Bytes in MB."""
    return f"{value / 1e6:.2f} MB" if is_number(value) else UNKNOWN


def number(value: Any, digits: int = 3) -> str:
    """A number; a dash where it is unknown."""
    return f"{value:.{digits}g}" if is_number(value) else UNKNOWN


def show_summary(summary: Mapping[str, Any], run_dir: Path, out: Console) -> None:
    """Print the tables and what to type next."""
    body = dict(summary)
    out.print()
    out.print(stages_table(body))
    if dig(body, "heldout", "rl", "accuracy") is not None:
        out.print(accuracy_table(body))
        out.print(_delta_line(body))
    if table(body, "quant"):
        out.print(quant_table(body))
    out.print(places_table(body, run_dir))
    out.print(next_steps(body, run_dir))


def stages_table(summary: dict[str, Any]) -> Table:
    """What ran, what was reused, how long."""
    grid = _grid("stage", "status", "seconds", "sha256")
    for name in STAGES:
        facts = table(summary, "stages", name)
        if facts:
            status = "reused" if facts.get("cached") else str(facts.get("status", UNKNOWN))
            status = STATUS_MARKS.get(status, "{}").format(escape(status))
            sha = str(facts.get("output_sha256") or "")[:12] or UNKNOWN
            grid.add_row(name, status, number(facts.get("wall_s"), 4), sha)
    return grid


def accuracy_table(summary: dict[str, Any]) -> Table:
    """Held-out accuracy before and after RL, by band, easiest first."""
    heldout = table(summary, "heldout")
    grid = _grid("held-out accuracy", "problems", "SFT snapshot", "after RL")
    before, after = table(heldout, "sft"), table(heldout, "rl")
    grid.add_row(
        "all", str(after.get("n", UNKNOWN)), percent(before.get("accuracy")),
        f"[bold]{percent(after.get('accuracy'))}[/]",
    )  # fmt: skip
    snapshot = {row.get("band"): row for row in before.get("by_band") or []}
    for row in after.get("by_band") or []:
        band = row.get("band")
        earlier = snapshot.get(band, {}).get("accuracy")
        grid.add_row(
            f"  {escape(str(band))}", str(row.get("n", UNKNOWN)), percent(earlier),
            percent(row.get("accuracy")),
        )  # fmt: skip
    return grid


def _delta_line(summary: dict[str, Any]) -> str:
    delta = table(summary, "heldout", "delta")
    low, sign = delta.get("ci95"), "undecided"
    if isinstance(low, list) and len(low) == 2 and None not in low:
        sign = "better" if low[0] > 0 else "worse" if low[1] < 0 else "undecided"
    value = percent(delta.get("value"), signed=True)
    return f"  RL minus SFT: {value}, 95 % interval {interval(delta.get('ci95'))}: {sign}\n"


def quant_table(summary: dict[str, Any]) -> Table:
    """Size and parity of each quantisation, and whether it ships."""
    grid = _grid(
        "quantisation", "size", "bits/weight", "KL nats", "top-1", "PPL ratio", "accuracy",
        "minus F16, 95 %", "verdict",
    )  # fmt: skip
    for name, facts in table(summary, "quant").items():
        ships, why = facts.get("ships"), escape(str(facts.get("why") or ""))
        verdict = UNKNOWN if ships is None else "[green]ships[/]" if ships else f"[red]{why}[/]"
        grid.add_row(
            name, size(facts.get("size_bytes")), number(facts.get("bits_per_weight")),
            number(facts.get("kld_mean"), 2), percent(facts.get("top1")),
            number(facts.get("ppl_ratio"), 4), percent(facts.get("accuracy")),
            interval(facts.get("accuracy_delta_ci95")), verdict,
        )  # fmt: skip
    return grid


def places_table(summary: dict[str, Any], run_dir: Path) -> Table:
    """Cost, and where the report, the bundle and the MLflow run are."""
    grid = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    for name, text in _places(summary, run_dir):
        grid.add_row(name, escape(text))
    return grid


def _places(summary: dict[str, Any], run_dir: Path) -> list[tuple[str, str]]:
    cost = table(summary, "cost")
    steps = table(summary, "rl")
    found = [
        ("wall-clock", f"{number(summary.get('wall_s'), 4)} s, peak memory "
         f"{size(summary.get('peak_tree_bytes'))}"),
        ("machine", f"{dig(summary, 'machine', 'cores')} cores, "
         f"{number(dig(summary, 'machine', 'gflops_f32'))} GFLOP/s"),
    ]  # fmt: skip
    if steps.get("steps") is not None:
        found.append(("RL", _rl_line(steps)))
    if is_number(cost.get("usd")):
        found.append(("cost", _cost_line(cost)))
    report = run_dir / "report.html"
    if report.exists():
        found.append(("report", str(report)))
    if bundle := dig(summary, "bundle", "path"):
        signed = "signed" if dig(summary, "bundle", "signed") else "not signed"
        found.append(
            ("bundle", f"{bundle} ({signed}, {str(dig(summary, 'bundle', 'sha256'))[:12]})")
        )
    if promotion := table(summary, "promotion"):
        found.append(("promotion", _promotion_line(promotion)))
    if run_id := dig(summary, "mlflow", "run_id"):
        found.append(("MLflow", f"run {run_id} in {dig(summary, 'mlflow', 'tracking_uri')}"))
    return found


def _promotion_line(promotion: dict[str, Any]) -> str:
    name = f"{promotion.get('model')} v{promotion.get('version') or '?'}"
    aliases = "; MLflow's aliases wait" if promotion.get("aliases") == "pending" else ""
    return f"{name} {promotion.get('outcome')}: {promotion.get('reason')}{aliases}"


def _cost_line(cost: dict[str, Any]) -> str:
    each = cost.get("usd_per_effective_sample")
    per_sample = f"{each:.3g} USD an effective sample" if is_number(each) else "share unknown"
    return (
        f"{cost['usd']:.4f} USD for RL at {number(cost.get('usd_per_device_hour'))} USD a device "
        f"hour, {per_sample}"
    )


def _rl_line(rl: dict[str, Any]) -> str:
    return (
        f"{rl.get('steps')} steps, {number(rl.get('samples'), 6)} samples, "
        f"{number(rl.get('effective_samples'), 6)} effective, staleness up to "
        f"{rl.get('max_staleness_seen')} of {rl.get('staleness_limit')}"
    )


def next_steps(summary: dict[str, Any], run_dir: Path) -> str:
    """What to type next."""
    lines = ["\nnext:"]
    if dig(summary, "bundle", "path"):
        bundle = dig(summary, "bundle", "path")
        lines += [
            f"  rl-pipeline serve {bundle}        chat with the agent on 127.0.0.1",
            f"  rl-pipeline verify {bundle}       check every byte and the signature",
            *_promotion_steps(table(summary, "promotion")),
        ]
    else:
        lines.append("  rl-pipeline run …                 goes on where this run stopped")
    uri = dig(summary, "mlflow", "tracking_uri")
    if uri:
        lines.append(f"  mlflow ui --backend-store-uri {uri} --host 127.0.0.1")
    lines.append(f"  rl-pipeline report {run_dir}       writes the report anew")
    return escape("\n".join(lines))


def _promotion_steps(promotion: dict[str, Any]) -> list[str]:
    """What a person can do with the release."""
    name = f"{promotion.get('model')}:{promotion.get('version')}"
    if promotion.get("outcome") == "waiting":
        return [f"  rl-pipeline approve {name}       look at transcripts, then say yes or no"]
    return (
        ["  rl-pipeline history              who was made champion, and why"] if promotion else []
    )


def _grid(*headings: str) -> Table:
    grid = Table(box=None, padding=(0, 2, 0, 0), title_justify="left")
    for index, heading in enumerate(headings):
        numeric = index > 0 and heading not in ("status", "verdict", "sha256")
        grid.add_column(heading, justify="right" if numeric else "left", overflow="fold")
    return grid
