"""The one prompt renderer: SFT, RL, evaluation, parity and the bundle's golden prompts use it."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from tasks.environments.row import Message
from tasks.environments.sanitise import sanitise

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SPECIAL_MARK = "<|"


class PromptRenderError(ValueError):
    """Text cannot be rendered or encoded; says which message and why."""


def special_strings(tokenizer: "PreTrainedTokenizerBase") -> tuple[str, ...]:
    """Every string the tokenizer or llama.cpp turns into a control token, longest first."""
    added = tokenizer.added_tokens_decoder.values()
    found = {t.content for t in added if t.special or t.content.startswith(SPECIAL_MARK)}
    found.update(tokenizer.all_special_tokens)
    return tuple(sorted(filter(None, found), key=lambda text: (-len(text), text)))


class PromptRenderer:
    """Renders conversations with the tokenizer's chat template, without adding BOS twice (A18)."""

    def __init__(self, tokenizer: "PreTrainedTokenizerBase", system_prompt: str | None = None):
        if not tokenizer.chat_template:
            raise PromptRenderError(
                "the tokenizer has no chat template; set `chat_template` in tokenizer_config.json"
            )
        self.tokenizer = tokenizer
        self.system_prompt = system_prompt
        self.special_strings = special_strings(tokenizer)
        self.end_of_turn_id = self._end_of_turn_id()

    def _end_of_turn_id(self) -> int:
        """The id a policy ends its turn with: `<|im_end|>` where there is one, else EOS."""
        token_id = self.tokenizer.convert_tokens_to_ids("<|im_end|>")
        if isinstance(token_id, int) and token_id != self.tokenizer.unk_token_id:
            return token_id
        if self.tokenizer.eos_token_id is None:
            raise PromptRenderError("the tokenizer has neither <|im_end|> nor an EOS token")
        return int(self.tokenizer.eos_token_id)

    def with_system(self, messages: Sequence[Message]) -> list[Message]:
        """Put the system prompt first, where one is set and none is there."""
        if self.system_prompt is None or (messages and messages[0]["role"] == "system"):
            return list(messages)
        return [{"role": "system", "content": self.system_prompt}, *messages]

    def text(self, messages: Sequence[Message], *, open_turn: bool) -> str:
        """The conversation as text; `open_turn` ends it where the assistant is to speak."""
        clean = [
            {**m, "content": sanitise(m["content"], self.special_strings)}
            for m in self.with_system(messages)
        ]
        rendered = self.tokenizer.apply_chat_template(
            clean, tokenize=False, add_generation_prompt=open_turn
        )
        return str(rendered)

    def encode(self, text: str) -> list[int]:
        """Ids of rendered text; the template has already placed every special token.

        Raises:
            PromptRenderError: the vocabulary cannot encode some of the text.
        """
        ids = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        if self.tokenizer.unk_token_id is not None and self.tokenizer.unk_token_id in ids:
            raise PromptRenderError(f"the vocabulary cannot encode part of {text[:80]!r}")
        return list(ids)

    def decode(self, ids: Sequence[int]) -> str:
        """Text of sampled ids, special tokens kept visible."""
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=False))

    def prompt_ids(self, messages: Sequence[Message]) -> list[int]:
        """Ids up to and with the opening of the assistant's turn."""
        return self.encode(self.text(messages, open_turn=True))

    def observation_ids(
        self, messages: Sequence[Message], following: Sequence[Message]
    ) -> list[int]:
        """Ids that follow a sampled assistant turn (which ends with `end_of_turn_id`):
        the rest of the closed turn, the messages that answer it, and the opening of the next turn.

        Sampled ids are never re-tokenised: only what lies between two sampled spans is rendered.
        """
        closed = self.text(messages, open_turn=False)
        longer = self.text([*messages, *following], open_turn=True)
        if not longer.startswith(closed):
            raise PromptRenderError("the chat template is not append-only; turns cannot be masked")
        end = self.tokenizer.convert_ids_to_tokens(self.end_of_turn_id)
        tail = closed[closed.rindex(end) + len(end) :] if end in closed else ""
        return self.encode(tail + longer[len(closed) :])

    def supervised(
        self, messages: Sequence[Message], learn_from: int = 0
    ) -> tuple[list[int], list[bool]]:
        """Ids of a whole conversation and its mask; True = a policy token, end of turn included.

        Built span by span exactly as an episode is, so SFT and RL see the same ids. Assistant
        messages before index `learn_from` are context; what follows the last one is left out.

        Raises:
            PromptRenderError: the conversation has no assistant message.
        """
        spoken = [i for i, m in enumerate(messages) if m["role"] == "assistant"]
        if not spoken:
            raise PromptRenderError("a demonstration needs at least one assistant message")
        ids: list[int] = []
        mask: list[bool] = []
        previous = None
        for i in spoken:
            if previous is None:
                context = self.prompt_ids(messages[:i])
            else:
                context = self.observation_ids(messages[: previous + 1], messages[previous + 1 : i])
            said = self.encode(sanitise(messages[i]["content"], self.special_strings))
            ids += [*context, *said, self.end_of_turn_id]
            mask += [False] * len(context) + [i >= learn_from] * (len(said) + 1)
            previous = i
        return ids, mask
