"""TRL's GRPOTrainer on the agent of `async_tasks`: the other side of the benches of the engine.

Settings follow what TRL's documentation advises for a small model: no vLLM on a CPU, one generation
batch an optimiser step (so that no second forward pass for old log-probabilities is needed), β = 0
(no reference pass), no gradient checkpointing, float32. Tools are TRL's own: it calls those of one
sample after those of another.

Because of that its wait for slow tools is a sum, whatever else happens: so the wait is drawn and
added to the clock instead of slept, and a step that really sleeps shows that both are the same.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from async_agent import Judge, Reached, configured
from async_tasks import Agent
from datasets import Dataset
from peft import LoraConfig
from safetensors.torch import save_file
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from trl import GRPOConfig, GRPOTrainer
from trl.chat_template_utils import qwen3_template

from configs.schema import PipelineConfig
from configs.schema.rl_tools import LogNormalLatency
from tasks.environments.calculator_tool import evaluate
from tasks.environments.row import Row
from tasks.environments.tool_runner import latency_s
from tasks.models.load import load_model, load_tokenizer
from tasks.models.trainable import trainable_tensors
from tasks.rewards.verifiers import verify

CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' }}"
    "{% if message['content'] %}{{ message['content'] }}{% endif %}"
    "{% for call in message['tool_calls'] or [] %}"
    "{{ '<tool_call>{\"name\": \"' + call['function']['name'] + '\", \"arguments\": ' }}"
    "{{ call['function']['arguments'] | tojson }}{{ '}</tool_call>' }}{% endfor %}"
    "{{ '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
"""The project's own template, with calls in the form in which TRL keeps them."""


class Clock:
    """Seconds since `start`, without those in which it was paused, and with those added."""

    def __init__(self) -> None:
        self._since_s: float | None = None
        self.seconds = 0.0

    def start(self) -> None:
        """Run, or run on."""
        self._since_s = time.perf_counter()

    def pause(self) -> float:
        """Stand still; returns the seconds so far."""
        if self._since_s is not None:
            self.seconds += time.perf_counter() - self._since_s
            self._since_s = None
        return self.seconds


@dataclass
class SlowCalculator:
    """The `calc` tool behind a latency, and what there was to wait for."""

    latency: LogNormalLatency | None
    seed: int = 0
    sleep: bool = False
    step_waits: list[float] = field(default_factory=list)
    """Of the calls since the last step's end, in seconds."""
    calls: int = 0

    def tool(self) -> Callable[..., str]:
        """The function TRL is given; it reads the schema from signature and docstring."""

        def calc(expression: str) -> str:
            """Evaluates an integer expression with + - * and parentheses.

            Args:
                expression: The expression.
            """
            self.calls += 1
            if self.latency is not None:
                wait_s = latency_s(self.latency, f"{self.seed}/{self.calls}")
                self.step_waits.append(wait_s)
                if self.sleep:
                    time.sleep(wait_s)
            return str(evaluate(expression))

        return calc


class Watch(TrainerCallback):
    """Stops the clock after every step, keeps the weights, judges, and ends at the target."""

    def __init__(
        self,
        clock: Clock,
        calculator: SlowCalculator,
        out: Path,
        *,
        target: float | None = None,
        judge: Judge | None = None,
        every: int = 1,
    ) -> None:
        self._clock, self._calculator, self._out = clock, calculator, out
        self._target, self._judge, self._every = target, judge, every
        self.waits: list[tuple[float, float]] = []
        """Of each step: seconds of all tool calls one after another, and of the longest."""
        self.work_s: list[float] = []
        """Clock at the end of each step, without waits that were not slept."""
        self.curve: list[tuple[int, float, float]] = []
        self.reached_step: int | None = None

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """Everything is loaded: the first sample follows."""
        self._clock.start()

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kw: Any
    ) -> None:
        """Outside the clock: book the step."""
        self.work_s.append(self._clock.pause())
        waits = self._calculator.step_waits
        self.waits.append((sum(waits), max(waits, default=0.0)))
        waits.clear()
        step = state.global_step
        if self._judge is not None and step % self._every == 0:
            weights = self._out / f"{step:04d}.safetensors"
            save_file(
                {k: v.contiguous() for k, v in trainable_tensors(kw["model"]).items()}, weights
            )
            accuracy = self._judge.accuracy(weights)
            self.curve.append((step, self.seconds(step), accuracy))
            if self._target is not None and accuracy >= self._target:
                self.reached_step = step
                control.should_training_stop = True
        self._clock.start()

    def seconds(self, step: int, *, concurrent: bool = False) -> float:
        """Work and waits up to a step; `concurrent`: as if a step's calls all waited at once."""
        waited = [longest if concurrent else total for total, longest in self.waits[:step]]
        return self.work_s[step - 1] + sum(waited)

    def reached(self, *, concurrent: bool = False) -> Reached:
        """In the form of this project's side."""
        curve = tuple(
            (step, self.seconds(step, concurrent=concurrent), accuracy)
            for step, _, accuracy in self.curve
        )
        if self.reached_step is None:
            return Reached(None, None, curve)
        return Reached(curve[-1][1], self.reached_step, curve)


def outcome_reward(
    completions: Sequence[Sequence[Mapping[str, Any]]],
    answer: Sequence[str],
    kind: Sequence[str],
    completion_ids: Sequence[Sequence[int]],
    end: Sequence[int],
    **_: Any,
) -> list[float | None]:
    """The project's verifier on the last message; one cut off earns nothing."""
    rewards: list[float | None] = []
    for said, gold, answer_kind, ids, stop in zip(
        completions, answer, kind, completion_ids, end, strict=True
    ):
        truncated = not ids or ids[-1] != stop
        text = said[-1]["content"] if said[-1]["role"] == "assistant" else ""
        rewards.append(verify(answer_kind, gold, text or "", truncated=truncated).score)
    return rewards


def train(
    agent: Agent,
    task: str,
    overrides: Mapping[str, Any],
    out: Path,
    *,
    steps: int,
    seed: int,
    threads: int,
    calculator: SlowCalculator,
    judge: Judge | None = None,
    target: float | None = None,
    every: int = 1,
) -> Watch:
    """Train with TRL on what `run_rl` would train with this project's engine."""
    out.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(threads)
    config = configured(task, overrides)
    tokenizer = load_tokenizer(agent.snapshot)
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.response_template = qwen3_template
    watch = Watch(Clock(), calculator, out, target=target, judge=judge, every=every)
    trainer = GRPOTrainer(
        model=load_model(agent.snapshot),
        reward_funcs=outcome_reward,
        args=grpo_config(config, out, steps=steps, seed=seed),
        train_dataset=dataset(agent.rows(task, "train"), tokenizer.eos_token_id),
        processing_class=tokenizer,
        callbacks=[watch],
        peft_config=lora(config),
        tools=[calculator.tool()] if config.tools else None,
    )
    trainer.train()
    return watch


def dataset(rows: Sequence[Row], end: int) -> Dataset:
    """The training prompts as TRL takes them; the other columns reach the reward."""
    return Dataset.from_list(
        [
            {
                "prompt": [{"role": "user", "content": row.prompt}],
                "answer": row.answer,
                "kind": row.answer_kind,
                "end": end,
            }
            for row in rows
        ]
    )


def lora(config: PipelineConfig) -> LoraConfig:
    """The same adapter."""
    adapter = config.rl.trainable
    return LoraConfig(
        r=adapter.r,
        lora_alpha=adapter.alpha,
        lora_dropout=adapter.dropout,
        target_modules=list(adapter.targets),
        task_type="CAUSAL_LM",
    )


def grpo_config(config: PipelineConfig, out: Path, *, steps: int, seed: int) -> GRPOConfig:
    """The same batch, group, loss, optimiser and sampling, in TRL's words."""
    rl = config.rl
    optimiser, loss, sampling = rl.optimiser, rl.loss, rl.sampling
    return GRPOConfig(
        output_dir=str(out),
        seed=seed,
        max_steps=steps,
        per_device_train_batch_size=rl.batch_size,
        gradient_accumulation_steps=1,
        num_generations=rl.group_size,
        max_completion_length=sampling.max_new_tokens * sampling.max_turns,
        max_tool_calling_iterations=sampling.max_turns - 1 or None,
        temperature=sampling.temperature.start,
        beta=rl.kl.coefficient,
        loss_type="dapo",  # the mean over all tokens of the batch, as `token_mean`
        epsilon=loss.clip_low,
        epsilon_high=loss.clip_high,
        delta=loss.dual_clip,
        learning_rate=optimiser.lr,
        adam_beta1=optimiser.betas[0],
        adam_beta2=optimiser.betas[1],
        weight_decay=optimiser.weight_decay,
        max_grad_norm=optimiser.grad_clip,
        lr_scheduler_type="constant_with_warmup",
        warmup_steps=optimiser.warmup_steps,
        bf16=False,
        gradient_checkpointing=False,
        use_cpu=True,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        logging_strategy="no",
        dataloader_pin_memory=False,
    )
