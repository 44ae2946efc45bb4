"""Approval through Prefect: the flow run suspends, its process ends, an answer brings it back.

A real server and a real worker over the tiny stages.
"""

import json
import re
from datetime import UTC, datetime
from pathlib import Path

import pytest
from worker_world import World, cli, wait_for

from tasks.tracking.promotion_ledger import PromotionLedger

APPROVAL = {
    "promotion.approval": True,
    "promotion.problems": 8,
    "evaluation.bootstrap_resamples": 200,
}


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """Server, worker and deployment."""
    found = World(tmp_path_factory.mktemp("approval"))
    found.runs.mkdir()
    try:
        found.start("prefect")
        deployment = found.deploy()
        found.start("worker")
        yield found, deployment
    finally:
        found.stop()


def start(world, deployment, steps, **overrides):
    """Start a run whose model solves `steps` of eight problems; its id, once it waits."""
    parameters = {
        "profile": "calculator",
        "overrides": {"rl.steps": steps, **APPROVAL, **overrides},
    }
    with world.client() as client:
        run = client.create_flow_run_from_deployment(deployment, parameters=parameters)
    wait_for(
        lambda: world.state(run.id) in ("PAUSED", "FAILED", "CRASHED", "COMPLETED"),
        240,
        f"the run waits ({(world.folder / 'worker.log').read_text()[-3000:]})",
    )
    assert world.state(run.id) == "PAUSED", (world.folder / "worker.log").read_text()[-3000:]
    return run.id


def gone(world, flow_run_id):
    """Return when the worker has seen the suspended process end, as a person's reading takes."""
    name = world.read(flow_run_id).name
    log = world.folder / "worker.log"
    wait_for(
        lambda: re.search(rf"Process for flow run '{name}' exited", log.read_text()),
        60,
        "the suspended process ends",
    )


def summary_of(world, entry):
    path = world.runs / entry.release.run_id / "summary.json"
    return json.loads(Path(path).read_bytes())


def approved_on_the_command_line(world, deployment, ledger):
    """Approved there while the process of the run is long gone."""
    first = start(world, deployment, 4)
    (waiting,) = ledger.entries()
    assert waiting.evidence["flow_run_id"] == str(first)
    assert (waiting.action, waiting.evidence["waiting"]) == ("candidate", True)
    assert summary_of(world, waiting)["status"] == "FINISHED"
    runs_before = {p.name for p in world.runs.iterdir()}
    asked = cli(world, "approve", "calculator:1")
    assert asked.returncode == 2
    assert "nobody to ask: no terminal" in asked.stderr
    assert ledger.champion() is None
    said = cli(world, "approve", "calculator:1", "--yes", "--reason", "reads well")
    assert said.returncode == 0, said.stderr
    assert "not resumed" not in said.stdout
    assert world.ended(first).state.name == "Completed"
    approved = ledger.entries()[-1]
    assert (approved.action, approved.reason) == ("approve", "reads well")
    assert ledger.champion().version == 1
    summary = summary_of(world, approved)
    assert summary["promotion"]["outcome"] == "promoted"
    assert summary["promotion"]["sequence"] == 2
    assert {p.name for p in world.runs.iterdir()} == runs_before  # nothing was run again


def approved_in_the_page(world, deployment, ledger):
    """Approved in Prefect's page."""
    second = start(world, deployment, 6)
    gone(world, second)
    with world.client() as client:
        client.resume_flow_run(second, run_input={"approve": True, "reason": "nice [b]"})
    assert world.ended(second).state.name == "Completed"
    answered = ledger.entries()[-1]
    assert (answered.action, answered.reason) == ("approve", "nice [b]")
    assert answered.actor.endswith("(Prefect)")
    assert ledger.champion().version == 2


def resumed_without_a_word(world, deployment, ledger):
    """No approval."""
    third = start(world, deployment, 7)
    gone(world, third)
    with world.client() as client:
        client.resume_flow_run(third, run_input={})
    assert world.ended(third).state.name == "Completed"
    rejected = ledger.entries()[-1]
    assert (rejected.action, rejected.reason) == ("reject", "not approved in Prefect's page")
    assert summary_of(world, rejected)["promotion"]["outcome"] == "candidate"
    assert ledger.champion().version == 2


def answered_by_nobody_in_time(world, deployment, ledger):
    """Too late is no approval either."""
    fourth = start(world, deployment, 8, **{"promotion.approval_timeout_s": 4.0})
    assert world.ended(fourth).state.type.value == "FAILED"
    expired = ledger.entries()[-1]
    until = datetime.fromisoformat(expired.evidence["approve_by"])
    assert until < datetime.now(UTC)
    late = cli(world, "approve", "calculator:4", "--yes")
    assert late.returncode == 2
    assert "the time to approve calculator:4 ended" in late.stderr
    assert ledger.champion().version == 2


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_suspended_run_is_approved_rejected_answered_in_the_page_or_expires(world):
    world, deployment = world
    ledger = PromotionLedger(world.runs, "calculator")
    approved_on_the_command_line(world, deployment, ledger)
    approved_in_the_page(world, deployment, ledger)
    resumed_without_a_word(world, deployment, ledger)
    answered_by_nobody_in_time(world, deployment, ledger)
    assert ledger.verify() == 7
    _check_artifact(world)


def _check_artifact(world):
    """The transcripts lie in Prefect's page, nothing of them as markup."""
    from prefect.client.schemas.filters import ArtifactFilter, ArtifactFilterKey

    with world.client() as client:
        wanted = ArtifactFilter(key=ArtifactFilterKey(any_=["approval-transcripts"]))
        found = client.read_artifacts(artifact_filter=wanted)
    texts = [a.data for a in found]
    assert len(texts) == 4
    assert any("**Candidate** (correct)" in text for text in texts)
    for text in texts:
        for block in text.split("\n\n"):
            if "<b>`4`" in block:
                assert block.startswith("```text\n")
                assert block.endswith("\n```")
