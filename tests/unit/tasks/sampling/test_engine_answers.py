"""An answer that cannot be trained on is refused by name, one that can passes untouched."""

import math
import pickle
from dataclasses import replace

import pytest

from tasks.sampling.answers import (
    BrokenSpansError,
    ForeignTokenError,
    MissingLogprobsError,
    NonFiniteLogprobError,
    WrongLengthError,
    checked,
)
from tasks.sampling.errors import AnswerRefusedError
from tasks.sampling.types import (
    Completion,
    GenerateRequest,
    PolicyVersion,
    SamplingParams,
    StopReason,
    VersionSpan,
)

V1, V2 = PolicyVersion(0, 1), PolicyVersion(0, 2)
ASKED = GenerateRequest("r", (5, 6), SamplingParams(1.0, 4), seed=0)
GOOD = Completion("r", (0, 9, 3), (-0.5, 0.0, -88.8), StopReason.END_OF_TURN, V1)


def spans(*edges: tuple[int, int, PolicyVersion]) -> tuple[VersionSpan, ...]:
    return tuple(VersionSpan(*edge) for edge in edges)


def test_a_good_answer_passes_untouched():
    assert checked(ASKED, GOOD, vocab_size=10) is GOOD
    longest = replace(GOOD, token_ids=(1,) * 4, logprobs=(-1.0,) * 4)
    assert checked(ASKED, replace(longest, stop_reason=StopReason.MAX_TOKENS), 10)
    full = Completion("r", (), (), StopReason.CONTEXT_FULL, V1)
    assert checked(ASKED, full, 10) is full  # no room for a single token
    assert checked(ASKED, replace(full, stop_reason=StopReason.ABORTED), 10)


@pytest.mark.parametrize(
    ("change", "error", "says"),
    [
        ({"logprobs": (-0.5, -0.1)}, MissingLogprobsError, "3 tokens came with 2"),
        ({"logprobs": ()}, MissingLogprobsError, "with 0"),
        ({"logprobs": (-0.5, math.nan, -1.0)}, NonFiniteLogprobError, "token 1 has .* nan"),
        ({"logprobs": (-math.inf, -0.1, -1.0)}, NonFiniteLogprobError, "token 0 has .* -inf"),
        ({"logprobs": (-0.5, -0.1, 0.01)}, NonFiniteLogprobError, "token 2 has .* 0.01"),
        ({"token_ids": (0, 10, 3)}, ForeignTokenError, "token 1 is 10; .* 0 to 9"),
        ({"token_ids": (-1, 9, 3)}, ForeignTokenError, "token 0 is -1"),
        ({"token_ids": (1,) * 5, "logprobs": (-1.0,) * 5}, WrongLengthError, "5 tokens came"),
        ({"stop_reason": StopReason.MAX_TOKENS}, WrongLengthError, "after 3 tokens, 4 were asked"),
        ({"token_ids": (), "logprobs": ()}, WrongLengthError, "without the token that ends it"),
        ({"request_id": "other"}, AnswerRefusedError, "answered as other"),
        ({"spans": spans((0, 2, V1))}, BrokenSpansError, r"\[\(0, 2\)\] do not cover its 3"),
        ({"spans": spans((0, 1, V1), (2, 3, V2))}, BrokenSpansError, "do not cover"),
        ({"spans": spans((0, 0, V1), (0, 3, V2))}, BrokenSpansError, "do not cover"),
        ({"spans": spans((0, 1, V2), (1, 3, V2))}, BrokenSpansError, r"oldest token \(0, 2\)"),
    ],
)
def test_what_is_wrong_is_named(change, error, says):
    with pytest.raises(error, match=says) as caught:
        checked(ASKED, replace(GOOD, **change), vocab_size=10)
    assert isinstance(caught.value, AnswerRefusedError) and "r" in str(caught.value)
    again = pickle.loads(pickle.dumps(caught.value))
    assert type(again) is error and str(again) == str(caught.value)


def test_a_version_per_token_passes():
    answer = replace(GOOD, spans=spans((0, 1, V1), (1, 3, V2)))
    assert checked(ASKED, answer, 10) is answer
