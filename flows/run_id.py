"""Names of runs."""

import secrets
import time


def new_run_id(profile: str) -> str:
    """Sortable by time, unique, and speaking."""
    return f"{time.strftime('%Y%m%d-%H%M%S')}-{profile}-{secrets.token_hex(2)}"
