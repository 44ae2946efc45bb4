"""The child that compares with SymPy: deadline, death, fork and threads."""

import os
import signal

import pytest

from tasks.rewards.symbolic import SymbolicComparer, SymbolicError


@pytest.fixture(scope="module")
def comparer():
    with_child = SymbolicComparer()
    yield with_child
    with_child.close()


def test_equal_and_different_values(comparer):
    assert comparer.equal(r"\sqrt{8}", r"2\sqrt{2}")
    assert not comparer.equal(r"\sqrt{8}", r"2\sqrt{3}")
    assert comparer.equal(r"\sqrt{2}+\sqrt{3}", r"\sqrt{5+2\sqrt{6}}")
    assert not comparer.equal(r"\sqrt{2}", "1.41421356237309504880168872420969807857")


def test_a_deadline_passes_and_the_next_question_is_answered(comparer):
    hasty = SymbolicComparer(deadline_s=0.0)
    with pytest.raises(SymbolicError, match="no reply within 0 s"):
        hasty.equal("x+1", "1+x")
    hasty._deadline_s = 60.0
    assert hasty.equal("x+1", "1+x")
    hasty.close()


def test_a_killed_child_is_replaced(comparer):
    assert comparer.equal("x", "x")
    os.kill(comparer._child.pid, signal.SIGKILL)
    comparer._child.wait()
    assert comparer.equal("2x", "x+x")


def test_an_expression_that_cannot_be_read_is_an_error(comparer):
    assert not comparer.parses(r"\frac{")
    with pytest.raises(SymbolicError):
        comparer.equal(r"\frac{", "1")


def test_latex_is_never_run_as_code(comparer, tmp_path):
    mark = tmp_path / "written"
    hostile = f"__import__('pathlib').Path('{mark}').touch()"
    assert not comparer.parses(hostile) or not mark.exists()
    assert not mark.exists()
