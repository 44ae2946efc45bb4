"""Prefect server, MLflow and a worker."""
