"""The report's table of importance matrices: own rollouts against generic text and none."""

from typing import Any

from flows.report.data import RunFiles, dig, rows, strings, table
from flows.report.text import UNKNOWN, finite, number

_WEIGHTS = {
    "gradient": "tokens weighed by how much they move the policy's own choices",
    "all": "every token counts alike",
    "assistant": "only positions from which the policy samples count",
}


def matrices_section(files: RunFiles) -> dict[str, Any]:
    """What the matrix was made of, which tensors it leaves out, and the comparison if it was made.

    A difference is called lower or higher only where its whole interval lies on one side of 0.
    """
    parity = files.json("quantize", "parity.json")
    imatrix = table(parity, "imatrix")
    if not imatrix:
        return {}
    left_out = {
        tensor
        for facts in table(parity, "quant").values()
        for tensor in strings(facts, "without_imatrix")
    }
    return {
        "rollouts": number(imatrix.get("rollouts"), 6),
        "weights": _WEIGHTS.get(str(imatrix.get("weights")), "every token counts alike"),
        "left_out": ", ".join(sorted(left_out)),
        "text": str(dig(imatrix, "comparison", "text") or ""),
        "rows": [_row(row) for row in rows(imatrix, "comparison", "rows")],
    }


def _row(row: dict[str, Any]) -> dict[str, str]:
    low, high = _ends(row, "own_minus_this")
    verdict, tone = "", "calm"
    if low is not None and high is not None:
        verdict, tone = "no difference shown", "warn"
        if high < 0:
            verdict, tone = "own is nearer", "good"
        elif low > 0:
            verdict, tone = "own is farther", "bad"
    return {
        "type": str(row.get("type", "")),
        "matrix": str(row.get("matrix", "")),
        "kl": number(dig(row, "kl", "value")),
        "kl_ci": _interval(*_ends(row, "kl")),
        "difference": number(dig(row, "own_minus_this", "value"), 2) if verdict else "",
        "difference_ci": _interval(low, high) if verdict else "",
        "verdict": verdict,
        "tone": tone,
    }


def _ends(row: dict[str, Any], key: str) -> tuple[float | None, float | None]:
    pair = dig(row, key, "ci95")
    if not isinstance(pair, list) or len(pair) != 2:
        return None, None
    return finite(pair[0]), finite(pair[1])


def _interval(low: float | None, high: float | None) -> str:
    if low is None or high is None:
        return UNKNOWN
    return f"{number(low, 2)} … {number(high, 2)}"
