"""Prefect deployment and the edge bundle."""
