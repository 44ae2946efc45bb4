"""Golden prompts: what the agent must still do on the device, token by token.

Made with the default quantisation through llama.cpp, with the very messages the device sends; the
prompt ids come from the trainer's tokenizer and must be what llama.cpp makes of the same text.
"""

import contextlib
import json
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from deployment.jetson.errors import GoldenPromptError, MissingInputError
from deployment.jetson.on_device.conversation import AgentSettings, normalise_messages
from deployment.jetson.on_device.llama_child import N_UBATCH
from tasks.artifacts import hash_json
from tasks.environments.renderer import PromptRenderer
from tasks.environments.row import Message
from tasks.environments.toolcall import Tool, answer_tool_call

if TYPE_CHECKING:
    from llama_cpp import Llama

WIDE_MARGIN_NATS = 0.25
"""A token is sure where the best logit leads by this much; CPU and CUDA differ by far less."""
PROBES = (
    "34*7-52=?",
    "0 00 007 1234567890 3.14159 -1e-10 1,000,000",
    "  two  spaces\tand\ttabs  ",
    "one\nline\r\nWindows\n\n end \n",
    '{"name": "calc", "arguments": {"expression": "34*7-52"}}',
    "<tool_call></tool_call><think>",
    "Grüße, naïve café, кириллица, 日本語, हिन्दी",
    "it's can't WE'LL",
)
"""Texts whose ids the device must reproduce, whatever the golden prompts happen to contain."""


@dataclass(frozen=True)
class Turn:
    """One greedy turn: the ids, and by how much each one won."""

    ids: tuple[int, ...]
    margins: tuple[float, ...]
    """Best minus second-best logit, nats."""
    finished: bool
    """Whether the model ended the turn itself."""


@contextlib.contextmanager
def opened(model: Path, context: int) -> "Iterator[Llama]":
    """The model in llama.cpp, as the device runs it; closed at the end.

    Raises:
        MissingInputError: llama.cpp cannot load the file.
    """
    from llama_cpp import Llama

    try:
        llama = Llama(
            str(model),
            n_ctx=context,
            n_batch=min(512, context),
            n_ubatch=min(N_UBATCH, context),
            n_threads=1,
            n_threads_batch=1,
            logits_all=False,
            verbose=False,
        )
    except (ValueError, AssertionError) as error:
        raise MissingInputError(f"llama.cpp cannot load {model}: {error}") from error
    try:
        yield llama
    finally:
        llama.close()


def greedy_turn(llama: "Llama", prompt_ids: Sequence[int], max_new_tokens: int) -> Turn:
    """Take the most likely token until the turn ends or the limit is met."""
    import llama_cpp

    llama.reset()
    llama.eval(list(prompt_ids))
    size, vocabulary = llama.n_vocab(), llama_cpp.llama_model_get_vocab(llama.model)
    ids: list[int] = []
    margins: list[float] = []
    while len(ids) < max_new_tokens:
        logits = np.ctypeslib.as_array(llama_cpp.llama_get_logits_ith(llama.ctx, -1), (size,))
        second, best = np.argpartition(logits, size - 2)[-2:]
        margins.append(float(logits[best] - logits[second]))
        if llama_cpp.llama_vocab_is_eog(vocabulary, int(best)):
            return Turn(tuple(ids), tuple(margins), True)
        ids.append(int(best))
        if len(ids) < max_new_tokens:
            llama.eval([int(best)])
    return Turn(tuple(ids), tuple(margins), False)


def read_prompts(rollouts: Path, count: int, system_prompt: str | None) -> list[list[Message]]:
    """Up to `count` different conversations as they stood before the policy spoke.

    The choice depends on the prompts alone, not on the order they were played in.

    Raises:
        MissingInputError: the file is missing, unreadable, or holds no conversation.
    """
    found: dict[str, list[Message]] = {}
    try:
        lines = rollouts.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise MissingInputError(f"cannot read {rollouts}: {error.strerror}") from error
    for number, line in enumerate(lines, 1):
        try:
            messages = json.loads(line)["messages"]
            roles = [m["role"] for m in messages]
        except (ValueError, KeyError, TypeError) as error:
            raise MissingInputError(f"{rollouts}, line {number}: no rollout ({error!r})") from None
        start = messages[: roles.index("assistant")] if "assistant" in roles else messages
        if start and start[0] == {"role": "system", "content": system_prompt}:
            start = start[1:]
        if start:
            found[hash_json(start)] = start
    if not found:
        raise MissingInputError(f"{rollouts} holds no conversation to make golden prompts from")
    return [found[key] for key in sorted(found)[:count]]


class GoldenMaker:
    """Plays conversations through one open model and checks every id on the way."""

    def __init__(
        self,
        llama: "Llama",
        context: int,
        renderer: PromptRenderer,
        settings: AgentSettings,
        tools: Mapping[str, Tool],
    ) -> None:
        from llama_cpp.llama_chat_format import Jinja2ChatFormatter

        template = llama.metadata.get("tokenizer.chat_template")
        if template is None:
            raise GoldenPromptError("the GGUF has no chat template; convert it with one")
        if llama.token_eos() != renderer.end_of_turn_id:
            raise GoldenPromptError(
                f"the GGUF ends turns with token {llama.token_eos()}, training with "
                f"{renderer.end_of_turn_id}; generation would not stop"
            )
        self._llama, self._renderer = llama, renderer
        self._context = context  # llama.cpp rounds its own up, the server does not use the rest
        self._settings, self._tools = settings, tools
        pieces = [llama.detokenize([i], special=True).decode() for i in self._bos_eos()]
        self._format = Jinja2ChatFormatter(template, eos_token=pieces[-1], bos_token=pieces[0])

    def _bos_eos(self) -> list[int]:
        bos, eos = self._llama.token_bos(), self._llama.token_eos()
        return [bos if bos != -1 else eos, eos]

    def _ids(self, text: str) -> list[int]:
        return self._llama.tokenize(text.encode(), add_bos=False, special=True)

    def prompt(self, messages: Sequence[Message]) -> tuple[str, list[int]]:
        """Text and ids of a prompt, equal in the trainer and in llama.cpp.

        Raises:
            GoldenPromptError: the template or the tokenizer differs.
        """
        form = self._settings.normaliser
        trained = self._renderer.text(messages, open_turn=True)
        trained = unicodedata.normalize(form, trained) if form else trained
        served = self._format(messages=normalise_messages(list(messages), self._settings)).prompt
        if served != trained:
            raise GoldenPromptError(
                f"the chat template renders {served!r} in llama.cpp and {trained!r} in training"
            )
        return served, self.same_ids(served)

    def same_ids(self, text: str) -> list[int]:
        """Ids of a text, if both tokenizers agree on them."""
        trained, served = self._renderer.encode(text), self._ids(text)
        if trained != served:
            raise GoldenPromptError(
                f"{text!r} is {served} in llama.cpp and {trained} in training; the GGUF's "
                "pre-tokenizer or token types are wrong"
            )
        return served

    def probe(self, text: str) -> dict[str, Any]:
        """A text and its ids."""
        form = self._settings.normaliser
        text = unicodedata.normalize(form, text) if form else text
        return {"text": text, "ids": self.same_ids(text)}

    def added_bos_id(self) -> int | None:
        """The id llama.cpp puts before every text it is given, None where it adds none."""
        plain = self._ids("1")
        added = self._llama.tokenize(b"1", add_bos=True, special=True)
        if added == plain:
            return None
        if added != [self._llama.token_bos(), *plain]:
            raise GoldenPromptError(f"llama.cpp tokenises '1' as {added}; expected BOS or nothing")
        return added[0]

    def play(self, messages: Sequence[Message]) -> dict[str, Any] | None:
        """One golden prompt; None where it does not fit into the context."""
        conversation, turns, text = list(messages), [], ""
        for number in range(self._settings.max_turns):
            prompt_text, prompt_ids = self.prompt(conversation)
            room = self._context - len(prompt_ids)
            if room <= 0:
                return None
            limit = min(self._settings.max_new_tokens, room)
            turn = greedy_turn(self._llama, prompt_ids, limit)
            text = self._said(turn, prompt_ids)
            turns.append(self._record(prompt_text, prompt_ids, turn, text))
            observation = answer_tool_call(text, self._tools) if turn.finished else None
            if observation is None or number == self._settings.max_turns - 1:
                break
            conversation.append({"role": "assistant", "content": text})
            conversation.append({"role": "tool", "content": observation})
        return {"messages": list(messages), "turns": turns, "answer": text}

    def _said(self, turn: Turn, prompt_ids: list[int]) -> str:
        raw = self._llama.detokenize(list(turn.ids), prev_tokens=prompt_ids)
        text = raw.decode("utf-8", errors="ignore")
        trained = self._renderer.decode(turn.ids)
        odd = "\ufffd" in trained or any(s in trained for s in self._settings.special_strings)
        if text != trained and not odd:
            raise GoldenPromptError(
                f"{list(turn.ids)} reads {text!r} in llama.cpp and {trained!r} in training"
            )
        return text

    def _record(
        self, prompt_text: str, prompt_ids: list[int], turn: Turn, text: str
    ) -> dict[str, Any]:
        narrow = [i for i, margin in enumerate(turn.margins) if margin < WIDE_MARGIN_NATS]
        sure = turn.ids[: narrow[0]] if narrow else turn.ids
        raw = self._llama.detokenize(list(sure), prev_tokens=prompt_ids)
        kind = "prefix" if narrow else "tokens" if self._ids(text) == list(turn.ids) else "text"
        return {
            "prompt_text": prompt_text,
            "prompt_ids": prompt_ids,
            "generated_ids": list(turn.ids),
            "margins": [round(margin, 6) for margin in turn.margins],
            "finished": turn.finished,
            "text": text,
            "sure_tokens": len(sure),
            "sure_text": raw.decode("utf-8", errors="ignore"),
            "compare": kind,
        }


def make_golden(
    model: Path,
    quant: str,
    context: int,
    renderer: PromptRenderer,
    settings: AgentSettings,
    tools: Mapping[str, Tool],
    prompts: Sequence[Sequence[Message]],
) -> dict[str, Any]:
    """The content of `golden_prompts.json`.

    Raises:
        GoldenPromptError: llama.cpp and the trainer disagree, or no prompt fits the context.
    """
    with opened(model, context) as llama:
        maker = GoldenMaker(llama, context, renderer, settings, tools)
        probes = [maker.probe(text) for text in PROBES]
        played = [golden for p in prompts if (golden := maker.play(p)) is not None]
        bos = maker.added_bos_id()
    if not played:
        raise GoldenPromptError(
            f"no golden prompt fits into {context} tokens; raise package.context_length"
        )
    return {
        "format": 1,
        "quant": quant,
        "wide_margin_nats": WIDE_MARGIN_NATS,
        "added_bos_id": bos,
        "tokenizer_probes": probes,
        "prompts": played,
    }
