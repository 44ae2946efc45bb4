"""Releases, and one device that serves the first of them: most tests end with it still doing so."""

import json
import shutil
from types import SimpleNamespace

import pytest

from configs.schema.deploy import DeployConfig
from deployment.fleet import device as device_module
from deployment.fleet import remote as remote_module
from deployment.fleet.cargo import loaded
from deployment.fleet.device import Visit
from deployment.fleet.enrol import enrol, offered
from deployment.fleet.ssh import Shell
from deployment.jetson.signing import signing_key
from tasks.artifacts import hash_file
from tests.flows.loopback_devices import LoopbackDevice, make_key, note, spoil_golden, variant
from tests.unit.deployment.jetson.conftest import facts, package, stages

__all__ = ["facts", "package", "stages"]

CONFIG = DeployConfig(health_timeout_s=60, wave_size=2)


@pytest.fixture(scope="session")
def releases(package, facts, tmp_path_factory):
    """Bundles of the pinned key, and one that a foreign key signed; `sha` gives their names."""
    folder = tmp_path_factory.mktemp("releases")
    key = signing_key(facts.key_dir, {}).private
    stranger = signing_key(tmp_path_factory.mktemp("stranger"), {})
    return SimpleNamespace(
        one=package.bundle,
        two=variant(package.bundle, folder / "two", key, note("second")),
        spoilt=variant(package.bundle, folder / "spoilt", key, spoil_golden),
        foreign=variant(package.bundle, folder / "foreign", stranger.private, note("foreign")),
        pin=package.pin,
        foreign_pin=stranger.allowed_signers,
        sha=lambda bundle: hash_file(bundle / "manifest.json"),
    )


@pytest.fixture(scope="session")
def client_key(tmp_path_factory):
    """The SSH key of the machine that deploys."""
    return make_key(tmp_path_factory.mktemp("ssh") / "id")


@pytest.fixture(scope="session")
def known_hosts(tmp_path_factory):
    """Where host keys are pinned."""
    return tmp_path_factory.mktemp("known") / "hosts"


@pytest.fixture(scope="session")
def deploy_to(known_hosts):
    """Deploy a bundle to a device; returns the result and what was said."""

    def deploy(device, bundle, pin, *, config=CONFIG, sent=None, **entry):
        said = []
        with (
            loaded(bundle, pin) as cargo,
            Shell(device.config(**entry), known_hosts) as shell,
        ):
            visit = Visit(shell, config, said.append, sent or (lambda done, size: None))
            return visit.deploy(cargo), said

    return deploy


@pytest.fixture(scope="session")
def serving(tmp_path_factory, client_key, known_hosts, releases, deploy_to):
    """A device that was enrolled and serves release one."""
    device = LoopbackDevice("one", tmp_path_factory.mktemp("device"), client_key)
    try:
        device.start()
        key = next(iter(offered(device.config()).values()))
        enrol(device.config(), known_hosts, key, releases.pin)
        result, said = deploy_to(device, releases.one, releases.pin)
        assert result.ok, (result, said)
        assert "golden prompts beside the running release" not in said
        yield device
    finally:
        device.close()


@pytest.fixture
def device(serving, releases):
    """That device, with release one alone; whatever a test did, that still serves afterwards."""
    one = releases.sha(releases.one)
    serving.available(one_fits(releases))
    yield serving
    if serving.sshd is None:
        serving.start()
    (serving.app / "previous").unlink(missing_ok=True)
    for folder in (serving.app / "releases").iterdir():
        if folder.name != one[:12]:
            shutil.rmtree(folder)
    for part in (serving.app / "incoming").iterdir():
        part.unlink()
    assert (serving.serves(), serving.current()) == (one, one[:12])
    journal = json.loads((serving.app / "fleet.json").read_bytes())
    assert (journal["good"], journal["trying"]) == (one[:12], None)


def one_fits(releases) -> int:
    """kB that one release needs while another one runs: enough for the check, not for both."""
    manifest = json.loads((releases.one / "manifest.json").read_bytes())
    plan = manifest["models"][manifest["default"]]["memory"]
    held = plan["total_bytes"] - plan["margin_bytes"]
    return (plan["total_bytes"] - held // 2) // 1024


@pytest.fixture
def short_pauses(monkeypatch):
    """Retries wait a twentieth of their time, a busy device a fiftieth."""
    monkeypatch.setattr(device_module, "FIRST_PAUSE_S", 0.05)
    monkeypatch.setattr(device_module, "WAIT_FOR_LOCK_S", 0.1)
    monkeypatch.setattr(remote_module, "WAIT_FOR_LOCK_S", 0.1)
