import json

import pytest

from deployment.jetson.device import find_device
from deployment.jetson.edge_plan import find_subject, make_plan, subject_of_bundle
from deployment.jetson.errors import MissingInputError, UnknownModelError
from deployment.jetson.memory_plan import Serving
from deployment.jetson.on_device.verify import BundleError

ORIN = find_device("orin-nano-8gb")


def _plan(name, context=4096, **options):
    return make_plan(find_subject(name), Serving(context), ORIN, **options)


def test_four_billion_fits_and_eight_does_not():
    assert _plan("qwen3-4b").chosen.fits
    big = _plan("qwen3-8b")
    assert not big.chosen.fits
    assert [c.type for c in big.choices if c.fits] == ["IQ2_M"]
    assert big.remedies and not _plan("qwen3-4b").remedies


def test_headless_and_a_reading_of_the_device_change_what_is_available():
    desktop, bare = _plan("qwen2.5-7b"), _plan("qwen2.5-7b", headless=True)
    assert bare.available_bytes - desktop.available_bytes == 865_000_000
    assert not desktop.chosen.fits and bare.chosen.fits
    read = _plan("qwen2.5-7b", available=desktop.chosen.memory.total_bytes)
    assert read.chosen.fits
    short = _plan("qwen2.5-7b", available=desktop.chosen.memory.total_bytes - 1)
    assert not short.chosen.fits
    assert not any("headless" in r.change for r in short.remedies)  # the reading says it all


def test_bundle_is_planned_from_its_files(package):
    subject = subject_of_bundle(package.bundle, package.manifest)
    plan = make_plan(subject, Serving(256), ORIN)
    measured = {c.type for c in plan.choices if c.measured}
    assert (plan.chosen.type, measured) == ("Q8_0", {"Q8_0"})
    assert plan.chosen.file.file_bytes == (package.bundle / "models/Q8_0.gguf").stat().st_size
    assert json.loads(json.dumps(plan.as_json()))["fits"] is True


def test_manifest_that_points_outside_the_bundle(package):
    models = {"Q8_0": {"file": "../x.gguf"}}
    with pytest.raises(BundleError, match="unsafe path"):
        subject_of_bundle(package.bundle, {**package.manifest, "models": models})


def test_what_a_plan_is_made_for(stages, tmp_path):
    gguf = find_subject(str(stages.quantised / "Q8_0.gguf"))
    assert (gguf.default, list(gguf.files)) == ("Q8_0", ["Q8_0"])
    assert find_subject(str(stages.policy)).shape.hidden == 64
    assert find_subject(str(stages.policy / "config.json")).shape.hidden == 64
    with pytest.raises(MissingInputError, match="holds no bundle"):
        find_subject(str(tmp_path))
    with pytest.raises(UnknownModelError, match="does not exist"):
        find_subject("/no/such/model.gguf")


def test_unknown_type_is_named():
    with pytest.raises(UnknownModelError, match="--type Q9: choose one of F16"):
        _plan("qwen3-4b", wanted="Q9")
