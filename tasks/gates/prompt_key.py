"""What two prompts are compared by when duplicates and leaks are sought."""

import unicodedata


def prompt_key(prompt: str) -> str:
    """NFKC, casefold, single spaces, no invisible format characters.

    Folding can undo NFKC (and the other way round), so NFKC is taken before and after.
    """
    folded = unicodedata.normalize("NFKC", unicodedata.normalize("NFKC", prompt).casefold())
    seen = "".join(char for char in folded if unicodedata.category(char) != "Cf")
    return " ".join(seen.split())
