"""Tempered log-probabilities and entropy of given tokens (A06)."""

from typing import NamedTuple

import torch


class TokenScores(NamedTuple):
    """Scores of N tokens: log-probability and entropy of the distribution each came from, nats."""

    logprobs_N: torch.Tensor
    entropy_N: torch.Tensor | None
    """None in a pass without gradient: nobody asks for it there, and it costs as much again."""


def score_tokens(
    logits_N_V: torch.Tensor, token_ids_N: torch.Tensor, temperature_N: torch.Tensor
) -> TokenScores:
    """log softmax(logits / T) of each token, and the entropy of that distribution (itself without
    gradient).

    Logits are divided before the softmax; dividing log-probabilities would not sum to one.
    """
    logp = torch.log_softmax(logits_N_V.float() / temperature_N[:, None], dim=-1)
    chosen = logp.gather(-1, token_ids_N[:, None]).squeeze(-1)
    if not torch.is_grad_enabled():
        return TokenScores(chosen, None)
    with torch.no_grad():
        return TokenScores(chosen, -(logp.exp() * logp).sum(-1))


def tempered_logprobs(
    logits_B_T_V: torch.Tensor, token_ids_B_T: torch.Tensor, temperature_B: torch.Tensor
) -> torch.Tensor:
    """Log-probability of every token, predicted from the tokens before it.

    Returns:
        float32, (B, T), nats; position 0 has no prediction and is 0.
    """
    batch, length, vocabulary = logits_B_T_V.shape
    scores = score_tokens(
        logits_B_T_V[:, :-1].reshape(-1, vocabulary),
        token_ids_B_T[:, 1:].reshape(-1),
        temperature_B.repeat_interleave(length - 1),
    )
    return torch.nn.functional.pad(scores.logprobs_N.view(batch, length - 1), (1, 0))
