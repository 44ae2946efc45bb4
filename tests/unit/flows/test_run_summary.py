"""The summary's parts, on what stages leave behind: whole, partial and damaged."""

import json
import os

import pytest

from flows.run_lock import RunLock, RunLockedError
from flows.summary import bundle, cost, gx_seconds, heldout, link_latest, quant
from tasks.artifacts import ArtifactRecord

LEDGER = {
    "earlier_wall_s": 1800.0,
    "effective_samples": 100.0,
    "samples": {"trained": 60, "dropped": 20, "filtered": 20},
    "seconds": {"learner": {"train": 1800.0}, "rollout-0": {"rollout": 1000.0, "idle": 800.0}},
    "usd_per_device_hour": 77.0,
}


def test_cost_is_taken_at_the_price_of_now_and_splits_by_use():
    shown = cost(LEDGER, 2.0)
    assert shown["device_s"] == 3600.0
    assert shown["usd"] == 2.0
    assert shown["usd_per_effective_sample"] == 0.02
    assert shown["seconds_by_use"] == {
        "train": 1800.0,
        "rollout": pytest.approx(600.0),
        "idle": 800.0,
        "dropped": pytest.approx(200.0),
        "filtered": pytest.approx(200.0),
    }


@pytest.mark.parametrize("ledger", [{}, {"seconds": 3}, {**LEDGER, "samples": {"lost": 1}}])
def test_cost_without_a_ledger_is_unknown_not_nought(ledger):
    shown = cost(ledger, 2.0)
    assert shown["usd"] is None
    assert shown["usd_per_effective_sample"] is None
    assert shown["usd_per_device_hour"] == 2.0


def test_heldout_keeps_the_order_of_bands_and_drops_what_is_not_asked():
    bands = [
        {"band": b, "accuracy": a, "n": 2, "ci95": [0, 1]}
        for b, a in (("easy", 1.0), ("hard", 0.5))
    ]
    shown = heldout({"sft": {"accuracy": 0.1, "n": 4, "by_band": bands}, "gate": {"passed": False}})
    assert shown["sft"]["by_band"] == [
        {"band": "easy", "accuracy": 1.0, "n": 2},
        {"band": "hard", "accuracy": 0.5, "n": 2},
    ]
    assert shown["rl"] == {"accuracy": None, "n": None, "by_band": None}
    assert shown["delta"] == {"value": None, "ci95": None}
    assert shown["promoted"] is False


@pytest.mark.parametrize("damaged", [{}, {"sft": 3, "rl": [], "delta": "x", "gate": None}])
def test_heldout_of_nothing_or_nonsense_is_all_unknown(damaged):
    shown = heldout(damaged)
    assert shown["sft"] == shown["rl"] == {"accuracy": None, "n": None, "by_band": None}
    assert shown["promoted"] is None


def test_quant_has_exactly_the_stable_keys_and_the_middle_of_the_kl():
    parity = {
        "quant": {
            "F16": {"kld_mean": {"value": 1e-6, "ci95": [0, 1]}, "ships": True, "tensor_types": {}},
            "IQ2_M": {"kld_mean": 0.5, "ships": False, "why": "rejected: top-1 0.7"},
        },
        "attribution": "…",
    }
    shown = quant(parity)
    assert set(shown) == {"F16", "IQ2_M"}
    assert shown["F16"]["kld_mean"] == 1e-6
    assert shown["IQ2_M"] == {
        "size_bytes": None,
        "bits_per_weight": None,
        "kld_mean": 0.5,
        "top1": None,
        "ppl_ratio": None,
        "accuracy": None,
        "accuracy_delta_ci95": None,
        "ships": False,
        "why": "rejected: top-1 0.7",
    }
    assert quant({}) == {}


def test_bundle_says_unknown_where_signing_was_not_recorded():
    assert bundle(None) == {"path": None, "sha256": None, "signed": None}
    record = ArtifactRecord(kind="bundle", uri="runs/store/package/k", sha256="s")
    assert bundle(record) == {"path": "runs/store/package/k/bundle", "sha256": "s", "signed": None}


def test_gx_time_is_import_plus_every_validation_or_unknown(tmp_path):
    record = ArtifactRecord(kind="dataset", uri=str(tmp_path), sha256="s")
    assert gx_seconds(None) is None
    assert gx_seconds(record) is None
    gate = {"verdicts": [{"seconds": 0.5}, {"seconds": 0.25}], "as_read": [{"seconds": 1.0}]}
    (tmp_path / "gate.json").write_text(json.dumps(gate))
    assert gx_seconds(record) is None
    line = {"step": 0, "time_s": 1.0, "values": {"gx/import_s": 2.0}}
    (tmp_path / "metrics.jsonl").write_text(json.dumps(line) + "\n")
    assert gx_seconds(record) == 3.75


def test_latest_moves_in_one_step_and_leaves_no_litter(tmp_path):
    for run in ("a", "b"):
        (tmp_path / run).mkdir()
        link_latest(tmp_path, run)
        assert os.readlink(tmp_path / "latest") == run
    assert {p.name for p in tmp_path.iterdir()} == {"a", "b", "latest"}


def test_a_held_lock_names_its_owner_and_is_free_after(tmp_path):
    with (
        RunLock(tmp_path, "run-1"),
        pytest.raises(RunLockedError, match=f"run run-1 \\(process {os.getpid()}\\)"),
        RunLock(tmp_path, "run-2"),
    ):
        pass
    with RunLock(tmp_path, "run-3") as lock:
        assert lock.leftovers_ended == 0
    assert (tmp_path / "run.lock").read_text() == ""


def test_a_lock_file_with_nonsense_in_it_is_taken(tmp_path):
    (tmp_path / "run.lock").write_text("[1, 2")
    with RunLock(tmp_path, "run-1"):
        assert json.loads((tmp_path / "run.lock").read_text())["run_id"] == "run-1"
