"""The policy as SFT and RL train it: token scores, and a value head on the shared trunk."""

from contextlib import AbstractContextManager
from typing import NamedTuple

import torch
from peft import PeftModel
from transformers import PreTrainedModel

from tasks.models.logprobs import score_tokens
from tasks.models.trainable import reference_weights


class PolicyScores(NamedTuple):
    """Float32, (B, T), nats; 0 where `mask_B_T` was False. Values are None without a head."""

    logprobs_B_T: torch.Tensor
    entropy_B_T: torch.Tensor
    values_B_T: torch.Tensor | None


class PolicyModule(torch.nn.Module):
    """A causal model and, if asked, a linear value head that reads its last hidden states."""

    def __init__(self, model: torch.nn.Module, *, value_head: bool, seed: int) -> None:
        super().__init__()
        self.model = model
        self.value_head: torch.nn.Linear | None = None
        if value_head:
            hidden = self.causal_model.config.hidden_size
            self.value_head = torch.nn.Linear(hidden, 1)
            torch.nn.init.zeros_(self.value_head.bias)
            generator = torch.Generator().manual_seed(seed)
            with torch.no_grad():
                self.value_head.weight.normal_(0, hidden**-0.5, generator=generator)

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

        Logits are made for those tokens alone: with a large vocabulary they are most of the memory.
        """
        trunk = self.causal_model
        hidden_B_T_H = trunk.model(
            input_ids=token_ids_B_T, attention_mask=valid_B_T.long(), use_cache=False
        ).last_hidden_state
        wanted = mask_B_T[:, 1:]
        rows = wanted.nonzero(as_tuple=True)[0]
        logits_N_V = trunk.lm_head(hidden_B_T_H[:, :-1][wanted])
        scores = score_tokens(logits_N_V, token_ids_B_T[:, 1:][wanted], temperature_B[rows])
        values = None
        if self.value_head is not None:
            head = self.value_head  # in bfloat16 where DeepSpeed trains in it
            values = head(hidden_B_T_H.to(head.weight.dtype)).squeeze(-1).float()
        return PolicyScores(
            _place(scores.logprobs_N, wanted), _place(scores.entropy_N, wanted), values
        )

    def as_reference(self) -> AbstractContextManager[torch.nn.Module]:
        """The frozen reference inside the adapters; see `reference_weights`."""
        return reference_weights(self.model)


def _place(values_N: torch.Tensor, wanted_B_T: torch.Tensor) -> torch.Tensor:
    """Put N values back at their positions; position 0 is added."""
    grid = torch.zeros(wanted_B_T.shape, dtype=values_N.dtype)
    return torch.nn.functional.pad(grid.masked_scatter(wanted_B_T, values_N), (1, 0))
