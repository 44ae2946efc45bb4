"""Verifiers and the rewards made from them; below RL and evaluation, so both use one normaliser."""
