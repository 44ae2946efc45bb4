"""Quarantined rows, listed and released."""
