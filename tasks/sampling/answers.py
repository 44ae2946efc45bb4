"""What an engine answers is checked before anybody trains on it."""

import math
from collections.abc import Sequence

from tasks.sampling.errors import AnswerRefusedError
from tasks.sampling.types import Completion, GenerateRequest, StopReason

ROUNDING = 1e-4
"""Nats a log-probability may lie above zero."""


class MissingLogprobsError(AnswerRefusedError):
    """Tokens and log-probabilities differ in number."""


class NonFiniteLogprobError(AnswerRefusedError):
    """A log-probability is NaN, infinite or above zero."""


class ForeignTokenError(AnswerRefusedError):
    """A token lies outside the vocabulary."""


class WrongLengthError(AnswerRefusedError):
    """More tokens than were asked for, or fewer than the answer says it has."""


class BrokenSpansError(AnswerRefusedError):
    """The versions do not cover the tokens in order and without gaps."""


class AnswerCountError(AnswerRefusedError):
    """More or fewer answers than were asked for."""


def one_each(
    requests: Sequence[GenerateRequest], completions: Sequence[Completion]
) -> Sequence[Completion]:
    """The completions themselves, if there are as many as requests.

    Raises:
        AnswerCountError: whose is missing cannot be told, so none is used.
    """
    if len(completions) != len(requests):
        first = requests[0].request_id if requests else "none"
        raise AnswerCountError(
            f"{len(requests)} requests from {first} on got {len(completions)} answers; one each is "
            "needed"
        )
    return completions


def checked(request: GenerateRequest, completion: Completion, vocab_size: int | None) -> Completion:
    """The completion itself, if it can be trained on; None leaves its tokens' range to others.

    Raises:
        AnswerRefusedError: the kind of it that names what is wrong; the caller leaves the episode
            out and counts it.
    """
    tokens, logprobs = completion.token_ids, completion.logprobs
    name = f"request {request.request_id}"
    if completion.request_id != request.request_id:
        raise AnswerRefusedError(f"{name} was answered as {completion.request_id}")
    if len(logprobs) != len(tokens):
        raise MissingLogprobsError(
            f"{name}: {len(tokens)} tokens came with {len(logprobs)} log-probabilities; "
            "one each is needed"
        )
    for position, logprob in enumerate(logprobs):
        if not math.isfinite(logprob) or logprob > ROUNDING:
            raise NonFiniteLogprobError(
                f"{name}: token {position} has log-probability {logprob}; expected a finite "
                "number of nats, at most 0"
            )
    for position, token in enumerate(tokens):
        if vocab_size is not None and not 0 <= token < vocab_size:
            raise ForeignTokenError(
                f"{name}: token {position} is {token}; the vocabulary has 0 to {vocab_size - 1}"
            )
    _check_length(request, completion)
    _check_spans(name, completion)
    return completion


def _check_length(request: GenerateRequest, completion: Completion) -> None:
    count, most = len(completion.token_ids), request.params.max_new_tokens
    if count > most:
        raise WrongLengthError(
            f"request {request.request_id}: {count} tokens came, at most {most} were asked for"
        )
    if completion.stop_reason is StopReason.MAX_TOKENS and count < most:
        raise WrongLengthError(
            f"request {request.request_id} ended as max_tokens after {count} tokens, "
            f"{most} were asked for"
        )
    if completion.stop_reason is StopReason.END_OF_TURN and count == 0:
        raise WrongLengthError(
            f"request {request.request_id} ended its turn without the token that ends it"
        )


def _check_spans(name: str, completion: Completion) -> None:
    if not completion.spans:
        return
    edges = [0, *(span.end for span in completion.spans)]
    starts = [span.start for span in completion.spans]
    count = len(completion.token_ids)
    if starts != edges[:-1] or edges[-1] != count or edges != sorted(set(edges)):
        raise BrokenSpansError(
            f"{name}: the spans {[(s.start, s.end) for s in completion.spans]} do not cover its "
            f"{count} tokens in order"
        )
    oldest = min(span.version for span in completion.spans)
    if completion.policy_version != oldest:
        raise BrokenSpansError(
            f"{name} is stamped {tuple(completion.policy_version)}, its oldest token "
            f"{tuple(oldest)}"
        )
