"""Two things that make decoding one token at a time fast on CPUs; neither changes what it means.

Attention: where query heads share a key-value head, the heads of one group are laid out as query
positions of that head, so keys and values are read once and never copied per head. Cache: keys and
values are written into room set aside, where concatenation would copy all of them at every token.
"""

from typing import Any

import torch
from peft import PeftModel
from transformers import Cache
from transformers.cache_utils import DynamicLayer
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask
from transformers.modeling_utils import AttentionInterface

NAME = "sdpa_grouped_decode"
ROOM_TOKENS = 64
"""The cache grows by this many tokens at a time."""


def use_grouped_decode(model: torch.nn.Module) -> None:
    """Let a transformers (or peft) model attend by groups when it decodes one token.

    Other calls, training among them, stay as they were.
    """
    AttentionInterface.register(NAME, _attend)
    AttentionMaskInterface.register(NAME, sdpa_mask)
    causal = model.get_base_model() if isinstance(model, PeftModel) else model
    causal.set_attn_implementation(NAME)


def _attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Query (B, H, Q, D), key and value (B, K, T, D), mask (B, 1, Q, T); returns (B, Q, H, D)."""
    batch, heads, queries, size = query.shape
    shared = key.shape[1]
    if queries != 1 or heads == shared:
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling, **kwargs
        )
    answer = torch.nn.functional.scaled_dot_product_attention(
        query.reshape(batch, shared, heads // shared, size),
        key,
        value,
        attn_mask=attention_mask,
        scale=scaling,
    )
    return answer.reshape(batch, 1, heads, size), None


class RoomyLayer(DynamicLayer):
    """Keys and values of one layer; `keys` and `values` are views of the part that is filled."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append (B, K, new, D) and return all keys and values so far."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
            self._room = [key_states[:, :, :0], value_states[:, :, :0]]
        start = self.get_seq_length()
        end = start + key_states.shape[-2]
        if end > self._room[0].shape[-2]:
            self._room = [_widen(room, start, end + ROOM_TOKENS) for room in self._room]
        for room, new in zip(self._room, (key_states, value_states), strict=True):
            room[:, :, start:end] = new
        self.keys, self.values = (room[:, :, :end] for room in self._room)
        return self.keys, self.values

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep some rows of the batch."""
        length = self.get_seq_length()
        self._room = [room[indices] for room in self._room]
        self.keys, self.values = (room[:, :, :length] for room in self._room)


def _widen(room: torch.Tensor, filled: int, length: int) -> torch.Tensor:
    wider = room.new_empty(*room.shape[:2], length, room.shape[-1])
    wider[:, :, :filled] = room[:, :, :filled]
    return wider


def roomy_cache() -> Cache:
    """An empty cache for one decode loop over full (not sliding-window) attention."""
    return Cache(layer_class_to_replicate=RoomyLayer)
