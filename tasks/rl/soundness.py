"""Whether samples can be made into tensors at all: lists that differ in length would be padded over
without a word, a first token that nothing predicts would count as certain."""

import math
from collections.abc import Iterator, Sequence

from tasks.rl.errors import RlError
from tasks.rl.types import Group, ScoredRollout
from tasks.sampling.types import Rollout


class UnsoundSampleError(RlError, ValueError):
    """A sample contradicts itself, or a batch has none, or one twice."""


def require_sound(groups: Sequence[Group]) -> None:
    """Refuse a batch that cannot be trained on as it says.

    NaN among `sampler_logprobs` is let through: the step's guard skips and counts it.

    Raises:
        UnsoundSampleError: names the sample, what is wrong, and what was expected.
    """
    seen: set[str] = set()
    for scored in (s for g in groups for s in g.rollouts):
        name = scored.rollout.rollout_id
        if name in seen:
            raise _unsound(
                scored.rollout,
                "its rollout_id stands twice in the batch; expected an id of its own",
            )
        seen.add(name)
        fault = next(_faults(scored), None)
        if fault is not None:
            raise _unsound(scored.rollout, fault)
    if not seen:
        raise UnsoundSampleError(
            f"a batch of {len(groups)} groups holds no sample; expected at least one"
        )


def require_vocabulary(groups: Sequence[Group], vocab_size: int) -> None:
    """Refuse tokens that the model has no embedding of; on a GPU they would end the process.

    Raises:
        UnsoundSampleError: names the sample, the token and the vocabulary.
    """
    for rollout in (s.rollout for g in groups for s in g.rollouts):
        ids = rollout.token_ids
        if not ids or (min(ids) >= 0 and max(ids) < vocab_size):
            continue
        position, token = next((p, t) for p, t in enumerate(ids) if not 0 <= t < vocab_size)
        raise _unsound(
            rollout,
            f"token {position} is {token}; the model has 0 to {vocab_size - 1}: is the tokenizer "
            "that of another model?",
        )


def _unsound(rollout: Rollout, fault: str) -> UnsoundSampleError:
    return UnsoundSampleError(f"sample {rollout.rollout_id} of row {rollout.row_id}: {fault}")


def _faults(scored: ScoredRollout) -> Iterator[str]:
    rollout, count = scored.rollout, len(scored.rollout.token_ids)
    if not count:
        yield "it has no token; expected at least a prompt"
    for name in ("action_mask", "sampler_logprobs"):
        given = len(getattr(rollout, name))
        if given != count:
            yield f"{count} tokens come with {given} of {name}; expected one each"
    if not 0 < rollout.temperature < math.inf:
        yield (
            f"temperature={rollout.temperature}: log-probabilities are taken at it; expected a "
            "finite number above 0"
        )
    yield from _turn_faults(rollout)
    turns = len(rollout.turns)
    if scored.reward is not None and len(scored.turn_rewards) != turns:
        yield f"{len(scored.turn_rewards)} turn_rewards for {turns} turns; expected one each"


def _turn_faults(rollout: Rollout) -> Iterator[str]:
    count, first = len(rollout.token_ids), 1
    if not rollout.turns:
        yield "it has no turn; expected at least one, be it without a token"
    for turn in rollout.turns:
        if not first <= turn.start <= turn.end <= count:
            yield (
                f"turn [{turn.start}, {turn.end}) must lie within [{first}, {count}): turns are in "
                "order, apart, and behind a prompt"
            )
        first = turn.end
        edges = [turn.start, *(span.end for span in turn.spans)]
        if turn.spans and ([s.start for s in turn.spans], edges[-1]) != (edges[:-1], turn.end):
            spans = [(s.start, s.end) for s in turn.spans]
            yield f"the spans {spans} do not cover turn [{turn.start}, {turn.end}) in order"
    spoken = sum(sum(rollout.action_mask[t.start : t.end]) for t in rollout.turns)
    if spoken != sum(rollout.action_mask):
        yield (
            f"action_mask has {sum(rollout.action_mask)} actions and {spoken} of them in turns; "
            "only a turn has actions"
        )
