"""Held-out evaluation: answers, their metrics, paired intervals and the promotion gate."""
