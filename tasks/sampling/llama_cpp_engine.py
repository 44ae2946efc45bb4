"""Samples turns from a GGUF file: many sequences at once, each with its own random stream."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

import numpy as np

from tasks.sampling.errors import FixedPolicyError
from tasks.sampling.llama_cpp_context import LlamaCppContext
from tasks.sampling.types import (
    Completion,
    GenerateRequest,
    PolicyVersion,
    StopReason,
    scored_at,
)


class LlamaCppEngine:
    """`RolloutEngine` over one GGUF file.

    A sequence that ends gives its slot to the next waiting request at once, so the batch stays
    full; the prompts of several new requests go through together. A prompt that continues what a
    slot's cache holds, as the next turn of an episode does, is computed from there on. The tokens
    of a request depend on its own prompt, parameters and seed only; their log-probabilities, in the
    last digits, also on how many tokens went through together.
    """

    def __init__(
        self,
        gguf: Path,
        *,
        n_ctx_per_seq: int,
        parallel_sequences: int = 64,
        threads: int = 1,
        end_of_turn_ids: Sequence[int] | None = None,
        float32_cache: bool = True,
        version: PolicyVersion = PolicyVersion(0, 0),  # noqa: B008 (a frozen tuple)
    ) -> None:
        """`end_of_turn_ids` are those that end a turn; None takes the file's EOS."""
        self.context = LlamaCppContext(
            gguf,
            parallel_sequences=parallel_sequences,
            n_ctx_per_seq=n_ctx_per_seq,
            threads=threads,
            float32_cache=float32_cache,
        )
        self._ends = frozenset(
            (self.context.eos_id,) if end_of_turn_ids is None else end_of_turn_ids
        )
        self._version = version
        self._held: list[tuple[int, ...]] = [()] * parallel_sequences  # ids in each slot's cache
        self._wipes = self.context.wipes

    def __enter__(self) -> "LlamaCppEngine":
        return self

    def __exit__(self, *_exc: object) -> None:
        self.close()

    @property
    def policy_version(self) -> PolicyVersion:
        """The version the file was made from."""
        return self._version

    @property
    def max_length(self) -> int:
        """Tokens one sequence may have, prompt included."""
        return self.context.n_ctx_per_seq

    def load_policy(self, weights: Path, version: PolicyVersion) -> NoReturn:
        """A GGUF file is fixed: open another engine on the new file instead."""
        raise FixedPolicyError(
            f"cannot load {weights} (version {tuple(version)}) into an engine on "
            f"{self.context.path.name}: a GGUF file's weights are fixed; convert the new weights "
            "and open another LlamaCppEngine"
        )

    def close(self) -> None:
        """Free llama.cpp's memory."""
        self.context.close()

    def logits(self, sequences: Sequence[Sequence[int]]) -> list[np.ndarray]:
        """Float32 logits (T, V) of each sequence; row t predicts token t + 1."""
        return list(self.context.logits_of(sequences))

    def chooses(
        self, sequences: Sequence[Sequence[int]], sampled: Sequence[Sequence[bool]]
    ) -> list[bool]:
        """Whether greedy decoding would choose every sampled token of each sequence.

        `sampled[i][t]` says that token t was chosen and not given; the first token never is. All
        positions go through at once, which costs less than choosing them one after another.
        """
        flags = [np.asarray(mask, bool) for mask in sampled]
        wanted = [np.append(mask[1:], False) for mask in flags]
        agreed = []
        for ids, mask, logits in zip(
            sequences, flags, self.context.logits_of(sequences, wanted), strict=True
        ):
            chosen = np.asarray(ids, np.int64)[mask]
            agreed.append(not mask[:1].any() and bool((logits.argmax(axis=-1) == chosen).all()))
        return agreed

    def score(
        self, sequences: Sequence[Sequence[int]], temperature: float
    ) -> list[tuple[float, ...]]:
        """log p(token t | tokens < t) at `temperature` for t ≥ 1; 0 reads as 1, as in sampling."""
        scores, divisor = [], scored_at(temperature)
        for ids, logits in zip(sequences, self.context.logits_of(sequences), strict=True):
            logprobs = log_softmax(logits[:-1] / divisor)
            chosen = logprobs[np.arange(len(ids) - 1), np.asarray(ids[1:], np.int64)]
            scores.append(tuple(chosen.tolist()))
        return scores

    def generate(self, requests: Sequence[GenerateRequest]) -> list[Completion]:
        """Sample one turn for each request, in the order asked."""
        for request in requests:
            self.context.check_tokens(request.prompt_ids, f"request {request.request_id}")
        turns = [_Turn(r, self.context.n_ctx_per_seq) for r in requests]
        waiting = deque(turn for turn in turns if turn.stop is None)
        free = list(range(self.context.parallel_sequences))[::-1]
        running: list[_Turn] = []
        if self._wipes != self.context.wipes:  # something was scored in between
            self._held = [()] * self.context.parallel_sequences
        while waiting or running:
            while waiting and free:
                turn = waiting.popleft()
                self._place(turn, free)
                running.append(turn)
            self._step(running)
            for turn in running:
                if turn.stop is not None:
                    self._held[turn.slot] = turn.ids[: turn.fed]
                    free.append(turn.slot)
            running = [turn for turn in running if turn.stop is None]
        self._wipes = self.context.wipes
        return [turn.completion(self._version) for turn in turns]

    def _place(self, turn: "_Turn", free: list[int]) -> None:
        """Give a turn the free slot whose cache it continues, or an emptied one."""
        prompt, held = turn.request.prompt_ids, self._held
        # the last token of a prompt is always fed: its logits choose the first new one
        fitting = [s for s in free if held[s] and prompt[: len(held[s])] == held[s] != prompt]
        slot = max(fitting, key=lambda s: len(held[s])) if fitting else free[-1]
        free.remove(slot)
        turn.slot, turn.fed = slot, len(held[slot]) if fitting else 0
        turn.pending = turn.pending[turn.fed :]
        if not fitting:
            self.context.forget(slot)
        held[slot] = ()

    def _step(self, running: Sequence["_Turn"]) -> None:
        """Feed what the running turns have pending, as far as one batch goes, and draw."""
        room = self.context.n_batch
        fed: list[tuple[_Turn, int]] = []
        for turn in running:
            count = min(len(turn.pending), room)
            if count:
                fed.append((turn, count))
                room -= count
        counts = [count for _, count in fed]
        tokens = np.concatenate([turn.pending[:count] for turn, count in fed])
        positions = np.concatenate([np.arange(t.fed, t.fed + c) for t, c in fed])
        slots = np.repeat([turn.slot for turn, _ in fed], counts)
        wanted = np.zeros(len(tokens), bool)
        ready = []
        for (turn, count), last in zip(fed, np.cumsum(counts) - 1, strict=True):
            if count == len(turn.pending):
                wanted[last] = True
                ready.append(turn)
            turn.pending = turn.pending[count:]
            turn.fed += count
        logits = self.context.decode(tokens, positions, slots, wanted)
        if ready:
            self._draw(ready, logits)

    def _draw(self, turns: Sequence["_Turn"], logits_N_V: np.ndarray) -> None:
        """Draw one token for each of N turns and record its tempered log-probability."""
        temperature = np.array([t.request.params.temperature for t in turns], np.float32)
        uniform = np.array([t.uniforms[len(t.tokens)] for t in turns])
        tokens, logprobs = draw_tokens(logits_N_V, temperature, uniform)
        for turn, token, logprob in zip(turns, tokens.tolist(), logprobs.tolist(), strict=True):
            turn.take(token, logprob, self._ends)


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """Row-wise log-probabilities, float32 (N, V)."""
    shifted = logits - logits.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True, dtype=np.float64)).astype(
        np.float32
    )


def draw_tokens(
    logits_N_V: np.ndarray, temperature_N: np.ndarray, uniform_N: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """One token per row and its log-probability at the row's temperature.

    Temperature 0 takes the largest logit, with log-probabilities at temperature 1; otherwise the
    token at which the cumulative probability first exceeds the row's uniform number in [0, 1).
    """
    divisor = np.where(temperature_N > 0, temperature_N, 1).astype(np.float32)
    logprobs = log_softmax(logits_N_V / divisor[:, None])
    tokens = logits_N_V.argmax(axis=-1)
    sampled = np.flatnonzero(temperature_N > 0)
    if sampled.size:
        cdf = np.exp(logprobs[sampled].astype(np.float64)).cumsum(axis=-1)
        level = uniform_N[sampled, None] * cdf[:, -1:]
        tokens[sampled] = (cdf > level).argmax(axis=-1)
    return tokens, logprobs[np.arange(len(tokens)), tokens]


@dataclass
class _Turn:
    """One request on its way: what is not yet fed, and what has been drawn."""

    request: GenerateRequest
    context_length: int
    slot: int = -1
    fed: int = 0
    """Tokens already in the cache."""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    stop: StopReason | None = None
    pending: np.ndarray = field(init=False)
    uniforms: np.ndarray = field(init=False)

    def __post_init__(self) -> None:
        asked = self.request.params.max_new_tokens
        self.pending = np.asarray(self.request.prompt_ids, np.int32)
        room = self.context_length - len(self.request.prompt_ids)
        self._budget = min(asked, room)
        self._limit = StopReason.CONTEXT_FULL if room < asked else StopReason.MAX_TOKENS
        self.uniforms = np.random.default_rng(self.request.seed).random(max(asked, 1))
        if self._budget <= 0:
            self.stop = self._limit

    @property
    def ids(self) -> tuple[int, ...]:
        """Prompt and what has been drawn."""
        return (*self.request.prompt_ids, *self.tokens)

    def take(self, token: int, logprob: float, ends: frozenset[int]) -> None:
        """Record a drawn token; it is fed next unless the turn is over."""
        self.tokens.append(token)
        self.logprobs.append(logprob)
        self.pending = np.array([token], np.int32)
        if token in ends:
            self.stop = StopReason.END_OF_TURN
        elif len(self.tokens) >= self._budget:
            self.stop = self._limit

    def completion(self, version: PolicyVersion) -> Completion:
        """What was sampled."""
        assert self.stop is not None
        return Completion(
            self.request.request_id, tuple(self.tokens), tuple(self.logprobs), self.stop, version
        )
