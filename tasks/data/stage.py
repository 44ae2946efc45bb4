"""Data prep as a stage: load, clean, gate, write; the gate reads back the files as written."""

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from configs.schema.data import DataConfig
from tasks.artifacts import (
    ArtifactRecord,
    hash_file,
    hash_json,
    write_atomic,
    write_json,
    write_jsonl,
)
from tasks.artifacts.progress import Reporter
from tasks.data.candidate import Quarantined
from tasks.data.cleaning import Cleaned, clean, gate_rows, quarantined_share
from tasks.data.demonstrations import demonstrations
from tasks.data.drop_folder import heldout_file
from tasks.data.dropped_rows import with_intake
from tasks.data.errors import DataGateError, NoTrainingRowsError, UnknownBandError
from tasks.data.releases import with_releases
from tasks.data.sources import Loaded, load
from tasks.environments.calculator_problems import BANDS
from tasks.environments.row import read_rows
from tasks.gates.data_docs import write_data_docs
from tasks.gates.verdict import GateVerdict, not_evaluated

logger = logging.getLogger(__name__)

INTAKE = "intake"
"""Name of the optional input: what nights have taken in from the drop folder."""
RELEASES = "releases"
"""Name of the optional input: decisions on rows of the quarantine."""
FILES = ("train.jsonl", "heldout.jsonl", "demonstrations.jsonl")


def run(
    config: DataConfig, inputs: Mapping[str, ArtifactRecord], out_dir: Path, report: Reporter
) -> ArtifactRecord:
    """Make the dataset in `out_dir`.

    Returns:
        A record of kind `dataset`; its hash covers the three JSONL files, its `meta` holds counts.

    Raises:
        DataError: a source that cannot be read, nothing to train on, or a failed gate. Quarantine,
            verdict and Data Docs are on disk by then, wherever rows were read at all.
    """
    report.progress(0, 4, "reading rows")
    loaded = load(config)
    intake = inputs.get(INTAKE)
    if intake is not None:
        loaded = with_intake(loaded, intake, config)
    if RELEASES in inputs:
        loaded = with_releases(loaded, inputs[RELEASES])
    report.progress(1, 4, "checking rows")
    cleaned = _clean_or_explain(loaded, config, out_dir)
    _bands_exist(cleaned, config)
    shown = _write_rows(cleaned, config, out_dir, intake)
    report.progress(2, 4, "gate over the written files")
    verdicts = _final_verdicts(out_dir, config, cleaned)
    share = quarantined_share(cleaned.quarantined, len(cleaned.train) + len(cleaned.heldout))
    summary = _summary(loaded, cleaned, shown, out_dir, share)
    failed = _write_gate(out_dir, config, cleaned, verdicts, summary, share)
    report.progress(3, 4, "Data Docs written")
    if failed:
        raise DataGateError(
            f"the data gate failed: {failed}; see {out_dir / 'data_docs' / 'index.html'} and "
            f"{out_dir / 'quarantine.jsonl'}"
        )
    report.progress(4, 4, f"{summary['train_rows']} training, {summary['heldout_rows']} held-out")
    logger.info("dataset of %d + %d rows", summary["train_rows"], summary["heldout_rows"])
    return ArtifactRecord(
        kind="dataset", uri=_uri(out_dir), sha256=dataset_hash(out_dir), meta=summary
    )


def _uri(folder: Path) -> str:
    """Relative to the working directory where it lies below it."""
    below = folder.resolve()
    here = Path.cwd().resolve()
    return str(below.relative_to(here) if below.is_relative_to(here) else folder)


def dataset_hash(folder: Path) -> str:
    """One hash over the three JSONL files."""
    return hash_json({name: hash_file(folder / name) for name in FILES})


def _clean_or_explain(loaded: Loaded, config: DataConfig, out_dir: Path) -> Cleaned:
    """Clean; where nothing is left, say on disk what happened to every row before giving up."""
    quarantined: list[Quarantined] = []
    try:
        return clean(loaded, config, quarantined)
    except NoTrainingRowsError as error:
        cleaned = Cleaned([], [], quarantined, [not_evaluated("train", str(error))])
        write_jsonl(out_dir / "quarantine.jsonl", (q.to_json() for q in quarantined))
        summary = {"train_rows": 0, "quarantined": _by_reason(cleaned)}
        _write_gate(out_dir, config, cleaned, cleaned.verdicts, summary, 0.0)
        raise


def _bands_exist(cleaned: Cleaned, config: DataConfig) -> None:
    have = _band_counts(cleaned.train)
    missing = [band for band in config.rl_bands if band not in have]
    if missing:
        raise UnknownBandError(
            f"data.rl_bands={list(config.rl_bands)} names {', '.join(map(repr, missing))}, which "
            f"no training row has; choose from {', '.join(have)}"
        )


def _write_rows(
    cleaned: Cleaned, config: DataConfig, out_dir: Path, intake: ArtifactRecord | None
) -> int:
    """Write both sides, demonstrations and quarantine; returns how many demonstrations.

    A frozen held-out set is written byte for byte as it was.
    """
    for name, rows in (("train", cleaned.train), ("heldout", cleaned.heldout)):
        write_jsonl(out_dir / f"{name}.jsonl", (row.row().model_dump() for row in rows))
    if intake is not None and (frozen := heldout_file(intake)) is not None:
        write_atomic(out_dir / "heldout.jsonl", frozen.read_bytes())
    shown = demonstrations(cleaned.train, config)
    write_jsonl(out_dir / "demonstrations.jsonl", (d.model_dump() for d in shown))
    write_jsonl(out_dir / "quarantine.jsonl", (q.to_json() for q in cleaned.quarantined))
    return len(shown)


def _final_verdicts(out_dir: Path, config: DataConfig, cleaned: Cleaned) -> list[GateVerdict]:
    heldout = read_rows(out_dir / "heldout.jsonl")
    train = read_rows(out_dir / "train.jsonl")
    waived = {row.id: row.waived for row in [*cleaned.train, *cleaned.heldout] if row.waived}
    return [
        gate_rows(train, "train", config.gate.min_train_rows, config, heldout, waived),
        gate_rows(heldout, "heldout", config.gate.min_heldout_rows, config, [], waived),
    ]


def _by_reason(cleaned: Cleaned) -> dict[str, int]:
    return dict(sorted(Counter(item.code for item in cleaned.quarantined).items()))


def _released(cleaned: Cleaned) -> dict[str, int]:
    """Rows that take part although a check fails, by that check: a person released them."""
    codes = Counter(code for row in [*cleaned.train, *cleaned.heldout] for code in row.waived)
    return dict(sorted(codes.items()))


def _band_counts(rows: Sequence[Any]) -> dict[str, int]:
    counted = Counter(row.band for row in rows)
    order = [band for band in BANDS if band in counted]
    return {band: counted[band] for band in [*order, *sorted(set(counted) - set(order))]}


def _summary(
    loaded: Loaded, cleaned: Cleaned, shown: int, out_dir: Path, share: float
) -> dict[str, Any]:
    return {
        **loaded.facts,
        "train_rows": len(cleaned.train),
        "heldout_rows": len(cleaned.heldout),
        "demonstrations": shown,
        "train_bands": _band_counts(cleaned.train),
        "heldout_bands": _band_counts(cleaned.heldout),
        "heldout_sha256": hash_file(out_dir / "heldout.jsonl"),
        "heldout_frozen": loaded.frozen is not None,
        "heldout_given_up": cleaned.given_up,
        "dropped_rows": sum(row.dropped for row in cleaned.train),
        "released": _released(cleaned),
        "quarantined": _by_reason(cleaned),
        "quarantined_share": share,
    }


def _write_gate(
    out_dir: Path,
    config: DataConfig,
    cleaned: Cleaned,
    verdicts: list[GateVerdict],
    summary: dict[str, Any],
    share: float,
) -> str:
    """Write verdict, summary and Data Docs; returns why the gate failed, or nothing."""
    reasons = [f"{verdict.suite}: {verdict.why()}" for verdict in verdicts if not verdict.passed]
    if share > config.gate.max_quarantined_share:
        reasons.append(
            f"{share:.1%} of rows were set aside for a fault of their own, above "
            f"data.gate.max_quarantined_share={config.gate.max_quarantined_share:.1%}"
        )
    gate = {
        "passed": not reasons,
        "reasons": reasons,
        "verdicts": [verdict.to_json() for verdict in verdicts],
        "as_read": [verdict.to_json() for verdict in cleaned.verdicts],
        "quarantined": _by_reason(cleaned),
        "released": _released(cleaned),
        "quarantined_share": share,
        "max_quarantined_share": config.gate.max_quarantined_share,
    }
    write_json(out_dir / "gate.json", gate)
    write_json(out_dir / "summary.json", summary)
    write_data_docs(
        out_dir / "data_docs",
        "Data gate",
        summary,
        [*verdicts, *cleaned.verdicts],
        reasons=reasons,
        held=[item.to_json() for item in cleaned.quarantined],
    )
    return "; ".join(reasons)
