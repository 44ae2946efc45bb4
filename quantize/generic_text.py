"""Text about something else than the policy's task, to hold its own rollouts against.

What is taken is the Python language reference, which every CPython carries (`pydoc_data.topics`,
for `help()`): about half a million characters of English with code in it, on this machine already,
and the same for the same Python version.
"""

import importlib
import platform
from collections.abc import Callable, Sequence

from quantize.errors import GenericTextError
from tasks.artifacts.content_hash import hash_bytes

MODULE = "pydoc_data.topics"
CHUNK = 512
"""Tokens of one stretch; the length at which llama.cpp's own tool reads its text."""


def generic_text() -> str:
    """The language reference, topics in the order of their names.

    Raises:
        GenericTextError: this Python was installed without it.
    """
    try:
        topics: dict[str, str] = importlib.import_module(MODULE).topics
    except ImportError as error:
        raise GenericTextError(
            f"this Python has no {MODULE}, from which the generic text is taken; install the whole "
            "standard library, or set quantize.imatrix_compare=false"
        ) from error
    return "\n\n".join(topics[name].strip() for name in sorted(topics))


def describe_text(text: str) -> str:
    """What a file made from it says of its origin: name, Python version, hash of the text."""
    digest = hash_bytes(text.encode())[:12]
    return f"Python {platform.python_version()} language reference, sha256 {digest}"


def chunks(
    encode: Callable[[str], Sequence[int]], text: str, tokens: int, length: int
) -> list[list[int]]:
    """`text` in stretches of `length` ids, as many as hold at least `tokens`, or all there are.

    Raises:
        GenericTextError: the text is shorter than one stretch.
    """
    wanted = max(1, -(-tokens // length)) * length
    ids: list[int] = []
    for paragraph in text.split("\n\n"):  # piece by piece: a long text takes a tokenizer long
        ids.extend(encode(paragraph + "\n\n"))
        if len(ids) >= wanted:
            break
    found = [ids[i : i + length] for i in range(0, min(wanted, len(ids)) - length + 1, length)]
    if not found:
        raise GenericTextError(
            f"the generic text has {len(ids)} tokens, which is less than one stretch of {length}"
        )
    return found
