"""Held-out evaluation with paired intervals."""
