"""The policy as SFT and RL train it: token scores, and a value head on the shared trunk."""

from contextlib import AbstractContextManager
from typing import NamedTuple

import torch
from peft import PeftModel
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from configs.schema.training import DeepSpeedSettings
from tasks.models.errors import BatchLayoutError
from tasks.models.logprobs import TokenScores, score_tokens
from tasks.models.packing import enable_packing, packing_of
from tasks.models.trainable import reference_weights


class PolicyScores(NamedTuple):
    """Float32, (B, T), nats; 0 where `mask_B_T` was False."""

    logprobs_B_T: torch.Tensor
    entropy_B_T: torch.Tensor | None
    """None in a pass without gradient."""
    values_B_T: torch.Tensor | None
    """None without a head."""


class PolicyModule(torch.nn.Module):
    """A causal model and, if asked, a linear value head that reads its last hidden states.

    `packed` lays the distinct tokens of a micro-batch end to end for every layer, see `packing`;
    else the trunk computes padding, and a shared prompt again for every row. `recompute` gives up
    what layers keep for the backward pass, and `logits_chunk` makes the logits of so many tokens at
    a time, for less memory and more time.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        *,
        value_head: bool,
        seed: int,
        packed: bool = False,
        recompute: bool = False,
        logits_chunk: int | None = None,
    ) -> None:
        super().__init__()
        self.model = model
        self.packed = packed
        self.logits_chunk = logits_chunk
        if packed:
            enable_packing(self.causal_model)
        if recompute:
            self.causal_model.gradient_checkpointing_enable({"use_reentrant": False})
        self.value_head: torch.nn.Linear | None = None
        if value_head:
            hidden = self.causal_model.config.hidden_size
            self.value_head = torch.nn.Linear(hidden, 1)
            torch.nn.init.zeros_(self.value_head.bias)
            generator = torch.Generator().manual_seed(seed)
            with torch.no_grad():
                self.value_head.weight.normal_(0, hidden**-0.5, generator=generator)

    @classmethod
    def of(
        cls, model: torch.nn.Module, settings: DeepSpeedSettings, *, value_head: bool, seed: int
    ) -> "PolicyModule":
        """The module as the settings of training ask for it."""
        return cls(
            model,
            value_head=value_head,
            seed=seed,
            packed=settings.micro_batching == "packed",
            recompute=settings.gradient_checkpointing,
            logits_chunk=settings.logits_chunk_tokens,
        )

    @property
    def causal_model(self) -> PreTrainedModel:
        """The transformers model inside; adapters, where there are any, are layers of it."""
        return self.model.get_base_model() if isinstance(self.model, PeftModel) else self.model

    def forward(
        self,
        token_ids_B_T: torch.Tensor,
        valid_B_T: torch.Tensor,
        mask_B_T: torch.Tensor,
        temperature_B: torch.Tensor,
    ) -> PolicyScores:
        """Score the tokens where `mask_B_T` is True (never at position 0), each from those before.

        Real tokens stand on the left of their row, so causality keeps padding out of every score
        and no mask is made. Logits are made for the asked tokens alone: with a large vocabulary
        they are most of the memory.

        Raises:
            BatchLayoutError: padding on the left or amid a row, or a score asked of padding or of
                position 0.
        """
        require_layout(valid_B_T, mask_B_T)
        hidden_B_T_H = self._hidden(token_ids_B_T, valid_B_T)
        wanted = mask_B_T[:, 1:]
        rows = wanted.nonzero(as_tuple=True)[0]
        scores = self._scores(
            hidden_B_T_H[:, :-1][wanted], token_ids_B_T[:, 1:][wanted], temperature_B[rows]
        )
        values = None
        if self.value_head is not None:
            head = self.value_head  # in bfloat16 where DeepSpeed trains in it
            values = head(hidden_B_T_H.to(head.weight.dtype)).squeeze(-1).float()
        entropy = None if scores.entropy_N is None else _place(scores.entropy_N, wanted)
        return PolicyScores(_place(scores.logprobs_N, wanted), entropy, values)

    def _scores(
        self, hidden_N_H: torch.Tensor, token_ids_N: torch.Tensor, temperature_N: torch.Tensor
    ) -> TokenScores:
        """Scores of N tokens; chunk by chunk the backward pass makes each chunk's logits anew."""
        tokens, chunk = len(hidden_N_H), self.logits_chunk
        if chunk is None or tokens <= chunk:
            return self._score_some(hidden_N_H, token_ids_N, temperature_N)
        parts = [
            checkpoint(self._score_some, *some, use_reentrant=False)
            for some in zip(
                *(x.split(chunk) for x in (hidden_N_H, token_ids_N, temperature_N)), strict=True
            )
        ]
        entropies = [part.entropy_N for part in parts if part.entropy_N is not None]
        return TokenScores(
            torch.cat([part.logprobs_N for part in parts]),
            torch.cat(entropies) if entropies else None,
        )

    def _score_some(
        self, hidden_N_H: torch.Tensor, token_ids_N: torch.Tensor, temperature_N: torch.Tensor
    ) -> TokenScores:
        return score_tokens(self.causal_model.lm_head(hidden_N_H), token_ids_N, temperature_N)

    def _hidden(self, token_ids_B_T: torch.Tensor, valid_B_T: torch.Tensor) -> torch.Tensor:
        """(B, T, H): last hidden states; what stands on padding is not to be used."""
        trunk = self.causal_model.model
        if not self.packed:
            return trunk(input_ids=token_ids_B_T, use_cache=False).last_hidden_state
        packing = packing_of(token_ids_B_T, valid_B_T)
        hidden_1_N_H = trunk(
            input_ids=packing.whole.pack(token_ids_B_T)[None],
            position_ids=packing.positions_N[None],
            use_cache=False,
            packing=packing,
        ).last_hidden_state
        return packing.whole.unpack(hidden_1_N_H[0])

    def as_reference(self) -> AbstractContextManager[torch.nn.Module]:
        """The frozen reference inside the adapters; see `reference_weights`."""
        return reference_weights(self.model)


def require_layout(valid_B_T: torch.Tensor, mask_B_T: torch.Tensor) -> None:
    """Refuse a grid that would be scored without an error and mean something else.

    Raises:
        BatchLayoutError: names the rows.
    """
    faults = {
        "a real token behind padding": valid_B_T[:, 1:] & ~valid_B_T[:, :-1],
        "padding to be scored": mask_B_T & ~valid_B_T,
        "its first token, which nothing predicts, to be scored": mask_B_T[:, :1],
    }
    if not bool(torch.stack([where.any() for where in faults.values()]).any()):
        return
    for what, where in faults.items():
        if rows := where.any(dim=1).nonzero().flatten().tolist():
            raise BatchLayoutError(
                f"row {rows[0]} of {len(mask_B_T)} has {what}; expected rows padded on the right, "
                "and scores asked of real tokens from the second on"
            )


def _place(values_N: torch.Tensor, wanted_B_T: torch.Tensor) -> torch.Tensor:
    """Put N values back at their positions; position 0 is added."""
    grid = values_N.new_zeros(wanted_B_T.shape)
    return torch.nn.functional.pad(grid.masked_scatter(wanted_B_T, values_N), (1, 0))
