"""Supervised fine-tuning, which makes the frozen reference snapshot."""
