"""Errors cross process borders whole."""

import inspect
import pickle

import pytest

from tasks.data import errors
from tasks.environments.calculator_problems import TooManyProblemsError
from tasks.rewards.math_exact import NotRationalError, TooLargeError
from tasks.rewards.math_syntax import MathSyntaxError
from tasks.rewards.symbolic import SymbolicError
from tasks.rewards.verifiers import UnknownAnswerKindError

KINDS = [
    *(kind for _, kind in inspect.getmembers(errors, inspect.isclass)),
    TooManyProblemsError,
    NotRationalError,
    TooLargeError,
    MathSyntaxError,
    SymbolicError,
    UnknownAnswerKindError,
]


@pytest.mark.parametrize("kind", KINDS)
def test_errors_survive_pickling_with_their_message(kind):
    error = kind("what is wrong")
    back = pickle.loads(pickle.dumps(error))
    assert type(back) is kind
    assert str(back) == str(error)
    assert "what is wrong" in str(back)
