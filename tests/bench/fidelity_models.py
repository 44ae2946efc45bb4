"""Two small agents made from nothing, and rollouts of their own, for the benches of fidelity.

They differ in task, shape and vocabulary; the rows of all their matrices are divisible by 256, so
that every type is really used. What they learn matters little, that they are uncertain in many
ways does: a model with one doubt has one error, and which quantisation hits it is luck.
"""

import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from configs.schema import PipelineConfig
from quantize.convert import convert
from quantize.rollouts import RolloutTokens
from tasks.artifacts.progress import Reporter
from tasks.data import stage as data_stage
from tasks.environments.renderer import PromptRenderer
from tasks.environments.row import read_rows
from tasks.models.load import load_model, load_tokenizer, save_model
from tasks.sampling.episode import EpisodeTask, run_episodes
from tasks.sampling.llama_cpp_engine import LlamaCppEngine
from tasks.sampling.types import SamplingParams
from tasks.sft import stage as sft_stage

NAMES = [
    "Ada",
    "Ben",
    "Cleo",
    "Dan",
    "Eva",
    "Finn",
    "Gita",
    "Hugo",
    "Ines",
    "Jon",
    "Kim",
    "Lea",
    "Max",
    "Nora",
    "Omar",
    "Pia",
    "Quin",
    "Rosa",
    "Sam",
    "Tara",
    "Uwe",
    "Vera",
    "Will",
    "Xenia",
    "Yara",
    "Zoe",
]
THINGS = [
    "apples",
    "books",
    "boxes",
    "bricks",
    "candles",
    "cards",
    "chairs",
    "coins",
    "cups",
    "eggs",
    "flowers",
    "fish",
    "hats",
    "keys",
    "lamps",
    "letters",
    "maps",
    "nails",
    "oranges",
    "pans",
    "pens",
    "plates",
    "pots",
    "ropes",
    "shells",
    "shoes",
    "stamps",
    "stones",
    "tickets",
    "toys",
]
PLACES = [
    "at the market",
    "in the old shed",
    "on the train",
    "near the river",
    "at school",
    "in the garden",
    "by the sea",
    "in the cellar",
    "at the fair",
    "in town",
    "behind the house",
    "on the farm",
]


Maker = Callable[[random.Random], dict[str, str]]
"""Draws one problem: `question` and `answer`, which ends with `#### N`."""


@dataclass(frozen=True)
class Agent:
    """A trained model: its folder, its F16 file, and rollouts in the order they were sampled."""

    name: str
    folder: Path
    f16: Path
    matrix: list[RolloutTokens]
    """For the importance matrix."""
    heldout: list[RolloutTokens]


def word_problem(rng: random.Random) -> dict[str, str]:
    """A problem of two steps and a worked solution, said in one of many ways."""
    who, friend = rng.sample(NAMES, 2)
    thing, place = rng.choice(THINGS), rng.choice(PLACES)
    a, b, c = rng.randint(2, 60), rng.randint(2, 40), rng.randint(2, 9)
    told = rng.choice(
        (
            f"{who} finds {a} {thing} {place} and buys {b} more.",
            f"There are {a} {thing} {place}. {who} brings another {b}.",
            f"{place.capitalize()}, {who} counts {a} {thing}, then {b} that {friend} left there.",
        )
    )
    total = a + b
    multiplied = rng.random() < 0.5
    end = total * c if multiplied else total - min(c, total)
    asked = (
        f"{friend} has {c} times as many. How many {thing} does {friend} have?"
        if multiplied
        else f"{who} gives {friend} {c} of them. How many {thing} are left?"
    )
    first = rng.choice(
        (
            f"{who} has {a}+{b}={total} {thing}.",
            f"First add: {a}+{b}={total}.",
            f"{place.capitalize()} there are {total} {thing}, because {a}+{b}={total}.",
            f"Together that makes {total} {thing}.",
        )
    )
    sign = "*" if multiplied else "-"
    second = rng.choice(
        (
            f"Then {total}{sign}{c}={end}.",
            f"So {friend if multiplied else who} has {total}{sign}{c}={end} {thing}.",
            f"That is {end} {thing} {'for ' + friend if multiplied else 'that stay'}.",
        )
    )
    return {"question": f"{told} {asked}", "answer": f"{first}\n{second}\n#### {end}"}


def stock_note(rng: random.Random) -> dict[str, str]:
    """A note about goods, and the record to be made of it, with a remark in one of many ways."""
    who, thing, place = rng.choice(NAMES), rng.choice(THINGS), rng.choice(PLACES)
    count, price = rng.randint(2, 48), rng.randint(2, 30)
    told = rng.choice(
        (
            f"{who} sold {count} {thing} {place} at {price} each.",
            f"Sold {place} by {who}: {count} {thing}, {price} apiece.",
            f"{count} {thing} went {place}; {who} asked {price} for one.",
        )
    )
    remark = rng.choice(
        (
            f"{who} did well {place}",
            f"only {rng.randint(1, 9)} {thing} are left",
            f"{rng.choice(NAMES)} took most of them",
            f"more {rng.choice(THINGS)} are wanted",
        )
    )
    total = count * price
    record = {"seller": who, "item": thing, "count": count, "total": total, "note": remark}
    return {"question": told, "answer": f"{json.dumps(record)}\n#### {total}"}


def write_problems(path: Path, make: Maker, count: int, seed: int) -> Path:
    """A file in the form of GSM8K; no problem stands in it twice."""
    rng = random.Random(seed)
    seen: dict[str, dict[str, str]] = {}
    while len(seen) < count:
        row = make(rng)
        seen.setdefault(row["question"], row)
    path.write_text("".join(json.dumps(row) + "\n" for row in seen.values()), encoding="utf-8")
    return path


@dataclass(frozen=True)
class Recipe:
    """A task, the shape of a model and how long it learns."""

    make: Maker
    shape: dict[str, int]
    sft: dict[str, Any]


RECIPES = {
    "word problems": Recipe(
        word_problem,
        {
            "vocab_size": 768,
            "hidden_size": 512,
            "ffn_size": 768,
            "layers": 3,
            "heads": 8,
            "kv_heads": 4,
        },
        {"steps": 300, "batch_size": 24, "optimiser": {"lr": 1e-3, "warmup_steps": 20}},
    ),
    "stock notes": Recipe(
        stock_note,
        {
            "vocab_size": 512,
            "hidden_size": 512,
            "ffn_size": 1024,
            "layers": 3,
            "heads": 4,
            "kv_heads": 2,
        },
        {"steps": 300, "batch_size": 24, "optimiser": {"lr": 1e-3, "warmup_steps": 20}},
    ),
}


def _config(recipe: Recipe, folder: Path, seed: int) -> PipelineConfig:
    train = write_problems(folder / "problems.jsonl", recipe.make, 8000, seed)
    return PipelineConfig.model_validate(
        {
            "profile": "bench",
            "tools": [],
            "data": {"source": {"type": "file", "train": str(train), "heldout_share": 0.15}},
            "model": {"type": "scratch", "max_length": 256, **recipe.shape},
            "sft": {"seed": seed, **recipe.sft},
        }
    )


def make_agent(
    name: str,
    folder: Path,
    *,
    rollouts: int,
    steps: int | None = None,
    seed: int = 0,
    threads: int = 1,
) -> Agent:
    """Make data and model, then sample `rollouts` for the matrix and as many other ones.

    `steps` shortens what the recipe asks of SFT, where what was learnt does not matter.
    """
    folder.mkdir(parents=True, exist_ok=True)
    recipe = RECIPES[name]
    if steps is not None:
        recipe = replace(recipe, sft={**recipe.sft, "steps": steps})
    config = _config(recipe, folder, seed)
    data = data_stage.run(config.data, {}, folder / "data", Reporter(folder / "data"))
    sft_stage.run(config, {"data": data}, folder / "sft", Reporter(folder / "sft"))
    model = folder / "sft" / "snapshot"
    f16 = convert(model, folder / "F16.gguf").path
    sampled = list(_sample(config, model, f16, folder / "data", 2 * rollouts, threads))
    return Agent(name, model, f16, sampled[:rollouts], sampled[rollouts:])


def relabelled(folder: Path, out: Path, seed: int) -> Path:
    """The same network with its hidden units in another order: equal to the last bit but for the
    order of sums, and rounded in other blocks. What differs between orders is the luck of rounding.
    """
    model, tokenizer = load_model(folder), load_tokenizer(folder)
    generator = torch.Generator().manual_seed(seed)
    config, body = model.config, model.model
    stream = torch.randperm(config.hidden_size, generator=generator)
    with torch.no_grad():
        _reorder(body.embed_tokens.weight, columns=stream)
        _reorder(body.norm.weight, rows=stream)
        for layer in body.layers:
            attention, mlp = layer.self_attn, layer.mlp
            inner = torch.randperm(config.intermediate_size, generator=generator)
            for norm in (layer.input_layernorm, layer.post_attention_layernorm):
                _reorder(norm.weight, rows=stream)
            for projection in (attention.q_proj, attention.k_proj, attention.v_proj):
                _reorder(projection.weight, columns=stream)
            _reorder(attention.o_proj.weight, rows=stream)
            for projection in (mlp.gate_proj, mlp.up_proj):
                _reorder(projection.weight, rows=inner, columns=stream)
            _reorder(mlp.down_proj.weight, rows=stream, columns=inner)
    save_model(model, tokenizer, out)
    return out


def _reorder(
    weight: torch.Tensor, rows: torch.Tensor | None = None, columns: torch.Tensor | None = None
) -> None:
    if rows is not None:
        weight.copy_(weight[rows].clone())
    if columns is not None:
        weight.copy_(weight[:, columns].clone())


def _sample(
    config: PipelineConfig, model: Path, f16: Path, data: Path, count: int, threads: int
) -> Iterator[RolloutTokens]:
    """Rollouts at temperature 1 on held-out problems, no problem on both sides."""
    renderer = PromptRenderer(load_tokenizer(model), config.system_prompt)
    rows = read_rows(data / "heldout.jsonl")
    half = count // 2
    side = len(rows) // 2
    asked = [rows[(i % side) + (side if i >= half else 0)] for i in range(count)]
    tasks = [
        EpisodeTask(
            str(i), row.id, str(i), ({"role": "user", "content": row.prompt},), seed=10_000 + i
        )
        for i, row in enumerate(asked)
    ]
    with LlamaCppEngine(
        f16,
        n_ctx_per_seq=256,
        parallel_sequences=64,
        threads=threads,
        end_of_turn_ids=(renderer.end_of_turn_id,),
    ) as engine:
        played = run_episodes(
            engine,
            tasks,
            renderer,
            {},
            max_turns=1,
            params=SamplingParams(1.0, 80),
        )
    for rollout in played:
        yield RolloutTokens(rollout.token_ids, rollout.action_mask)
