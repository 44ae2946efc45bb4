"""A tiny tokenizer, an engine that says what it is told, and the data of a tiny stage."""

from collections.abc import Callable, Sequence

import pytest

from configs.schema.model import ScratchModel
from tasks.environments.renderer import PromptRenderer
from tasks.sampling.types import Completion, GenerateRequest, PolicyVersion, StopReason

TEXTS = [
    "user\n",
    "assistant\n",
    "tool\n",
    "12+30=?",
    '<tool_call>{"name": "calc", "arguments": {"expression": "12+30"}}</tool_call>',
]


class ScriptedEngine:
    """A `RolloutEngine` that answers with `reply(prompt text, seed) -> (text, cut off)`."""

    policy_version = PolicyVersion(0, 0)
    max_length = 512

    def __init__(
        self, renderer: PromptRenderer, reply: Callable[[str, int], tuple[str, bool]]
    ) -> None:
        self._renderer = renderer
        self._reply = reply
        self.requests: list[GenerateRequest] = []

    def generate(self, requests: Sequence[GenerateRequest]) -> list[Completion]:
        """One turn each; an answer that is not cut off ends with the end-of-turn token."""
        self.requests += requests
        return [self._turn(request) for request in requests]

    def _turn(self, request: GenerateRequest) -> Completion:
        prompt = self._renderer.tokenizer.decode(list(request.prompt_ids))
        text, cut_off = self._reply(prompt, request.seed)
        ids = self._renderer.encode(text)
        if not cut_off:
            ids = [*ids, self._renderer.end_of_turn_id]
        stop = StopReason.CONTEXT_FULL if cut_off else StopReason.END_OF_TURN
        return Completion(
            request.request_id, tuple(ids), (0.0,) * len(ids), stop, self.policy_version
        )


@pytest.fixture(scope="session")
def tokenizer():
    """A real byte-level BPE."""
    from tasks.models.scratch import train_tokenizer

    return train_tokenizer(TEXTS * 4, ScratchModel().vocab_size)


@pytest.fixture(scope="session")
def renderer(tokenizer):
    """The one renderer over it."""
    return PromptRenderer(tokenizer)


@pytest.fixture
def engine_that_says(renderer):
    """Build an engine from a fixed text, or from a function of prompt and seed."""

    def build(reply, *, cut_off=False, renderer=renderer):
        if isinstance(reply, str):
            return ScriptedEngine(renderer, lambda prompt, seed: (reply, cut_off))
        return ScriptedEngine(renderer, reply)

    return build
