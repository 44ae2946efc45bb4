"""The asynchronous RL engine; no Prefect, no MLflow."""
