"""Closes MLflow runs whose process is gone: `kill -9` leaves them RUNNING for ever."""

import os

import psutil

from tasks.tracking.operations import Speaker, end_run
from tasks.tracking.reachable import why_unreachable
from tasks.tracking.tracker import store_errors

PAGE = 200
_START_TOLERANCE_S = 1.0


def owner_lives(tags: dict[str, str]) -> bool:
    """Whether the process that opened a run still lives; another machine's is taken as alive."""
    if tags.get("owner.host") != os.uname().nodename:
        return True
    try:
        process = psutil.Process(int(tags["owner.pid"]))
        if process.status() == psutil.STATUS_ZOMBIE:
            return False
        return bool(abs(process.create_time() - float(tags["owner.started"])) < _START_TOLERANCE_S)
    except (psutil.NoSuchProcess, KeyError, ValueError):
        return False


def close_orphans(speaker: Speaker) -> int:
    """Mark RUNNING runs of dead owners KILLED; returns how many. An unreachable store: 0."""
    if why_unreachable(speaker.uri) is not None:
        return 0
    closed = 0
    try:
        open_runs = speaker.client.search_runs(
            [speaker.experiment_id],
            filter_string="attributes.status = 'RUNNING'",
            max_results=PAGE,
        )
        for run in open_runs:
            if "owner.pid" in run.data.tags and not owner_lives(run.data.tags):
                speaker.ids[run.info.run_id] = run.info.run_id
                speaker.say(end_run(run.info.run_id, "KILLED"))
                del speaker.ids[run.info.run_id]
                closed += 1
    except store_errors():
        return closed
    return closed
