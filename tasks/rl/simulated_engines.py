"""What takes time in the modelled loop: engines that decode, tools that answer; no real clock.

Two ways to decode. *Continuous* (vLLM): every sequence takes a token each step, a step takes
`step_s + per_sequence_s · n` with n sequences, and a sequence leaves when it is done. *Batched*
(transformers): whatever waits is sampled as one batch, as far as it fits, and ends as one;
a part takes `step_s` for each token of its longest sequence and `per_sequence_s` for every token of
all. New weights are loaded, and then proven, between its batches.
"""

import heapq
import math
import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True)
class DecodeSpeed:
    """How fast one rollout worker samples."""

    step_s: float
    """Seconds one decoding step takes however many sequences are in it."""
    per_sequence_s: float
    """Seconds every sequence adds to a step."""
    max_sequences: int
    """Sequences decoded at a time; others wait."""
    continuous: bool
    """True = sequences join and leave at every step; False = batch after batch."""

    def __post_init__(self) -> None:
        if self.step_s < 0 or self.per_sequence_s < 0 or self.step_s + self.per_sequence_s == 0:
            raise ValueError(
                f"step_s={self.step_s}, per_sequence_s={self.per_sequence_s}: expected no negative "
                "time, and one above 0"
            )
        if self.max_sequences < 1:
            raise ValueError(f"max_sequences={self.max_sequences}: expected 1 or more")


@dataclass(frozen=True)
class LatencyMix:
    """Log-normal seconds of one tool call, cut at `max_s`."""

    median_s: float
    sigma: float
    max_s: float

    def draw(self, rng: random.Random) -> float:
        """Seconds of one call."""
        return min(self.max_s, self.median_s * math.exp(rng.gauss(0.0, self.sigma)))


@dataclass(frozen=True)
class LengthMix:
    """Log-normal tokens of one turn with a given mean before the cut, in [1, longest]."""

    mean: float
    sigma: float
    longest: int

    def draw(self, rng: random.Random) -> int:
        """Tokens of one turn."""
        centre = math.log(self.mean) - self.sigma**2 / 2
        return max(1, min(self.longest, round(math.exp(rng.gauss(centre, self.sigma)))))


class Clock:
    """Modelled time: a heap of what happens when; ties in the order they were asked for."""

    def __init__(self) -> None:
        self.now = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._asked = 0

    def at(self, when: float, then: Callable[[], None]) -> None:
        """Have `then` called at `when`."""
        self._asked += 1
        heapq.heappush(self._events, (when, self._asked, then))

    def next(self) -> tuple[float, Callable[[], None]] | None:
        """The next event, taken off the heap; None when nothing will ever happen again."""
        if not self._events:
            return None
        when, _, then = heapq.heappop(self._events)
        return when, then


class Told(Protocol):
    """Who is told what becomes of a turn."""

    def turn_begins(self, what: Any) -> None:
        """Its first token is being sampled."""
        ...

    def turn_over(self, what: Any) -> None:
        """It is sampled."""
        ...


class SimulatedEngine(Protocol):
    """Decodes what it is given and tells of every turn."""

    def submit(self, turns: Sequence[tuple[int, Any]]) -> None:
        """Queue turns, each its tokens and by what name to tell of it."""
        ...

    def prove(self, seconds: float, loaded: Callable[[], None], proven: Callable[[], None]) -> None:
        """Load new weights and prove them, half of the seconds each where nothing else is to do."""
        ...

    def kick(self) -> None:
        """All that arrives at this moment has arrived: start what can start."""
        ...


class ContinuousEngine:
    """Equal shares: V counts tokens per sequence, and a turn of k tokens ends at its V + k."""

    def __init__(self, clock: Clock, speed: DecodeSpeed, told: Told) -> None:
        self._clock, self._speed, self._told = clock, speed, told
        self._active: list[tuple[float, int, Any]] = []
        self._waiting: deque[tuple[int, Any]] = deque()
        self._tokens = 0.0
        self._since = 0.0
        self._serial = 0
        self._alarm = 0

    def submit(self, turns: Sequence[tuple[int, Any]]) -> None:
        """Queue turns."""
        self._waiting.extend(turns)

    def prove(self, seconds: float, loaded: Callable[[], None], proven: Callable[[], None]) -> None:
        """Beside the sequences that are being decoded."""
        self._clock.at(self._clock.now + seconds / 2, loaded)
        self._clock.at(self._clock.now + seconds, proven)

    def kick(self) -> None:
        """Let waiting turns in where there is room."""
        if self._waiting and len(self._active) < self._speed.max_sequences:
            self._advance()
            self._fill()
            self._set_alarm()

    def _token_s(self) -> float:
        return self._speed.step_s + self._speed.per_sequence_s * len(self._active)

    def _advance(self) -> None:
        if self._active:
            self._tokens += (self._clock.now - self._since) / self._token_s()
        self._since = self._clock.now

    def _fill(self) -> None:
        while self._waiting and len(self._active) < self._speed.max_sequences:
            tokens, what = self._waiting.popleft()
            self._serial += 1
            self._told.turn_begins(what)
            heapq.heappush(self._active, (self._tokens + tokens, self._serial, what))

    def _set_alarm(self) -> None:
        """Wake at the next end; an alarm set earlier no longer counts."""
        self._alarm += 1
        mine = self._alarm
        if self._active:
            left = max(0.0, self._active[0][0] - self._tokens)
            self._clock.at(self._clock.now + left * self._token_s(), lambda: self._wake(mine))

    def _wake(self, alarm: int) -> None:
        if alarm != self._alarm:
            return
        self._advance()
        self._tokens = max(self._tokens, self._active[0][0])
        ended = []
        while self._active and self._active[0][0] <= self._tokens + 1e-9:
            ended.append(heapq.heappop(self._active)[2])
        self._fill()
        self._set_alarm()
        for what in ended:
            self._told.turn_over(what)


class BatchedEngine:
    """One batch at a time; those who come later wait for its end, new weights among them.

    Loading and proving are two errands to the engine's one thread: a batch that waits when the
    first is done goes before the second.
    """

    def __init__(self, clock: Clock, speed: DecodeSpeed, told: Told) -> None:
        self._clock, self._speed, self._told = clock, speed, told
        self._waiting: list[tuple[int, Any]] = []
        self._errands: deque[tuple[float, Callable[[], None]]] = deque()
        self._busy = self._batch_is_next = False

    def submit(self, turns: Sequence[tuple[int, Any]]) -> None:
        """Queue turns."""
        self._waiting.extend(turns)

    def prove(self, seconds: float, loaded: Callable[[], None], proven: Callable[[], None]) -> None:
        """Between two batches."""

        def then() -> None:
            loaded()
            self._errands.append((seconds / 2, proven))

        self._errands.append((seconds / 2, then))

    def kick(self) -> None:
        """Start an errand, or a batch of what waits, unless one runs."""
        if self._busy:
            return
        if self._errands and not (self._batch_is_next and self._waiting):
            self._busy = self._batch_is_next = True
            seconds, then = self._errands.popleft()
            self._clock.at(self._clock.now + seconds, lambda: self._back(then))
        elif self._waiting:
            self._batch_is_next = False
            self._start()

    def _back(self, then: Callable[[], None]) -> None:
        self._busy = False
        then()

    def _start(self) -> None:
        most = self._speed.max_sequences
        batch, self._waiting = self._waiting[:most], self._waiting[most:]
        tokens = [n for n, _ in batch]
        seconds = self._speed.step_s * max(tokens) + self._speed.per_sequence_s * sum(tokens)
        for _, what in batch:
            self._told.turn_begins(what)
        self._busy = True
        self._clock.at(self._clock.now + seconds, lambda: self._end(batch))

    def _end(self, batch: Sequence[tuple[int, Any]]) -> None:
        self._busy = False
        for _, what in batch:
            self._told.turn_over(what)


def engine(clock: Clock, speed: DecodeSpeed, told: Told) -> SimulatedEngine:
    """The engine a speed describes."""
    kind = ContinuousEngine if speed.continuous else BatchedEngine
    return kind(clock, speed, told)


class Tools:
    """Answers tool calls, `concurrency` at a time; none in no time where there is no latency."""

    def __init__(
        self, clock: Clock, latency: LatencyMix | None, concurrency: int, rng: random.Random
    ) -> None:
        self._clock, self._latency, self._rng = clock, latency, rng
        self._free = concurrency
        self._waiting: deque[Callable[[], None]] = deque()

    def call(self, then: Callable[[], None]) -> None:
        """Call a tool; `then` follows its answer."""
        if self._latency is None:
            self._clock.at(self._clock.now, then)
        elif self._free:
            self._free -= 1
            self._clock.at(
                self._clock.now + self._latency.draw(self._rng), lambda: self._answer(then)
            )
        else:
            self._waiting.append(then)

    def _answer(self, then: Callable[[], None]) -> None:
        self._free += 1
        if self._waiting:
            self.call(self._waiting.popleft())
        then()
