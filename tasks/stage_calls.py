"""How each stage function is called; runs inside the stage process."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from configs.schema import PipelineConfig
from tasks.artifacts import ArtifactRecord
from tasks.artifacts.progress import Reporter

Inputs = Mapping[str, ArtifactRecord]
Facts = Mapping[str, Any]


def data(
    config: PipelineConfig, inputs: Inputs, out_dir: Path, report: Reporter, facts: Facts
) -> ArtifactRecord:
    """Data prep."""
    from tasks.data.stage import run

    return run(config.data, inputs, out_dir, report)


def sft(
    config: PipelineConfig, inputs: Inputs, out_dir: Path, report: Reporter, facts: Facts
) -> ArtifactRecord:
    """The reference snapshot."""
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

    from tasks.greedy_answers import greedy_answers

    return run(config.quantize, inputs, out_dir, report, answer_greedily=greedy_answers(config))


def package(
    config: PipelineConfig, inputs: Inputs, out_dir: Path, report: Reporter, facts: Facts
) -> ArtifactRecord:
    """The signed bundle."""
    from deployment.jetson.stage import run

    shown = {
        "profile": config.profile,
        "system_prompt": config.system_prompt,
        "tools": list(config.tools),
        **facts,
    }
    return run(config.package, inputs, out_dir, report, facts=shown)
