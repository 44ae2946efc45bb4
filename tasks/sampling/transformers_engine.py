"""Batched sampling with transformers: every request has its own random stream.

The loop is the project's own because `generate` neither returns the tempered log-probability of
each sampled token without keeping all logits, nor gives each request a seed of its own.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from tasks.artifacts.content_hash import hash_tensors
from tasks.models.batching import right_padded
from tasks.models.logprobs import tempered_logprobs
from tasks.models.lora_layer import merged_once
from tasks.models.trainable import load_trainable, trainable_tensors
from tasks.models.weights_file import read_weights
from tasks.sampling.errors import (
    ForeignPromptError,
    NonFiniteLogitsError,
    PromptTooLongError,
)
from tasks.sampling.fast_decode import roomy_cache, use_grouped_decode
from tasks.sampling.types import (
    Completion,
    GenerateRequest,
    PolicyVersion,
    StopReason,
    scored_at,
)

COMPACT_BELOW = 0.6
"""When fewer than this share of the rows still generate, the others leave the batch."""

SCORED_AT_ONCE = 8
"""Sequences of one forward pass in `score`."""


class TransformersEngine:
    """`RolloutEngine` over a transformers (or peft) model in this process."""

    def __init__(
        self,
        model: torch.nn.Module,
        *,
        end_of_turn_id: int,
        max_length: int,
        version: PolicyVersion = PolicyVersion(0, 0),  # noqa: B008 (a frozen tuple)
        max_sequences: int = 256,
    ) -> None:
        self.model = model.eval()
        use_grouped_decode(model)
        self._end = end_of_turn_id
        self._max_length = max_length
        self._version = version
        self._max_sequences = max_sequences

    @property
    def policy_version(self) -> PolicyVersion:
        """The version that samples now."""
        return self._version

    @property
    def max_length(self) -> int:
        """Tokens one sequence may have, prompt included."""
        return self._max_length

    def load_policy(self, weights: Path, version: PolicyVersion) -> str:
        """Take published weights; the hash is taken over the model's memory, not the file."""
        load_trainable(self.model, read_weights(weights))
        self._version = version
        return hash_tensors(trainable_tensors(self.model))

    def close(self) -> None:
        """Drop the model."""
        del self.model

    def generate(self, requests: Sequence[GenerateRequest]) -> list[Completion]:
        """Sample one turn per request, longest prompts together."""
        for request in requests:
            self._check_prompt(request)
        order = sorted(range(len(requests)), key=lambda i: -len(requests[i].prompt_ids))
        completions: dict[int, Completion] = {}
        for first in range(0, len(order), self._max_sequences):
            chunk = order[first : first + self._max_sequences]
            with merged_once(self.model):
                turns = self._turn([requests[i] for i in chunk])
            completions |= zip(chunk, turns, strict=True)
        return [completions[i] for i in range(len(requests))]

    def _check_prompt(self, request: GenerateRequest) -> None:
        prompt, name = request.prompt_ids, f"request {request.request_id}"
        if not prompt or len(prompt) > self._max_length:
            raise PromptTooLongError(
                f"{name} has {len(prompt)} prompt tokens; expected 1 to {self._max_length} "
                "(model.max_length)"
            )
        vocabulary = self.model.get_input_embeddings().num_embeddings
        if min(prompt) < 0 or max(prompt) >= vocabulary:
            raise ForeignPromptError(
                f"{name} has tokens {min(prompt)} to {max(prompt)}; the model has 0 to "
                f"{vocabulary - 1}: is the tokenizer that of another model?"
            )

    @torch.inference_mode()
    def score(
        self, sequences: Sequence[Sequence[int]], temperature: float
    ) -> list[tuple[float, ...]]:
        """Tempered log-probabilities of each sequence's tokens from the second on."""
        temperature = scored_at(temperature)
        scores: list[tuple[float, ...]] = []
        for start in range(0, len(sequences), SCORED_AT_ONCE):
            some = sequences[start : start + SCORED_AT_ONCE]
            ids, valid = right_padded(some)
            logits = self.model(input_ids=ids, attention_mask=valid.long(), use_cache=False).logits
            logprobs = tempered_logprobs(logits, ids, torch.full((len(some),), temperature))
            rows = zip(logprobs.tolist(), some, strict=True)
            scores += [tuple(row[1 : len(sequence)]) for row, sequence in rows]
        return scores

    @torch.inference_mode()
    def _turn(self, requests: Sequence[GenerateRequest]) -> list[Completion]:
        batch = _Batch(requests, self._max_length)
        cache = roomy_cache()
        ids, mask, copies = batch.prompts()
        while batch.rows:
            positions = (mask.cumsum(-1) - 1).clamp_min(0)[:, -ids.shape[1] :]
            logits = self.model(
                input_ids=ids,
                attention_mask=mask,
                position_ids=positions,
                past_key_values=cache,
                use_cache=True,
                logits_to_keep=1,
            ).logits[:, -1]
            if copies is not None:
                cache.batch_select_indices(copies)
                mask, logits, copies = mask[copies], logits[copies], None
            tokens = batch.draw(logits.float(), self._end)
            if not batch.rows:
                break
            keep = batch.compact()
            if keep is not None:
                cache.batch_select_indices(keep)
                mask, tokens = mask[keep], tokens[keep]
            ids = tokens[:, None]
            mask = torch.nn.functional.pad(mask, (0, 1), value=1)
        return [
            Completion(r.request_id, tuple(t), tuple(lp), stop, self._version)
            for r, t, lp, stop in batch.results()
        ]


class _Batch:
    """The rows of one decode loop and what each has drawn so far."""

    def __init__(self, requests: Sequence[GenerateRequest], max_length: int) -> None:
        self.requests = requests
        self.budget = [
            min(r.params.max_new_tokens, max_length - len(r.prompt_ids)) for r in requests
        ]
        most = max(1, *(r.params.max_new_tokens for r in requests))
        # However much is drawn of a stream, it begins the same: rows may ask for other lengths.
        self.uniforms = np.stack([np.random.default_rng(r.seed).random(most) for r in requests])
        self.tokens: list[list[int]] = [[] for _ in requests]
        self.logprobs: list[list[float]] = [[] for _ in requests]
        self.stops: list[StopReason | None] = [
            None if budget > 0 else StopReason.CONTEXT_FULL for budget in self.budget
        ]
        self.slots = list(range(len(requests)))
        """Request index of every row still in the tensors."""
        temperatures = [r.params.temperature for r in requests]
        self.temperature_B = torch.tensor([scored_at(t) for t in temperatures])
        self.greedy_B = torch.tensor([t == 0 for t in temperatures])
        self.step = 0

    @property
    def rows(self) -> list[int]:
        """Requests that are not finished."""
        return [i for i in self.slots if self.stops[i] is None]

    def prompts(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Left-padded ids and mask of the distinct prompts, (P, longest), and each request's row
        among them, (B,); None where every request has its own."""
        prompts = dict.fromkeys(request.prompt_ids for request in self.requests)
        distinct = {prompt: row for row, prompt in enumerate(prompts)}
        longest = max(map(len, distinct))
        ids = torch.zeros(len(distinct), longest, dtype=torch.long)
        mask = torch.zeros_like(ids)
        for prompt, row in distinct.items():
            ids[row, longest - len(prompt) :] = torch.tensor(prompt)
            mask[row, longest - len(prompt) :] = 1
        if len(distinct) == len(self.requests):
            return ids, mask, None
        return ids, mask, torch.tensor([distinct[r.prompt_ids] for r in self.requests])

    def draw(self, logits_B_V: torch.Tensor, end_of_turn_id: int) -> torch.Tensor:
        """Draw one token per row by inverse CDF from the row's own uniform numbers."""
        logp = torch.log_softmax(logits_B_V / self.temperature_B[self.slots, None], dim=-1)
        uniform = torch.from_numpy(self.uniforms[self.slots, self.step]).to(torch.float64)
        cdf = logp.exp().cumsum(-1, dtype=torch.float64)
        drawn = torch.searchsorted(cdf, uniform[:, None] * cdf[:, -1:], right=True).squeeze(-1)
        tokens = torch.where(
            self.greedy_B[self.slots], logits_B_V.argmax(-1), drawn.clamp_max(logp.shape[-1] - 1)
        )
        chosen = logp.gather(-1, tokens[:, None]).squeeze(-1)
        if not bool(torch.isfinite(chosen).all()):
            raise NonFiniteLogitsError(
                "the model gave NaN or infinite logits; the weights are broken: resume from an "
                "earlier checkpoint or lower the learning rate"
            )
        self.step += 1
        for slot, token, logprob in zip(self.slots, tokens.tolist(), chosen.tolist(), strict=True):
            self._take(slot, token, logprob, end_of_turn_id)
        return tokens

    def _take(self, slot: int, token: int, logprob: float, end_of_turn_id: int) -> None:
        if self.stops[slot] is not None:
            return
        self.tokens[slot].append(token)
        self.logprobs[slot].append(logprob)
        if token == end_of_turn_id:
            self.stops[slot] = StopReason.END_OF_TURN
        elif self.step >= self.budget[slot]:
            short = self.budget[slot] < self.requests[slot].params.max_new_tokens
            self.stops[slot] = StopReason.CONTEXT_FULL if short else StopReason.MAX_TOKENS

    def compact(self) -> torch.Tensor | None:
        """Row indices to keep when many are finished, else None."""
        unfinished = [row for row, i in enumerate(self.slots) if self.stops[i] is None]
        if len(unfinished) > COMPACT_BELOW * len(self.slots):
            return None
        self.slots = [self.slots[row] for row in unfinished]
        return torch.tensor(unfinished)

    def results(self):
        """Request, tokens, log-probabilities and stop reason, in the order asked."""
        return zip(self.requests, self.tokens, self.logprobs, self.stops, strict=True)
