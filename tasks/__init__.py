"""One thin Prefect task per stage, and the work itself beside it."""
