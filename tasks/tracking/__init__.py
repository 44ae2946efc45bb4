"""MLflow and lineage."""
