"""What `rl-pipeline edge plan` prints."""

import json
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from rich.markup import escape
from rich.table import Table

from deployment.jetson.archive import extract_archive
from deployment.jetson.device import find_device
from deployment.jetson.edge_plan import (
    EdgePlan,
    Subject,
    find_subject,
    make_plan,
    subject_of_bundle,
)
from deployment.jetson.memory_plan import KvType, Serving
from deployment.jetson.on_device.llama_child import N_UBATCH
from deployment.jetson.on_device.verify import MANIFEST
from flows.commands.bundle_view import find_bundle
from flows.commands.console import console

GIB, MIB = 1 << 30, 1 << 20
DEFAULT_CONTEXT = 4096
_USES = (
    ("weights", "weights_bytes"),
    ("KV cache", "kv_cache_bytes"),
    ("compute buffer", "compute_bytes"),
    ("output buffer", "output_bytes"),
    ("embedding, second copy for the CPU", "embedding_copy_bytes"),
    ("CUDA context (estimate)", "cuda_context_bytes"),
    ("server processes", "server_bytes"),
    ("margin", "margin_bytes"),
)


@dataclass(frozen=True)
class PlanOptions:
    """The command line of `edge plan`."""

    what: str
    context: int | None
    slots: int
    file_type: str | None
    ubatch: int | None
    kv_type: str
    flash: bool
    device: str
    available_mib: int | None
    headless: bool


def _subject(what: str) -> tuple[Subject, int]:
    """(what a plan is made for, the context it is served with)."""
    path = Path(what)
    names = (MANIFEST, f"bundle/{MANIFEST}", "summary.json")
    is_bundle = path.name.endswith(".tar.gz") or any((path / name).is_file() for name in names)
    if not is_bundle:
        subject = find_subject(what)
        return subject, min(DEFAULT_CONTEXT, subject.shape.trained_context)
    bundle = find_bundle(path)
    if bundle.is_dir():
        return _subject_of(bundle)
    with tempfile.TemporaryDirectory(prefix="rl-pipeline-plan-") as temporary:
        return _subject_of(extract_archive(bundle, Path(temporary)))


def _subject_of(bundle: Path) -> tuple[Subject, int]:
    manifest = json.loads((bundle / MANIFEST).read_bytes())
    return subject_of_bundle(bundle, manifest), int(manifest["serving"]["context_length"])


def _plan(options: PlanOptions) -> EdgePlan:
    subject, usual_context = _subject(options.what)
    serving = Serving(
        context=usual_context if options.context is None else options.context,
        slots=options.slots,
        ubatch=N_UBATCH if options.ubatch is None else options.ubatch,
        kv_type=cast(KvType, options.kv_type.upper()),
        flash_attention=options.flash,
    )
    available = None if options.available_mib is None else options.available_mib * MIB
    return make_plan(
        subject,
        serving.checked(),
        find_device(options.device),
        wanted=options.file_type,
        available=available,
        headless=options.headless,
    )


def size(value: int) -> str:
    """Bytes as a person reads them."""
    return f"{value / GIB:.2f} GiB" if value >= GIB // 2 else f"{value / MIB:.1f} MiB"


def _table(title: str, *headings: str) -> Table:
    table = Table(title=title, title_justify="left", box=None, padding=(0, 2, 0, 0))
    for heading in headings:
        table.add_column(heading, justify="left" if heading in ("", "use") else "right")
    return table


def _choices(plan: EdgePlan) -> Table:
    """One row a type; modes of the same bandwidth share a column."""
    rates = sorted({mode.bandwidth for mode in plan.device.modes})
    columns = [f"≤ tok/s at {rate / 1e9:.0f} GB/s" for rate in rates]
    title = "quantisations ([dim]~[/] not made yet, size predicted)"
    table = _table(title, "", "type", "file", "bits", "needs", "longest context", *columns)
    for choice in plan.choices:
        bounds = {one.bandwidth: f"{one.bound:.0f}" for one in choice.speeds}
        name = escape(choice.type)
        table.add_row(
            "[green]fits[/]" if choice.fits else "[bold red]too large[/]",
            f"[bold]{name}[/]" if choice.type == plan.chosen.type else name,
            ("" if choice.measured else "~") + size(choice.file.file_bytes),
            f"{choice.file.bits_per_weight:.2f}",
            size(choice.memory.total_bytes),
            str(choice.longest_context),
            *(bounds[rate] for rate in rates),
        )
    return table


def _memory(plan: EdgePlan) -> Table:
    table = _table(f"memory of {escape(plan.chosen.type)}", "use", "bytes")
    parts = plan.chosen.memory.as_json()
    for name, key in _USES:
        if parts[key]:
            table.add_row(name, size(parts[key]))
    table.add_row("[bold]needed[/]", f"[bold]{size(parts['total_bytes'])}[/]")
    table.add_row("MemAvailable", size(plan.available_bytes))
    return table


def _speeds(plan: EdgePlan) -> Table:
    title = f"tokens/s of {escape(plan.chosen.type)}, context full"
    table = _table(title, "mode", "bandwidth", "bound", "expected")
    for one in plan.chosen.speeds:
        expected = f"{one.expected_low:.0f} to {one.expected_high:.0f}"
        table.add_row(one.mode, f"{one.bandwidth / 1e9:.0f} GB/s", f"{one.bound:.0f}", expected)
    return table


def _remedies(plan: EdgePlan) -> Table:
    table = _table("what would help", "", "change", "frees")
    for remedy in plan.remedies:
        mark = "[green]enough[/]" if remedy.enough else "[dim]not alone[/]"
        table.add_row(mark, escape(remedy.change), size(remedy.frees_bytes))
    return table


def show_plan(options: PlanOptions, *, as_json: bool) -> bool:
    """Print a plan; whether the chosen quantisation fits."""
    plan = _plan(options)
    out = console()
    if as_json:
        body: dict[str, Any] = plan.as_json()
        out.print(json.dumps(body, sort_keys=True, indent=2), soft_wrap=True, markup=False)
        return plan.chosen.fits
    serving = plan.serving
    out.print(
        f"[bold]{escape(plan.subject)}[/] on {plan.device.name}: context {serving.context}, "
        f"{serving.slots} slot{'s' if serving.slots > 1 else ''}, ubatch {serving.ubatch}, "
        f"KV {serving.kv_type}, flash attention {'on' if serving.flash_attention else 'off'}"
    )
    for table in (_choices(plan), _memory(plan), _speeds(plan)):
        out.print(table)
        out.print()
    if plan.remedies:
        out.print(_remedies(plan))
    return plan.chosen.fits
