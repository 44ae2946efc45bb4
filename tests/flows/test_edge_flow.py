"""`rl-pipeline-deploy` on a real Prefect server, and how a promotion starts it."""

import json
import shutil
from pathlib import Path
from uuid import UUID

import pytest
import yaml

from configs.schema import PipelineConfig
from deployment.fleet.enrol import pin_host_key
from tasks.tracking.promotion_ledger import Release
from tests.unit.deployment.jetson.conftest import facts, package, stages

__all__ = ["facts", "package", "stages"]

KEY = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIOMqqnkVzrm0SdG6UOoqKLsabgH5C9okWi0dh2l9GKJl"


@pytest.fixture
def enrolled_but_away(migrated, package):
    """Two devices that were enrolled once and are switched off; the key that signed the bundle."""
    Path("configs").mkdir()
    entries = [{"name": f"d{n}", "host": "127.0.0.1", "port": n} for n in (1, 2)]
    Path("configs/devices.yaml").write_text(
        json.dumps({"known_hosts": "runs/devices/known_hosts", "devices": entries})
    )
    for entry in entries:
        pin_host_key(Path("runs/devices/known_hosts"), entry["name"], KEY, replace=False)
    Path("runs/keys").mkdir()
    shutil.copy(package.pin, "runs/keys/allowed_signers")
    return package


def _sync_client(url):
    from prefect.client.orchestration import SyncPrefectClient

    return SyncPrefectClient(url)


def test_flow_fails_where_a_device_does_and_leaves_a_table(enrolled_but_away, shared_server):
    from prefect.client.schemas.filters import ArtifactFilter, ArtifactFilterKey
    from prefect.client.schemas.sorting import FlowRunSort

    from deployment.fleet.errors import FleetFailedError
    from flows.devices.flow import rl_pipeline_deploy

    with pytest.raises(FleetFailedError, match=r"nothing listens.*not tried: d2"):
        rl_pipeline_deploy(source=str(enrolled_but_away.bundle))
    with _sync_client(shared_server) as client:
        (newest, *_) = client.read_flow_runs(sort=FlowRunSort.EXPECTED_START_TIME_DESC, limit=1)
        keys = ArtifactFilter(key=ArtifactFilterKey(any_=["deployment"]))
        (artifact,) = client.read_artifacts(artifact_filter=keys)
    assert (newest.state_name, artifact.type) == ("Failed", "table")
    rows = json.loads(artifact.data)
    assert [(row["device"], row["outcome"]) for row in rows] == [
        ("d1", "failed"),
        ("d2", "not_tried"),
    ]
    assert "failed on 1 devices" in Path("runs/alerts.jsonl").read_text()


def test_promotion_queues_the_flow_where_the_server_has_it(enrolled_but_away, shared_server):
    from prefect.client.schemas.objects import StateType

    from flows.devices.flow import DEPLOYMENT, deploy_champion, rl_pipeline_deploy

    release = Release(
        model="calculator",
        profile="calculator",
        run_id="r",
        bundle_sha256=enrolled_but_away.record.sha256,
        bundle=str(enrolled_but_away.bundle),
    )
    said = deploy_champion(release, PipelineConfig(), Path("runs"))
    assert "failed" in said and "nothing listens" in said  # nobody to queue it: done at once
    history = Path("runs/devices/history.jsonl").read_text()

    with _sync_client(shared_server) as client:
        flow_id = client.create_flow(rl_pipeline_deploy)
        client.create_deployment(flow_id=flow_id, name=DEPLOYMENT.partition("/")[2])
        said = deploy_champion(release, PipelineConfig(), Path("runs"))
        assert said.startswith(f"{DEPLOYMENT} is queued as flow run")
        run = client.read_flow_run(UUID(said.rpartition("(")[2].rstrip(")")))
    assert run.parameters == {"source": release.bundle_sha256}
    assert run.state.type == StateType.SCHEDULED
    assert Path("runs/devices/history.jsonl").read_text() == history


def test_described_deployment_is_this_flow():
    from flows.devices.flow import DEPLOYMENT, rl_pipeline_deploy

    root = Path(__file__).parents[2]
    described = yaml.safe_load((root / "deployment/prefect.yaml").read_text())["deployments"]
    mine = {f"{rl_pipeline_deploy.name}/{d['name']}": d for d in described}[DEPLOYMENT]
    assert mine["entrypoint"] == "flows.devices.flow.rl_pipeline_deploy"
    assert mine["schedules"] == []
