"""Finds in MLflow what the disk no longer has: which run made an artefact, and from what."""

import logging
from dataclasses import dataclass

from tasks.tracking.operations import Speaker
from tasks.tracking.reachable import why_unreachable
from tasks.tracking.tracker import store_errors

_INPUT, _SHA = "input.", ".sha256"
logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class LoggedOutput:
    """An artefact as MLflow knows it."""

    sha256: str
    stage: str
    uri: str
    mlflow_run_id: str
    run_id: str | None
    """Our name of the whole run, where its parent run says it."""
    inputs: dict[str, str]
    """Hashes of what it was made from, by stage."""


def search_output(speaker: Speaker, sha256: str) -> LoggedOutput | None:
    """The newest run whose output has this content hash; None where there is none.

    An unreachable store is logged as a warning and finds nothing.
    """
    if (problem := why_unreachable(speaker.uri)) is not None:
        logger.warning("MLflow is not asked for what the disk lacks: %s", problem)
        return None
    try:
        runs = speaker.client.search_runs(
            [e.experiment_id for e in speaker.client.search_experiments()],
            filter_string=f"tags.`output.sha256` = '{sha256}'",
            max_results=1,
        )
        if not runs:
            return None
        tags, parent = runs[0].data.tags, runs[0].data.tags.get("mlflow.parentRunId")
        parent_tags = speaker.client.get_run(parent).data.tags if parent else {}
    except store_errors() as error:
        logger.warning("MLflow could not be asked for %s: %s", sha256[:12], error)
        return None
    inputs = {
        name.removeprefix(_INPUT).removesuffix(_SHA): value
        for name, value in tags.items()
        if name.startswith(_INPUT) and name.endswith(_SHA)
    }
    return LoggedOutput(
        sha256,
        tags.get("stage", "?"),
        tags.get("output.uri", "?"),
        runs[0].info.run_id,
        parent_tags.get("run_id"),
        inputs,
    )
