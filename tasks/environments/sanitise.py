"""Keeping a model's special strings out of untrusted text.

Standard library only, Python 3.10: copied into the bundle, so that training and the device clean
text with the same code.
"""

from collections.abc import Sequence


def sanitise(content: str, specials: Sequence[str]) -> str:
    """Take the model's special strings out of untrusted text, so that they stay text.

    A zero-width space after the first character breaks the match and is visible in a diff.
    """
    for special in specials:
        content = content.replace(special, special[0] + "\u200b" + special[1:])
    return content
