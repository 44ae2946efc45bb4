"""How each stage function is called; runs inside the stage process."""

import importlib
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from configs.schema import PipelineConfig
from tasks.artifacts import ArtifactRecord
from tasks.artifacts.progress import Reporter

Inputs = Mapping[str, ArtifactRecord]
Facts = Mapping[str, Any]

GX_IMPORT = "gx/import_s"


def data(
    config: PipelineConfig, inputs: Inputs, out_dir: Path, report: Reporter, facts: Facts
) -> ArtifactRecord:
    """Data prep; the import of Great Expectations is timed, as the largest part of its cost."""
    from tasks.data.stage import run

    start_s = time.monotonic()
    importlib.import_module("great_expectations.expectations")
    report.metrics(0, {GX_IMPORT: time.monotonic() - start_s})
    return run(config.data, inputs, out_dir, report)


def sft(
    config: PipelineConfig, inputs: Inputs, out_dir: Path, report: Reporter, facts: Facts
) -> ArtifactRecord:
    """The reference snapshot: learnt, or taken over from an earlier release."""
    from tasks.sft.start import INPUT, adopt

    if INPUT in inputs:
        return adopt(inputs[INPUT], out_dir, report)
    from tasks.sft.stage import run

    return run(config, inputs, out_dir, report)


def rl(
    config: PipelineConfig, inputs: Inputs, out_dir: Path, report: Reporter, facts: Facts
) -> ArtifactRecord:
    """Asynchronous RL."""
    from tasks.rl.stage import run

    return run(config, inputs, out_dir, report)


def evaluation(
    config: PipelineConfig, inputs: Inputs, out_dir: Path, report: Reporter, facts: Facts
) -> ArtifactRecord:
    """Held-out evaluation."""
    from tasks.evaluation.stage import run

    return run(config, inputs, out_dir, report)


def quantize(
    config: PipelineConfig, inputs: Inputs, out_dir: Path, report: Reporter, facts: Facts
) -> ArtifactRecord:
    """Quantisation; accuracy comes from the same evaluation code, through llama.cpp."""
    from quantize.stage import run
    from tasks.artifacts.machine import usable_cores
    from tasks.greedy_answers import greedy_answers
    from tasks.greedy_transcripts import transcripts_of_run

    threads = usable_cores()
    return run(
        config.quantize,
        inputs,
        out_dir,
        report,
        answer_greedily=greedy_answers(config, inputs, threads),
        play=transcripts_of_run(config, inputs, threads),
        threads=threads,
    )


def challenge(
    config: PipelineConfig, inputs: Inputs, out_dir: Path, report: Reporter, facts: Facts
) -> ArtifactRecord:
    """Candidate against champion, each as it is served: its bundle's file, prompt and limits."""
    from functools import partial

    from tasks.artifacts.machine import usable_cores
    from tasks.evaluation.challenge import run
    from tasks.greedy_answers import answer_as_served

    answer = partial(
        answer_as_served,
        parallel=config.quantize.parallel_sequences,
        threads=usable_cores(),
    )
    return run(
        inputs,
        out_dir,
        report,
        problems=config.promotion.problems,
        resamples=config.evaluation.bootstrap_resamples,
        answer=answer,
    )


def package(
    config: PipelineConfig, inputs: Inputs, out_dir: Path, report: Reporter, facts: Facts
) -> ArtifactRecord:
    """The signed bundle; the signing key lies outside it, in the runs folder."""
    from deployment.jetson.facts import BundleFacts
    from deployment.jetson.stage import run

    hashes = {name: record.sha256 for name, record in inputs.items()}
    bundle_facts = BundleFacts.from_config(
        config,
        git_sha=facts["git_sha"] or "unknown",
        git_dirty=bool(facts["git_dirty"]),
        lineage={**hashes, "config": facts["config_sha256"], "lock": facts["lock_sha256"]},
        mlflow_run_id=facts["mlflow_run_id"],
        mlflow_tracking_uri=facts["mlflow_tracking_uri"],
        key_dir=Path(facts["runs_dir"]) / "keys",
    )
    return run(config.package, inputs, out_dir, report, facts=bundle_facts)
