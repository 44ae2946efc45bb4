"""`rl-pipeline deploy`, `devices` and `collect` against a real sshd; the books and MLflow after."""

import json
import os
import re
from pathlib import Path

import pytest
from conftest import CONFIG
from typer.testing import CliRunner

from configs.schema import PipelineConfig
from deployment.fleet.books import DeviceBooks
from deployment.fleet.enrol import fingerprint
from deployment.fleet.ssh import known_names
from flows.cli import app
from tasks.tracking.promotion_ledger import Release
from tests.flows.loopback_devices import write_field_log

pytestmark = pytest.mark.needs("sshd")


@pytest.fixture
def place(tmp_path, monkeypatch, device, known_hosts, releases):
    """A working folder with a file of devices; `run` is the command line."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PREFECT_API_URL", raising=False)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:1")  # nobody there, unless told

    class Place:
        runs = tmp_path / "runs"
        books = DeviceBooks(tmp_path / "runs")

        def devices(self, *entries, hosts=known_hosts):
            body = {"known_hosts": str(hosts), "devices": [e.model_dump() for e in entries]}
            (tmp_path / "devices.yaml").write_text(json.dumps(body))

        def run(self, *arguments):
            words = [str(a) for a in arguments]
            done = CliRunner().invoke(app, [*words, "--devices", "devices.yaml"])
            return done.exit_code, " ".join(done.output.split())

    made = Place()
    made.devices(device.config())
    return made


def _pins(releases):
    return ("--allowed-signers", releases.pin)


def test_deploy_again_drill_and_roll_back(place, device, releases, monkeypatch, tmp_path):
    device.available()
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    one, two = releases.sha(releases.one), releases.sha(releases.two)
    place.books.enter_serving("one", "agent", one)
    assert device.ask("34*7-52=?") == "186"

    code, said = place.run("deploy", releases.two, *_pins(releases))
    assert code == 0, said
    assert "golden prompts beside the running release" in said and "deployed" in said
    assert (device.current(), device.serves()) == (two[:12], two)
    assert os.path.basename(os.readlink(device.app / "previous")) == one[:12]
    assert list((device.app / "incoming").iterdir()) == []
    assert place.books.record("one")["release"] == two
    assert place.books.record("one")["bundle"] == str(releases.two)

    supervisor = (device.app / "run/supervisor.json").read_bytes()
    code, said = place.run("deploy", releases.two, "--json", *_pins(releases))
    assert (code, '"outcome": "unchanged"' in said, '"sent_bytes": 0' in said) == (0, True, True)
    assert (device.app / "run/supervisor.json").read_bytes() == supervisor

    code, said = place.run("devices", "drill", "one")
    assert code == 0, said
    assert "back where it was" in said and device.serves() == two
    code, said = place.run("devices", "rollback", "one")
    assert code == 0, said
    assert device.serves() == one
    assert os.path.basename(os.readlink(device.app / "previous")) == two[:12]

    rows = place.books.history().rows
    assert [(r["action"], r["release"], r["previous"], r["ok"]) for r in rows] == [
        ("deploy", two, one, True),
        ("deploy", two, two, True),
        ("drill", one, two, True),
        ("drill", two, one, True),
        ("rollback", one, two, True),
    ]
    assert place.books.record("one")["release"] == one
    _assert_in_mlflow(tmp_path, one, two)
    code, said = place.run("devices", "status")
    assert (code, "good" in said, one[:12] in said, two[:12] in said) == (0, True, True, True)


def _assert_in_mlflow(folder, one, two):
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=f"sqlite:///{folder}/mlflow.db")
    experiment = client.get_experiment_by_name("rl-pipeline-devices")
    runs = client.search_runs([experiment.experiment_id], order_by=["attributes.start_time"])
    told = [(r.data.tags["action"], r.data.tags["release"], r.data.tags["result"]) for r in runs]
    assert told == [
        ("deploy", two, "deployed"),
        ("deploy", two, "unchanged"),
        ("drill", one, "deployed"),
        ("drill", two, "deployed"),
        ("rollback", one, "deployed"),
    ]
    assert {r.info.status for r in runs} == {"FINISHED"}
    assert {r.data.tags["device"] for r in runs} == {"one"}
    path = Path(client.download_artifacts(runs[0].info.run_id, "one.json", str(folder)))
    report = json.loads(path.read_bytes())
    assert report["golden"].startswith("2 golden prompts") and report["tokens_per_s"] > 1
    assert runs[0].data.metrics["tokens_per_s"] == report["tokens_per_s"]


def test_a_store_that_is_away_is_said_and_uploaded_later(place, device, releases, tmp_path):
    """With two devices the second does not answer: the wave after the canary fails."""
    place.devices(
        device.config(), device.config(name="two", port=1), device.config(name="three", port=2)
    )
    code, said = place.run("deploy", releases.one, *_pins(releases))
    assert code == 1
    assert "not enrolled" not in said and "unchanged" in said and "failed" in said
    assert "MLflow did not take" in said and "rl-pipeline upload" in said
    (folder,) = (place.runs / "devices/deployments").iterdir()
    reports = sorted(p.name for p in folder.glob("*.json"))
    assert reports == ["one.json", "three.json", "two.json"]
    uri = f"sqlite:///{tmp_path}/later.db"
    done = CliRunner().invoke(app, ["upload", str(folder), "--uri", uri])
    assert (done.exit_code, "operations uploaded" in done.output) == (0, True), done.output
    alerts = (place.runs / "alerts.jsonl").read_text()
    assert "failed on 2 devices" in alerts


def test_dry_run_touches_nothing(place, device, releases, tmp_path):
    before = sorted(str(p) for p in device.root.rglob("*"))
    two = device.config(name="two", port=1)
    place.devices(device.config(), two)
    code, said = place.run("deploy", releases.two, "--dry-run", "--only", "one", *_pins(releases))
    assert (code, "canary one" in said, "Nothing was touched" in said) == (0, True, True), said
    code, said = place.run("deploy", releases.two, "--dry-run", *_pins(releases))
    assert (code, "not enrolled" in said) == (1, True), said
    assert sorted(str(p) for p in device.root.rglob("*")) == before
    assert not place.runs.exists()


@pytest.mark.parametrize(
    ("what", "options", "match"),
    [
        ("none.tar.gz", (), "nothing was packaged|no run, version or bundle"),
        ("champion", (), "nothing was packaged"),
        ("foreign", (), "not a good signature"),
        ("two", ("--only", "tow"), "no such device; there are one"),
        ("two", ("--allowed-signers", "none"), "no pinned keys at none"),
        ("two", ("--config", "nonsense"), "no such file or profile"),
    ],
)
def test_bad_input_never_reaches_a_device(place, device, releases, what, options, match):
    device.stop()
    bundle = getattr(releases, what, what)
    pins = () if "--allowed-signers" in options else _pins(releases)
    code, said = place.run("deploy", bundle, *options, *pins)
    assert code == 2, said
    assert re.search(match, said), said
    assert "Traceback" not in said
    assert place.books.history().rows == ()


def test_status_says_what_is_wrong(place, device, releases):
    code, said = place.run("devices", "status")
    assert (code, "good" in said) == (0, True), said
    place.books.enter_serving("one", "agent", "f" * 64)
    place.devices(device.config(), device.config(name="gone", port=1))
    code, said = place.run("devices", "status", "--json")
    assert code == 1
    one, gone = json.loads(said)
    assert one["problems"] == [
        f"serves {releases.sha(releases.one)[:12]}, the books say ffffffffffff"
    ]
    assert "nothing listens" in gone["problems"][0] and gone["serves"] is None
    journal = json.loads((device.app / "fleet.json").read_bytes())
    (device.app / "fleet.json").write_text(json.dumps({**journal, "trying": "0" * 12}))
    code, said = place.run("devices", "status", "--only", "one")
    (device.app / "fleet.json").write_text(json.dumps(journal))
    assert (code, "was killed half-way" in said) == (1, True)


def test_enrol_wants_a_fingerprint_from_the_device_itself(place, device, releases, tmp_path):
    place.devices(device.config(), hosts=tmp_path / "mine")
    code, said = place.run("devices", "enrol", "one", *_pins(releases))
    assert code == 2 and "give --fingerprint, read on the device itself" in said
    assert not (tmp_path / "mine").exists()
    wrong = ("--fingerprint", "SHA256:" + "A" * 43)
    code, said = place.run("devices", "enrol", "one", *wrong, *_pins(releases))
    assert (code, "whoever answers" in said) == (1, True)
    public = device.host_key.with_suffix(".pub").read_text()
    right = ("--fingerprint", fingerprint(public))
    code, said = place.run("devices", "enrol", "one", *right, *_pins(releases))
    assert (code, "pinned now" in said, "was pinned already" in said) == (0, True, True), said
    assert known_names(tmp_path / "mine") == {"one": (" ".join(public.split()[:2]),)}


def test_rollback_needs_somewhere_to_go(place, device):
    code, said = place.run("devices", "rollback")
    assert (code, "name the devices" in said) == (2, True)
    code, said = place.run("devices", "rollback", "one")
    assert (code, "has no release before" in said) == (1, True)
    code, said = place.run("devices", "drill", "one")
    assert (code, "has no release before" in said) == (1, True)
    assert [r["ok"] for r in place.books.history().rows] == [False, False]


def test_collect_and_accept(place, device, tmp_path):
    rows = [{"messages": [{"role": "user", "content": "6*7=?"}], "opted_in": True, "answer": "1"}]
    rows.append({"messages": [{"role": "user", "content": "why?"}], "opted_in": True})
    folder = write_field_log(device.root, rows)
    try:
        code, said = place.run("collect", "--into", "drop", "--runs", place.runs)
    finally:
        for path in folder.iterdir():
            path.unlink()
    assert (code, "1 rows can train" in said, "1 rows need a person" in said) == (0, True, True)
    (file,) = (tmp_path / "drop").iterdir()
    assert json.loads(file.read_text())["answer"] == "42"
    (review,) = (place.runs / "field").glob("review-*.jsonl")
    code, said = place.run("collect", "--accept", review, "--into", "drop")
    assert (code, "no row" in said) == (1, True)


def test_champion_that_cannot_be_deployed_is_told_and_ends_no_run(place, device, releases):
    """After a promotion nothing may fail the run any more; people are alerted instead."""
    from flows.devices.flow import deploy_champion

    config = PipelineConfig(deploy=CONFIG.model_copy(update={"devices": "devices.yaml"}))
    release = Release(
        model="calculator",
        profile="calculator",
        run_id="r",
        bundle_sha256=releases.sha(releases.two),
        bundle=str(releases.two),
    )
    said = deploy_champion(release, config, place.runs)
    assert "was not deployed" in said and "no pinned keys" in said
    (place.runs / "keys").mkdir(parents=True)
    (place.runs / "keys/allowed_signers").write_bytes(releases.pin.read_bytes())
    place.devices(device.config(port=1))
    said = deploy_champion(release, config, place.runs)
    assert "failed" in said and "nothing listens" in said
    alerts = (place.runs / "alerts.jsonl").read_text()
    assert "promoted but not deployed" in alerts and "failed on 1 devices" in alerts
