"""How large llama.cpp's compute buffer will be: its graph, replayed through its allocator.

The rule of thumb n_ubatch · (vocabulary + hidden) · 4 B holds only where the vocabulary dominates.
Replaying the graph of one pass is as short and gives the size llama.cpp reports, to the byte that
its log shows (`src/llama-graph.cpp`, `ggml/src/ggml-alloc.c`): tensors are placed in the best
fitting hole, an operation may overwrite a source that nobody else reads, and a tensor's place is
free once its last reader has run. Views cost nothing and are never overwritten.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from deployment.jetson.model_shape import ModelShape

ALIGNMENT = 32
CELL_PADDING = 256
"""llama.cpp rounds the cache of a sequence up to this many tokens."""
FLOAT, INDEX, LONG_INDEX, HALF = 4, 4, 8, 2
_ENDLESS = 1 << 62


def _up(size: int, step: int) -> int:
    return -(-size // step) * step


def cells_per_slot(context: int, slots: int) -> int:
    """Tokens the cache of one slot holds when `slots` share `context` tokens."""
    return _up(-(-_up(context, CELL_PADDING) // slots), CELL_PADDING)


@dataclass
class Arena:
    """Best-fit allocator over one growing block; `peak` is what must be reserved."""

    peak: int = 0
    holes: list[tuple[int, int]] = field(default_factory=lambda: [(0, _ENDLESS)])
    """(offset, bytes), sorted; the last one has no end."""

    def take(self, size: int) -> int:
        """Offset of a new place of `size` bytes; the last of equally good holes is used."""
        size = _up(size, ALIGNMENT)
        fits = [i for i, (_, room) in enumerate(self.holes[:-1]) if room >= size]
        best = min(reversed(fits), key=lambda i: self.holes[i][1], default=len(self.holes) - 1)
        offset, room = self.holes.pop(best)
        if room > size:
            self.holes.insert(best, (offset + size, room - size))
        self.peak = max(self.peak, offset + size)
        return offset

    def give(self, offset: int, size: int) -> None:
        """Free a place and join it with the holes beside it."""
        joined: list[tuple[int, int]] = []
        for start, room in sorted([*self.holes, (offset, _up(size, ALIGNMENT))]):
            if joined and sum(joined[-1]) == start:
                joined[-1] = (joined[-1][0], joined[-1][1] + room)
            else:
                joined.append((start, room))
        self.holes = joined


@dataclass(frozen=True)
class Step:
    """One operation: what it makes, how large, from what; 0 bytes is a write into the cache."""

    makes: str
    size: int
    reads: tuple[str, ...]
    overwrites: bool = False
    """May take the place of the first source."""


def replay(inputs: dict[str, int], steps: list[Step]) -> int:
    """Bytes the arena needs at its fullest."""
    readers = Counter(name for step in steps for name in step.reads)
    arena, size = Arena(), dict(inputs)
    place = {name: arena.take(amount) for name, amount in inputs.items()}
    for step in steps:
        first = step.reads[0]
        if step.overwrites and readers[first] == 1 and size.get(first) == step.size:
            place[step.makes] = place.pop(first)
        elif step.size:
            place[step.makes] = arena.take(step.size)
        size[step.makes] = step.size
        for name in step.reads:
            readers[name] -= 1
            if readers[name] == 0 and name in place:
                arena.give(place.pop(name), size[name])
    return arena.peak


@dataclass(frozen=True)
class Pass:
    """One pass of `tokens` rows over a cache of `cells` tokens a slot."""

    tokens: int
    outputs: int
    """Rows whose logits are wanted."""
    cells: int
    flash_attention: bool
    kv_type: str = "F16"

    def inputs(self, shape: ModelShape) -> dict[str, int]:
        """What is handed in, in llama.cpp's order; without flash attention V is written turned."""
        values = shape.kv_heads * shape.value_length
        key_turn, value_turn = self._turns(shape)
        return {
            "tokens": self.tokens * INDEX,
            "embeddings": self.tokens * shape.hidden * FLOAT,  # reserved though never used
            "positions": self.tokens * INDEX,
            **({"key turn": key_turn**2 * FLOAT} if key_turn else {}),
            **({"value turn": value_turn**2 * FLOAT} if value_turn else {}),
            "key cells": self.tokens * LONG_INDEX,
            "value cells": self.tokens * LONG_INDEX * (1 if self.flash_attention else values),
            "mask": self.cells * self.tokens * (HALF if self.flash_attention else FLOAT),
            "outputs": self.outputs * INDEX,
        }

    def _turns(self, shape: ModelShape) -> tuple[int, int]:
        """Edges of the Hadamard matrices that keys and values meet before they are quantised."""
        if self.kv_type == "F16":
            return 0, 0
        edge = 64
        while shape.key_length % (2 * edge) == 0:
            edge *= 2
        return (
            0 if shape.key_length % 64 else edge,
            0 if shape.value_length % 64 else 64,
        )

    def steps(self, shape: ModelShape) -> Iterator[Step]:
        """The operations of a pass."""
        row = self.tokens * FLOAT
        yield Step("x", shape.hidden * row, ("tokens",))
        stream = "x"
        for layer in range(shape.layers):
            last = layer == shape.layers - 1
            yield from self._attention(shape, f"{layer}.", stream)
            yield from self._feed_forward(shape, f"{layer}.", stream, last=last)
            stream = f"{layer}.out"
        row = self.outputs * FLOAT
        yield Step("norm", shape.hidden * row, (stream,), overwrites=True)
        yield Step("scaled", shape.hidden * row, ("norm",), overwrites=True)
        yield Step("logits", shape.vocabulary * row, ("scaled",))

    def _attention(self, shape: ModelShape, p: str, stream: str) -> Iterator[Step]:
        row = self.tokens * FLOAT
        hidden, queries = shape.hidden * row, shape.queries * row
        keys, values = (shape.kv_heads * n * row for n in (shape.key_length, shape.value_length))
        key_turn, value_turn = self._turns(shape)
        q, k, v = p + "q", p + "k", p + "v"
        yield Step(p + "norm", hidden, (stream,), overwrites=True)
        yield Step(p + "scaled", hidden, (p + "norm",), overwrites=True)
        yield Step(p + "q raw", queries, (p + "scaled",))
        yield Step(q, queries, (p + "q raw", "positions"))
        if key_turn:
            yield Step(p + "q turned", queries, (q, "key turn"))
            q = p + "q turned"
        yield Step(v, values, (p + "scaled",))
        if value_turn:
            yield Step(p + "v turned", values, (v, "value turn"))
            v = p + "v turned"
        yield Step(p + "k raw", keys, (p + "scaled",))
        yield Step(k, keys, (p + "k raw", "positions"))
        if key_turn:
            yield Step(p + "k turned", keys, (k, "key turn"))
            k = p + "k turned"
        yield Step(p + "k kept", 0, (k, "key cells"))
        yield Step(p + "v kept", 0, (v, "value cells"))
        yield from self._scores(shape, p, q)
        seen = p + "seen"
        if value_turn:
            yield Step(p + "seen back", queries, (seen, "value turn"))
            seen = p + "seen back"
        yield Step(p + "attended", hidden, (seen,))

    def _scores(self, shape: ModelShape, p: str, q: str) -> Iterator[Step]:
        """From queries to mixed values; flash attention never writes the scores down."""
        row = self.tokens * FLOAT
        queries, scores = shape.queries * row, self.cells * shape.heads * row
        if self.flash_attention:
            yield Step(p + "seen", queries, (q, "mask"))
            return
        yield Step(p + "scores", scores, (q,))
        yield Step(p + "weights", scores, (p + "scores", "mask"), overwrites=True)
        yield Step(p + "mixed", queries, (p + "weights",))
        yield Step(p + "seen", queries, (p + "mixed",))

    def _feed_forward(
        self, shape: ModelShape, p: str, stream: str, *, last: bool
    ) -> Iterator[Step]:
        row = (self.outputs if last else self.tokens) * FLOAT
        hidden, wide = shape.hidden * row, shape.ffn * row
        sources = (p + "attended", stream)
        if last:
            yield Step(p + "chosen", hidden, (p + "attended", "outputs"))
            yield Step(p + "residual", hidden, (stream, "outputs"))
            sources = (p + "chosen", p + "residual")
        yield Step(p + "sum", hidden, sources, overwrites=True)
        yield Step(p + "ffn norm", hidden, (p + "sum",))
        yield Step(p + "ffn scaled", hidden, (p + "ffn norm",), overwrites=True)
        yield Step(p + "gate", wide, (p + "ffn scaled",))
        yield Step(p + "up", wide, (p + "ffn scaled",))
        yield Step(p + "gated", wide, (p + "gate", p + "up"))
        yield Step(p + "down", hidden, (p + "gated",))
        yield Step(p + "out", hidden, (p + "down", p + "sum"), overwrites=True)


def compute_bytes(
    shape: ModelShape,
    context: int,
    *,
    slots: int = 1,
    ubatch: int = 512,
    flash: bool = True,
    kv_type: str = "F16",
) -> int:
    """Bytes of llama.cpp's compute buffer for `slots` sequences sharing `context` tokens."""
    rows = min(ubatch, context)
    one = Pass(_up(rows, slots), rows, cells_per_slot(context, slots), flash, kv_type)
    return replay(one.inputs(shape), list(one.steps(shape)))
