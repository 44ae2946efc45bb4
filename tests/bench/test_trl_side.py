"""TRL is asked for the very thing this project does: the same ids, masks and rewards."""

import importlib

import pytest
from async_agent import configured

from configs.schema.rl_tools import LogNormalLatency
from tasks.environments.renderer import PromptRenderer
from tasks.models.scratch import train_tokenizer

pytestmark = pytest.mark.slow

CALL = '<tool_call>{"name": "calc", "arguments": {"expression": "12+34"}}</tool_call>'
PARSED = [
    {"type": "function", "function": {"name": "calc", "arguments": {"expression": "12+34"}}}
]  # fmt: skip


@pytest.fixture(scope="module")
def side():
    """The module under test: it takes seconds to import, and only these tests pay for it."""
    pytest.importorskip("trl")
    return importlib.import_module("trl_side")


@pytest.fixture(scope="module")
def tokenizers(side):
    """The project's, and the same one dressed for TRL."""
    texts = [CALL, "12+34=46", "user\n", "assistant\n", "tool\n"]
    own, dressed = (train_tokenizer(texts, 400) for _ in range(2))
    dressed.chat_template = side.CHAT_TEMPLATE
    dressed.response_template = side.qwen3_template
    return own, dressed


def test_trl_accepts_the_template(tokenizers):
    from trl.chat_template_utils import is_chat_template_prefix_preserving, supports_tool_calling

    assert supports_tool_calling(tokenizers[1])
    assert is_chat_template_prefix_preserving(tokenizers[1])


def test_prompts_and_observations_have_the_same_ids(tokenizers):
    own, dressed = tokenizers
    renderer = PromptRenderer(own)
    asked = [{"role": "user", "content": "12+34=?"}]
    prompt = renderer.prompt_ids(asked)
    assert prompt == dressed.apply_chat_template(
        asked, add_generation_prompt=True, tokenize=True, return_dict=False
    )
    said = [*asked, {"role": "assistant", "content": CALL}]
    observed = renderer.observation_ids(said, [{"role": "tool", "content": "46"}])
    whole = dressed.apply_chat_template(
        [
            *asked,
            {"role": "assistant", "content": "", "tool_calls": PARSED},
            {"role": "tool", "name": "calc", "content": "46"},
        ],
        add_generation_prompt=True,
        tokenize=True,
        return_dict=False,
    )
    sampled = [*renderer.encode(CALL), renderer.end_of_turn_id]
    assert [*prompt, *sampled, *observed] == whole


def test_a_call_is_parsed_as_the_project_parses_it(tokenizers):
    from trl.chat_template_utils import parse_response

    _, dressed = tokenizers
    ids = [*dressed(CALL, add_special_tokens=False)["input_ids"], dressed.eos_token_id]
    prefix = dressed.apply_chat_template(
        [{"role": "user", "content": "12+34=?"}],
        add_generation_prompt=True,
        tokenize=True,
        return_dict=False,
    )
    assert parse_response(dressed, ids, prefix=prefix)["tool_calls"] == PARSED


def test_rewards_are_the_verifiers(side):
    said = [[{"role": "assistant", "content": text}] for text in ("12+34=46", "45", "46", "x")]
    rewards = side.outcome_reward(
        completions=said,
        answer=["46"] * 4,
        kind=["number"] * 4,
        completion_ids=[[5, 2], [5, 2], [5, 6], []],
        end=[2] * 4,
    )
    assert rewards == [1.0, 0.0, 0.0, 0.0], "right, wrong, right but cut off, nothing"


def test_waits_are_drawn_and_counted_not_slept(side, tmp_path):
    calculator = side.SlowCalculator(LogNormalLatency(median_s=100.0, sigma=0.0, max_s=200.0))
    calc = calculator.tool()
    assert [calc("2*3"), calc("2-3")] == ["6", "-1"]
    assert (calculator.calls, calculator.step_waits) == (2, [100.0, 100.0])
    watch = side.Watch(side.Clock(), calculator, tmp_path)
    watch.work_s, watch.waits = [1.0, 2.5], [(200.0, 100.0), (50.0, 30.0)]
    assert watch.seconds(1) == 201.0
    assert watch.seconds(2) == 252.5
    assert watch.seconds(2, concurrent=True) == 132.5


def test_a_clock_stands_still_while_paused(side):
    clock = side.Clock()
    assert clock.pause() == 0.0
    clock.start()
    first = clock.pause()
    assert clock.pause() == first >= 0.0


def test_settings_are_the_projects_in_trls_words(side, tmp_path):
    config = configured("multi", {})
    args = side.grpo_config(config, tmp_path, steps=5, seed=3)
    assert (args.per_device_train_batch_size, args.num_generations) == (128, 8)
    assert (args.steps_per_generation, args.num_iterations, args.beta) == (1, 1, 0.0)
    assert (args.epsilon, args.epsilon_high, args.delta) == (0.2, 0.28, 3.0)
    assert (args.learning_rate, args.adam_beta1, args.adam_beta2) == (1e-3, 0.9, 0.95)
    assert (args.max_completion_length, args.max_tool_calling_iterations) == (64, 1)
    assert (args.temperature, args.top_p, args.top_k) == (1.0, 1.0, 0)
    assert (args.max_steps, args.seed, args.bf16, args.gradient_checkpointing) == (
        5, 3, False, False,
    )  # fmt: skip
