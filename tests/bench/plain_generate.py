"""The call of transformers' own `generate` that other ways of sampling are held against."""

from collections.abc import Sequence
from typing import Any

import torch
from transformers import PreTrainedModel


class PlainGenerate:
    """Answers prompts as one batch, left-padded, at temperature 1 from the whole distribution."""

    def __init__(
        self, model: PreTrainedModel, prompts: Sequence[Sequence[int]], *, end: int, padding: int
    ) -> None:
        self._model, self._end, self._padding = model, end, padding
        self.prompt_tokens = max(map(len, prompts))
        """Answers begin in this column."""
        missing = [self.prompt_tokens - len(p) for p in prompts]
        self._ids = torch.tensor(
            [[padding] * n + [*p] for n, p in zip(missing, prompts, strict=True)]
        )
        self._mask = torch.tensor(
            [[0] * n + [1] * len(p) for n, p in zip(missing, prompts, strict=True)]
        )

    def __call__(self, max_new_tokens: int, **more: Any) -> Any:
        """What `generate` gives; `more` goes to it as it is."""
        with torch.inference_mode():
            return self._model.generate(
                input_ids=self._ids,
                attention_mask=self._mask,
                do_sample=True,
                temperature=1.0,
                top_k=0,
                top_p=1.0,
                max_new_tokens=max_new_tokens,
                eos_token_id=self._end,
                pad_token_id=self._padding,
                **more,
            )
