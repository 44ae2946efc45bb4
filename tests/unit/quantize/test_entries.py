"""What `parity.json` says of repaired files, and of names that promise more than the file holds."""

from pathlib import Path

import numpy as np
import pytest

from quantize.entries import NAMED_TENSORS, entry, with_repairs
from quantize.measure import Judged
from quantize.parity import Parity, Verdict
from quantize.quantise import QuantReport
from quantize.repair_run import Repaired
from tasks.artifacts.bootstrap import Interval

PARITY = Parity(Interval(0.1, 0.05, 0.2), Interval(0.9, 0.8, 1.0), Interval(1.1, 1.0, 1.2), 50, 5)


def judged(name, *, fallbacks=(), ships=True):
    report = QuantReport(
        Path(f"{name}.gguf"), "0" * 64, 1000, 4.98, 4.9, {"IQ4_NL": 180, "Q8_0": 31}, fallbacks
    )
    verdict = Verdict(ships, "ships: well" if ships else "rejected: badly")
    return Judged(name, report, PARITY, np.array([1.0, 0, 1, 1]), Interval(0, 0, 0), verdict)


def raised(count):
    return {f"blk.{i}.ffn_up.weight": ("IQ2_S", "Q4_K") for i in range(count)}


def test_a_repaired_file_stands_beside_the_rejected_one():
    variants = {"IQ2_M": entry(judged("IQ2_M", ships=False))}
    repair = Repaired("IQ2_M", judged("IQ2_M+2"), raised(2), "2 tensors raised")
    found = with_repairs(variants, [repair])
    assert found["IQ2_M"]["repair"] == {"by": "IQ2_M+2", "why": "2 tensors raised"}
    assert found["IQ2_M"]["why"] == "rejected: badly; repaired as IQ2_M+2"
    assert found["IQ2_M"]["ships"] is False and found["IQ2_M+2"]["ships"] is True
    assert found["IQ2_M+2"]["repaired"] == {
        "of": "IQ2_M",
        "tensors": {
            "blk.0.ffn_up.weight": {"from": "IQ2_S", "to": "Q4_K"},
            "blk.1.ffn_up.weight": {"from": "IQ2_S", "to": "Q4_K"},
        },
    }
    assert found["IQ2_M+2"]["why"].endswith(
        "IQ2_M with blk.0.ffn_up.weight as Q4_K, blk.1.ffn_up.weight as Q4_K"
    )


@pytest.mark.parametrize("count", [NAMED_TENSORS, NAMED_TENSORS + 3])
def test_many_raised_tensors_are_all_kept_and_the_first_named(count):
    variants = {"IQ2_M": entry(judged("IQ2_M", ships=False))}
    fixed = Repaired("IQ2_M", judged(f"IQ2_M+{count}"), raised(count), "")
    found = with_repairs(variants, [fixed])[f"IQ2_M+{count}"]
    assert len(found["repaired"]["tensors"]) == count
    assert found["why"].count(" as Q4_K") == NAMED_TENSORS
    assert found["why"].endswith("and 3 more") is (count > NAMED_TENSORS)


def test_what_could_not_be_repaired_says_why_and_adds_nothing():
    variants = {"IQ2_M": entry(judged("IQ2_M", ships=False))}
    found = with_repairs(variants, [Repaired("IQ2_M", None, {}, "nothing passes")])
    assert set(found) == {"IQ2_M"}
    assert found["IQ2_M"]["why"] == "rejected: badly; not repaired: nothing passes"


def test_a_name_whose_types_do_not_fit_the_rows_says_what_the_file_holds():
    lines = [f"blk.{i}.x: rows of 576, iq2_s became iq4_nl" for i in range(3)]
    lines.append("token_embd.weight: rows of 576, q6_k became q8_0")
    why = entry(judged("IQ2_M", fallbacks=tuple(lines)))["why"]
    assert why == (
        "ships: well; only by name IQ2_M: the rows of 4 of 211 matrices do not fit its types "
        "(3 as iq4_nl, 1 as q8_0), so it has 4.98 bits per weight"
    )
    assert "only by name" not in entry(judged("IQ2_M"))["why"]
