"""SFT: learn the demonstrations, then freeze the result as the reference snapshot."""

import random
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch

from configs.schema import PipelineConfig
from configs.schema.training import Lora
from tasks.artifacts.progress import Reporter
from tasks.artifacts.record import ArtifactRecord
from tasks.environments.renderer import PromptRenderer
from tasks.environments.row import Demonstration, read_demonstrations
from tasks.models.base import base_model
from tasks.models.batching import micro_batches, pad_rows, valid_by_length
from tasks.models.errors import NonFiniteStepError
from tasks.models.load import save_model
from tasks.models.merge import merged_tensors
from tasks.models.policy import PolicyModule
from tasks.models.train_engine import TrainEngine
from tasks.models.trainable import attach

Example = tuple[list[int], list[bool]]
"""Token ids, and True where the loss falls."""


class NoDemonstrationsError(ValueError):
    """There is nothing SFT could learn from."""


def run(
    config: PipelineConfig, inputs: Mapping[str, ArtifactRecord], out_dir: Path, report: Reporter
) -> ArtifactRecord:
    """Train on the demonstrations of the data stage; writes `snapshot/`."""
    sft = config.sft
    torch.manual_seed(sft.seed)
    demonstrations = read_demonstrations(inputs["data"].path / "demonstrations.jsonl")
    model, tokenizer = base_model(
        config.model,
        (d.messages for d in demonstrations),
        out_dir,
        dtype=sft.deepspeed.dtype,
        seed=sft.seed,
    )
    renderer = PromptRenderer(tokenizer, config.system_prompt)
    examples, too_long = encode(demonstrations, renderer, config.model.max_length)
    trained = attach(model, sft.trainable, sft.seed)
    if sft.steps:
        module = PolicyModule.of(trained, sft.deepspeed, value_head=False, seed=sft.seed)
        engine = TrainEngine(module, sft.optimiser, sft.deepspeed, total_steps=sft.steps)
        module.train()
        fit(engine, examples, config, report)
    weights = merged_tensors(trained)
    weights_sha256 = save_model(model, tokenizer, out_dir / "snapshot", tensors=weights)
    return ArtifactRecord(
        kind="model",
        uri=out_dir.as_posix(),
        sha256=weights_sha256,
        meta={
            "examples": len(examples),
            "too_long": too_long,
            "steps": sft.steps,
            "adapter": isinstance(sft.trainable, Lora),
            "parameters": sum(t.numel() for t in weights.values()),
        },
    )


def encode(
    demonstrations: Sequence[Demonstration], renderer: PromptRenderer, max_length: int
) -> tuple[list[Example], int]:
    """Examples that fit the context, and how many did not.

    Raises:
        NoDemonstrationsError: none is left.
    """
    examples = [renderer.supervised(d.messages, d.learn_from) for d in demonstrations]
    fitting = [example for example in examples if len(example[0]) <= max_length]
    if not fitting:
        raise NoDemonstrationsError(
            f"none of {len(examples)} demonstrations fits model.max_length={max_length} tokens; "
            "raise it, or give the data a solution or messages column that is shorter"
        )
    return fitting, len(examples) - len(fitting)


def batches(count: int, batch_size: int, steps: int, seed: int) -> Iterator[list[int]]:
    """Indices of each step's examples: shuffled epochs, none repeated before all were seen."""
    rng = random.Random(seed)
    queue: list[int] = []
    for _ in range(steps):
        while len(queue) < batch_size:
            epoch = list(range(count))
            rng.shuffle(epoch)
            queue += epoch
        yield queue[:batch_size]
        queue = queue[batch_size:]


def fit(
    engine: TrainEngine, examples: Sequence[Example], config: PipelineConfig, report: Reporter
) -> None:
    """Run every optimiser step.

    Raises:
        NonFiniteStepError: too many steps in a row, or all of them, had a non-finite gradient.
    """
    sft = config.sft
    order = batches(len(examples), sft.batch_size, sft.steps, sft.seed)
    for step, indices in enumerate(order, start=1):
        batch = [examples[i] for i in indices]
        tokens = sum(sum(mask) for _, mask in batch)
        loss = 0.0
        for rows in micro_batches(
            [len(ids) for ids, _ in batch],
            sft.deepspeed.micro_batch_tokens,
            packed=sft.deepspeed.micro_batching == "packed",
        ):
            loss += _accumulate(engine, [batch[i] for i in rows], tokens)
        stats = engine.step()
        report.metrics(
            step,
            {
                "sft/loss": loss,
                "sft/grad_norm": stats.grad_norm,
                "sft/lr": stats.lr,
                "sft/skipped_steps": float(engine.skipped_steps),
            },
        )
        report.progress(step, sft.steps, f"loss {loss:.3f}")
    if not engine.steps_taken:
        raise NonFiniteStepError(
            f"all sft.steps={sft.steps} steps had a non-finite gradient: nothing was learnt; lower "
            "sft.optimiser.lr, or choose other base weights"
        )


def _accumulate(engine: TrainEngine, batch: Sequence[Example], denominator: int) -> float:
    """Add one micro-batch's gradient; its loss is a sum over the whole batch's policy tokens."""
    scores = engine.forward(
        pad_rows([ids for ids, _ in batch], torch.long),
        valid_by_length([len(ids) for ids, _ in batch]),
        pad_rows([mask for _, mask in batch], torch.bool),
        torch.ones(len(batch)),
    )
    loss = -scores.logprobs_B_T.sum() / denominator
    engine.backward(loss)
    return float(loss.detach())
