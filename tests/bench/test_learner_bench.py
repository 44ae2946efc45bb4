"""The learner beside a bare loop on the same packed batches, and how much padding it computes.

Times are CPU time of one thread: both sides compute and wait for nothing, and other work on the
machine does not count.
"""

import itertools
import json
import random
import statistics
import time
from pathlib import Path

import pytest
import torch

from configs.load import load_config
from configs.schema import PipelineConfig
from configs.schema.model import ScratchModel
from tasks.environments.calculator_problems import calculator_demonstrations, problem
from tasks.environments.renderer import PromptRenderer
from tasks.models.batching import micro_batches, padding_share
from tasks.models.load import load_model, save_model
from tasks.models.packing import packing_of
from tasks.models.policy import PolicyModule
from tasks.models.scratch import build_model, demonstration_texts, train_tokenizer
from tasks.models.trainable import attach
from tasks.rl.batch import samples_of
from tasks.rl.learner import Learner
from tasks.rl.types import Group, ScoredRollout
from tasks.sampling.types import PolicyVersion, Rollout, StopReason, Turn
from tests.figures.record import record

pytestmark = pytest.mark.bench

ROUNDS = 9
LENGTHS = Path(__file__).with_name("gsm8k_lengths.json")
"""Prompt and answer of 512 GSM8K training rows, in tokens of SmolLM2."""


@pytest.fixture(scope="module")
def setting(tmp_path_factory):
    """The calculator's model, untrained, its config, and one batch of its demonstrations."""
    config = load_config("calculator", ["rl.runtime.type=inline"])
    rng = random.Random(0)
    rows = [
        problem(f"{rng.randint(10, 99)}{rng.choice('+-*')}{rng.randint(10, 99)}", "easy")
        for _ in range(200)
    ]
    demonstrations = calculator_demonstrations(rows, 200, tool_share=0.6, seed=0)
    texts = demonstration_texts(d.messages for d in demonstrations)
    tokenizer = train_tokenizer(texts, 512)
    folder = tmp_path_factory.mktemp("snapshot")
    sha256 = save_model(build_model(ScratchModel(), tokenizer, seed=0), tokenizer, folder)
    renderer = PromptRenderer(tokenizer)
    spoken = [renderer.supervised(d.messages) for d in demonstrations[: config.rl.batch_size]]
    size = config.rl.group_size
    groups = [
        Group(str(i), "row", tuple(_scored(f"{i}.{j}", str(i), *spoken[i * size + j], float(j % 2))
                                   for j in range(size)))
        for i in range(config.rl.batch_size // size)
    ]  # fmt: skip
    return config, (folder, sha256), rows, groups


def _scored(name, group, ids, mask, reward) -> ScoredRollout:
    """A demonstration as an episode: every run of learnt tokens is a turn."""
    runs = [[i for i, _ in run] for own, run in itertools.groupby(enumerate(mask), lambda x: x[1])
            if own]  # fmt: skip
    version = PolicyVersion(0, 0)
    turns = tuple(Turn(r[0], r[-1] + 1, StopReason.END_OF_TURN, version) for r in runs)
    mu = tuple(-6.2 if m else 0.0 for m in mask)  # nearly log 1/512: untrained, all are alike
    rollout = Rollout(name, "row", group, tuple(ids), tuple(mask), mu, turns, 1.0)
    return ScoredRollout(rollout, reward, reward, {}, (0.0,) * (len(turns) - 1) + (reward,))


class BareLoop:
    """Forward, backward, clip and step over the learner's own batches; `reference` adds the second
    forward pass that KL to the snapshot asks for."""

    def __init__(
        self, learner: Learner, config: PipelineConfig, snapshot, groups, reference
    ) -> None:
        model = attach(load_model(snapshot[0]), config.rl.trainable, config.rl.seed)
        self.module = PolicyModule(model, value_head=False, seed=0, packed=True)
        self.trained = [p for p in model.parameters() if p.requires_grad]
        self.adam = torch.optim.AdamW(self.trained, lr=1e-3, fused=True)
        samples = samples_of(groups, config.rl.credit, {})
        self.batches = [batch for _, batch in learner.share(samples)]
        self.tokens = float(sum(b.action_mask_B_T.sum() for b in self.batches))
        self.reference = reference

    def logprobs(self, batch) -> torch.Tensor:
        """Of the actions: (N,)."""
        wanted = batch.action_mask_B_T[:, 1:]
        hidden = self.module._hidden(batch.token_ids_B_T, batch.valid_B_T)[:, :-1][wanted]
        logits = self.module.causal_model.lm_head(hidden)
        targets = batch.token_ids_B_T[:, 1:][wanted]
        return -torch.nn.functional.cross_entropy(logits, targets, reduction="none")

    def step(self) -> None:
        """One optimiser step on the batch."""
        for batch in self.batches:
            penalty = 0.0
            if self.reference:
                with self.module.as_reference():
                    reference = self.logprobs(batch)
            logprobs = self.logprobs(batch)
            if self.reference:
                penalty = 1e-3 * (logprobs - reference).square().sum()
            advantages = batch.advantages_B_T[batch.action_mask_B_T]
            loss = (penalty - (logprobs * advantages).sum()) / self.tokens
            loss.backward()
        torch.nn.utils.clip_grad_norm_(self.trained, 1.0)
        self.adam.step()
        self.adam.zero_grad()


def cpu_seconds(calls, rounds=ROUNDS) -> list[list[float]]:
    """CPU time of each call, in turns; the first round warms up."""
    times: list[list[float]] = [[] for _ in calls]
    for _ in range(rounds + 1):
        for own, call in zip(times, calls, strict=True):
            started_s = time.process_time()
            call()
            own.append(time.process_time() - started_s)
    return [own[1:] for own in times]


@pytest.mark.figure("learner_over_bare_loop")
def test_learner_over_a_bare_loop(setting):
    torch.set_num_threads(1)
    config, snapshot, rows, groups = setting
    learner = Learner(config, *snapshot, rows, threads=1)
    without_kl = load_config(
        "calculator",
        ["rl.runtime.type=inline", "rl.kl.coefficient=0", "rl.kl.adaptive=null",
         "rl.kl.measure_every=1000"],
    )  # fmt: skip
    free = Learner(without_kl, *snapshot, rows, threads=1)
    bare, alone = (BareLoop(learner, config, snapshot, groups, r) for r in (True, False))
    tokens = sum(len(r.rollout.token_ids) for g in groups for r in g.rollouts)
    sides = {
        "learner": lambda: learner.train(groups, 1e-3),
        "bare": bare.step,
        "learner_without_reference": lambda: free.train(groups, 0.0),
        "bare_without_reference": alone.step,
    }
    seconds = dict(zip(sides, cpu_seconds(list(sides.values())), strict=True))

    def over(ours: str, other: str) -> float:
        pairs = zip(seconds[ours], seconds[other], strict=True)
        return statistics.median(b / a for a, b in pairs)

    with_reference = over("learner", "bare")
    without = over("learner_without_reference", "bare_without_reference")
    ratio, against_one = min(with_reference, without), over("learner", "bare_without_reference")
    rates = {name: tokens / statistics.median(s) for name, s in seconds.items()}
    record(
        "learner_over_bare_loop",
        value=round(ratio, 3),
        met=ratio >= 0.85,
        note=f"one thread, CPU time, {config.rl.batch_size} calculator samples, LoRA; like with "
        f"like: {with_reference:.2f} where both also score the batch under the reference, "
        f"{without:.2f} where neither does (the lower one counts). Beyond that the learner takes "
        "credit, builds the batch, and reports entropy, ratios and KL. With its reference, "
        f"against a loop without: {against_one:.2f}",
        details={"tokens_per_s": rates, "over_loop_without_reference": against_one},
    )
    assert ratio > 0.6


@pytest.mark.figure("padding_share_gsm8k")
def test_padding_on_gsm8k_lengths(setting):
    _, snapshot, _, _ = setting
    lengths = [prompt + answer for prompt, answer in json.loads(LENGTHS.read_text())][:256]
    model = load_model(snapshot[0])
    model.config.max_position_embeddings = max(lengths)
    module = PolicyModule(model, value_head=False, seed=0, packed=True)
    computed = []
    module.causal_model.model.layers[0].mlp.register_forward_hook(
        lambda _m, inputs, _o: computed.append(inputs[0].shape[0] * inputs[0].shape[1])
    )
    budget = load_config("gsm8k_qwen2.5_0.5b").rl.deepspeed.micro_batch_tokens
    cut = micro_batches(lengths, budget, packed=True)
    cells = 0
    with torch.no_grad():
        for rows in cut:
            valid = torch.arange(max(lengths[i] for i in rows)) < torch.tensor(
                [[lengths[i]] for i in rows]
            )
            # Rows that begin unlike, so that nothing is shared and only padding is measured.
            ids = torch.tensor(rows)[:, None].expand_as(valid)
            cells += sum(p.source_B_T.numel() for p in packing_of(ids, valid).parts)
            module(ids, valid, torch.zeros_like(valid), torch.ones(len(rows)))
    layers = 1 - sum(lengths) / sum(computed)
    attention = 1 - sum(lengths) / cells
    bucketed = padding_share(lengths, micro_batches(lengths, budget))
    record(
        "padding_share_gsm8k",
        value=round(max(layers, attention), 4),
        met=max(layers, attention) <= 0.05,
        note=f"256 samples, {budget} tokens a micro-batch: layers compute {layers:.1%} padding, "
        f"the grids of attention hold {attention:.1%} (the value); padded buckets, the other "
        f"setting of deepspeed.micro_batching, {bucketed:.1%}",
        details={"layers": layers, "attention": attention, "bucketed": bucketed},
    )
    assert layers == 0.0 and attention <= 0.05


@pytest.mark.figure("shared_prompts_over_each_alone")
def test_prompts_of_a_group_computed_once(setting):
    """GSM8K's lengths in groups of eight; against the same samples with a prompt each."""
    torch.set_num_threads(1)
    config, snapshot, rows, _ = setting
    learner = Learner(config, *snapshot, rows, threads=1)
    lengths = json.loads(LENGTHS.read_text())
    alike, unlike = (_gsm8k_groups(lengths, 64, config.rl.group_size, s) for s in (True, False))
    tokens = sum(len(r.rollout.token_ids) for g in alike for r in g.rollouts)
    prompts = sum(lengths[g][0] for g in range(len(alike)))
    computed = tokens - (config.rl.group_size - 1) * prompts
    shared, alone = cpu_seconds(
        [lambda: learner.train(alike, 1e-3), lambda: learner.train(unlike, 1e-3)], rounds=5
    )
    ratio = statistics.median(b / a for a, b in zip(shared, alone, strict=True))
    record(
        "shared_prompts_over_each_alone",
        value=round(ratio, 3),
        met=ratio > 1,
        note=f"one thread, CPU time, 64 samples of GSM8K's lengths in groups of "
        f"{config.rl.group_size}: layers compute {computed / tokens:.0%} of {tokens} tokens",
        details={"shared_s": shared, "alone_s": alone, "computed_share": computed / tokens},
    )
    assert ratio > 1


def _gsm8k_groups(lengths, samples: int, size: int, alike: bool) -> list[Group]:
    """Random tokens in prompts and answers of these lengths; unlike = prompts begin unlike too."""
    rng = random.Random(7)
    groups = []
    for number in range(samples // size):
        prompt = [rng.randrange(3, 500) for _ in range(lengths[number][0])]
        scored = []
        for member in range(size):
            answer = [rng.randrange(3, 500) for _ in range(lengths[number + 8 * member][1])]
            first = prompt[0] if alike else 3 + number * size + member
            ids = [first, *prompt[1:], *answer]
            mask = [False] * len(prompt) + [True] * len(answer)
            scored.append(_scored(f"{number}.{member}", str(number), ids, mask, float(member % 2)))
        groups.append(Group(str(number), "row", tuple(scored)))
    return groups
