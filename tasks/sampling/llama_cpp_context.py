"""One GGUF file opened in llama.cpp with many independent sequences, close to the C interface.

Flash attention is off and the key-value cache float32 by default: so llama.cpp's logits agree with
a float32 transformers model to rounding, and a batch gives the same bits as one sequence alone.
"""

import ctypes
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from tasks.sampling.errors import NonFiniteLogitsError, PromptTooLongError, SamplingError

logger = logging.getLogger(__name__)

_LOGITS_BYTES = 1 << 28
_MAX_BATCH = 4096
_NO_SEQUENCE_SLOT = 1


class GgufLoadError(SamplingError, OSError):
    """llama.cpp cannot open a GGUF file; the message holds what it said."""


class GgufDecodeError(SamplingError, RuntimeError):
    """llama.cpp refused a batch."""


class TokenRangeError(SamplingError, IndexError):
    """A token id lies outside the model's vocabulary."""


@contextmanager
def captured_log() -> Iterator[list[str]]:
    """Collect llama.cpp's log as whole lines instead of letting it write to standard error.

    The log is one per process, so blocks may nest but not run at once in two threads.
    """
    import llama_cpp
    from llama_cpp._logger import llama_log_callback

    pieces: list[str] = []
    lines: list[str] = []

    def collect(_level: int, text: bytes, _user: Any) -> None:
        pieces.append(text.decode("utf-8", "replace"))

    callback = llama_cpp.llama_log_callback(collect)
    llama_cpp.llama_log_set(callback, ctypes.c_void_p(0))
    try:
        yield lines
    finally:
        llama_cpp.llama_log_set(llama_log_callback, ctypes.c_void_p(0))
        lines.extend(line.rstrip() for line in "".join(pieces).splitlines() if line.strip())


class LlamaCppContext:
    """A model and a context of `parallel_sequences` sequences. Close it explicitly.

    `n_batch` tokens go through at once; it shrinks with the vocabulary so that the logits of one
    batch stay under 256 MB.
    """

    def __init__(
        self,
        gguf: Path,
        *,
        parallel_sequences: int,
        n_ctx_per_seq: int,
        threads: int = 1,
        float32_cache: bool = True,
    ) -> None:
        self.path = Path(gguf)
        self.parallel_sequences = parallel_sequences
        self.n_ctx_per_seq = n_ctx_per_seq
        self.wipes = 0
        """How often all caches have been emptied."""
        self._model: Any = None
        self._context: Any = None
        if not self.path.is_file():
            raise GgufLoadError(f"there is no GGUF file at {self.path}; run the quantize stage")
        import llama_cpp

        most = llama_cpp.llama_max_parallel_sequences()
        if not 1 <= parallel_sequences <= most or n_ctx_per_seq < 1:
            raise GgufLoadError(
                f"parallel_sequences={parallel_sequences}, n_ctx_per_seq={n_ctx_per_seq}; "
                f"expected 1 to {most} sequences of at least one token"
            )
        self._llama = llama_cpp
        with captured_log() as log:
            llama_cpp.llama_backend_init()
            self._open(threads, float32_cache)
        if self._context is None:
            self.close()
            said = "; ".join(line for line in log if "error" in line.lower()) or "; ".join(log[-3:])
            raise GgufLoadError(f"llama.cpp cannot open {self.path}: {said}")
        self._memory = llama_cpp.llama_get_memory(self._context)
        self._batch = _Batch(self.n_batch)

    def _open(self, threads: int, float32_cache: bool) -> None:
        """Load the model and make the context; leaves None where llama.cpp refused."""
        llama = self._llama
        model_params = llama.llama_model_default_params()
        model_params.n_gpu_layers = 0
        self._model = llama.llama_model_load_from_file(str(self.path).encode(), model_params)
        if not self._model:
            return
        self._vocab = llama.llama_model_get_vocab(self._model)
        self.n_vocab = int(llama.llama_vocab_n_tokens(self._vocab))
        most_rows = _LOGITS_BYTES // (4 * self.n_vocab)
        self.n_batch = max(self.parallel_sequences, min(_MAX_BATCH, most_rows))
        params = llama.llama_context_default_params()
        params.n_ctx = self.n_ctx_per_seq * self.parallel_sequences
        params.n_batch = params.n_ubatch = self.n_batch
        params.n_seq_max = self.parallel_sequences
        params.n_threads = params.n_threads_batch = threads
        params.kv_unified = False
        params.flash_attn_type = llama.LLAMA_FLASH_ATTN_TYPE_DISABLED
        params.no_perf = True
        if float32_cache:
            params.type_k = params.type_v = llama.GGML_TYPE_F32
        self._context = llama.llama_init_from_model(self._model, params) or None

    def __enter__(self) -> "LlamaCppContext":
        return self

    def __exit__(self, *_exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Free the context and the model; closing twice is harmless."""
        with captured_log():
            if self._context:
                self._llama.llama_free(self._context)
            if self._model:
                self._llama.llama_model_free(self._model)
        self._context = self._model = None

    @property
    def eos_id(self) -> int:
        """The id that ends a turn, as the file says."""
        return int(self._llama.llama_vocab_eos(self._vocab))

    @property
    def adds_bos(self) -> bool:
        """Whether tokenising with special tokens puts BOS in front."""
        return bool(self._llama.llama_vocab_get_add_bos(self._vocab))

    def ends_generation(self, token_id: int) -> bool:
        """Whether llama.cpp stops at this token."""
        return bool(self._llama.llama_vocab_is_eog(self._vocab, token_id))

    def token_text(self, token_id: int) -> str:
        """The vocabulary entry as stored in the file."""
        return self._llama.llama_vocab_get_text(self._vocab, token_id).decode("utf-8", "replace")

    def tokenize(self, text: str, *, add_special: bool = False) -> list[int]:
        """Ids of `text`; special strings in it become their tokens."""
        raw = text.encode()
        room = len(raw) + 8
        ids = (self._llama.llama_token * room)()
        count = self._llama.llama_tokenize(self._vocab, raw, len(raw), ids, room, add_special, True)
        if count < 0:
            raise GgufDecodeError(f"llama.cpp cannot tokenise {text[:80]!r} (answer {count})")
        return list(ids[:count])

    def check_tokens(self, token_ids: Sequence[int], what: str) -> None:
        """Raise unless there is at least one id, all are known, and they fit the context."""
        if not token_ids or len(token_ids) > self.n_ctx_per_seq:
            raise PromptTooLongError(
                f"{what} has {len(token_ids)} tokens; expected 1 to {self.n_ctx_per_seq} "
                "(model.max_length)"
            )
        low, high = min(token_ids), max(token_ids)
        if low < 0 or high >= self.n_vocab:
            raise TokenRangeError(
                f"{what} holds token id {low if low < 0 else high}; {self.path.name} knows ids "
                f"0 to {self.n_vocab - 1}; the tokenizer and the GGUF file do not belong together"
            )

    def decode(
        self,
        token_ids: np.ndarray,
        positions: np.ndarray,
        sequences: np.ndarray,
        wanted: np.ndarray,
    ) -> np.ndarray:
        """Feed N ≤ `n_batch` tokens; returns float32 logits (number wanted, V), in batch order.

        Raises:
            GgufDecodeError: llama.cpp refused (the answer is in the message).
            NonFiniteLogitsError: NaN or infinite logits.
        """
        batch = self._batch.fill(token_ids, positions, sequences, wanted)
        answer = self._llama.llama_decode(self._context, batch)
        if answer:
            why = "no free cells" if answer == _NO_SEQUENCE_SLOT else "invalid batch"
            raise GgufDecodeError(
                f"llama.cpp refused a batch of {len(token_ids)} tokens: {why} (answer {answer})"
            )
        rows = int(np.count_nonzero(wanted))
        if not rows:
            return np.empty((0, self.n_vocab), np.float32)
        pointer = self._llama.llama_get_logits(self._context)
        logits = np.ctypeslib.as_array(pointer, shape=(rows, self.n_vocab)).copy()
        if not np.isfinite(logits).all():
            raise NonFiniteLogitsError(
                f"{self.path.name} gave NaN or infinite logits; this file must not ship"
            )
        return logits

    def forget(self, sequence: int) -> None:
        """Empty one sequence's cache."""
        self._llama.llama_memory_seq_rm(self._memory, sequence, -1, -1)

    def forget_all(self) -> None:
        """Empty every sequence's cache."""
        self.wipes += 1
        self._llama.llama_memory_clear(self._memory, False)

    def logits_of(
        self,
        sequences: Sequence[Sequence[int]],
        wanted: Sequence[np.ndarray] | None = None,
    ) -> Iterator[np.ndarray]:
        """Float32 logits (rows, V) of each sequence, in order, from an empty cache.

        Row t predicts token t + 1. With `wanted` (bool arrays of the sequences' lengths) only the
        rows marked True are computed. Many short sequences share a batch; a long one is cut.
        """
        for sequence in sequences:
            self.check_tokens(sequence, "a sequence to score")
        flags = wanted or [np.ones(len(s), bool) for s in sequences]
        start = 0
        while start < len(sequences):
            stop = self._group_end(sequences, start)
            self.forget_all()
            yield from self._score_group(sequences[start:stop], flags[start:stop])
            start = stop
        self.forget_all()

    def _group_end(self, sequences: Sequence[Sequence[int]], start: int) -> int:
        """How far from `start` sequences share one batch (always at least one)."""
        total, stop = 0, start
        while stop < len(sequences) and stop - start < self.parallel_sequences:
            total += len(sequences[stop])
            if total > self.n_batch and stop > start:
                break
            stop += 1
        return stop

    def _score_group(
        self, sequences: Sequence[Sequence[int]], flags: Sequence[np.ndarray]
    ) -> list[np.ndarray]:
        lengths = [len(s) for s in sequences]
        tokens = np.concatenate([np.asarray(s, np.int32) for s in sequences])
        positions = np.concatenate([np.arange(n, dtype=np.int32) for n in lengths])
        slots = np.repeat(np.arange(len(sequences), dtype=np.int32), lengths)
        wanted = np.concatenate([np.asarray(f, bool) for f in flags])
        parts = [
            self.decode(tokens[cut], positions[cut], slots[cut], wanted[cut])
            for cut in (slice(i, i + self.n_batch) for i in range(0, len(tokens), self.n_batch))
        ]
        ends = np.cumsum([int(np.count_nonzero(f)) for f in flags])[:-1]
        return np.split(np.concatenate(parts), ends)


class _Batch:
    """A `llama_batch` whose arrays are numpy's, allocated once."""

    def __init__(self, size: int) -> None:
        from llama_cpp import llama_batch

        self._tokens = np.zeros(size, np.int32)
        self._positions = np.zeros(size, np.int32)
        self._counts = np.ones(size, np.int32)
        self._sequences = np.zeros(size, np.int32)
        self._flags = np.zeros(size, np.int8)
        base = self._sequences.ctypes.data
        self._pointers = (base + 4 * np.arange(size)).astype(np.uintp)
        types = dict(llama_batch._fields_)
        self._batch = llama_batch(
            0,
            self._tokens.ctypes.data_as(types["token"]),
            None,
            self._positions.ctypes.data_as(types["pos"]),
            self._counts.ctypes.data_as(types["n_seq_id"]),
            self._pointers.ctypes.data_as(types["seq_id"]),
            self._flags.ctypes.data_as(types["logits"]),
        )

    def fill(
        self, tokens: np.ndarray, positions: np.ndarray, sequences: np.ndarray, wanted: np.ndarray
    ) -> Any:
        """The batch holding these N tokens."""
        n = len(tokens)
        self._tokens[:n] = tokens
        self._positions[:n] = positions
        self._sequences[:n] = sequences
        self._flags[:n] = wanted
        self._batch.n_tokens = n
        return self._batch
