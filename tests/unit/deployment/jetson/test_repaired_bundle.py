"""A repaired quantisation keeps its true name into the bundle."""

import json
import shutil

import pytest

from configs.schema.package import PackageConfig
from deployment.jetson import stage
from deployment.jetson.on_device import verify
from deployment.jetson.stage import choose_quantisations
from tasks.artifacts import write_json
from tasks.artifacts.progress import Reporter

SHIPS, REJECTED = {"ships": True}, {"ships": False, "why": "rejected: too different"}
REPAIRED = {
    "size_bytes": 10,
    "bits_per_weight": 3.1,
    "kld_mean": 1e-5,
    "top1": 0.999,
    "accuracy": 0.79,
    "ships": True,
    "why": "ships: as well as any",
    "repaired": {
        "of": "IQ2_M",
        "tensors": {"blk.0.attn_k.weight": {"from": "IQ2_S", "to": "Q4_K"}},
    },
}


@pytest.mark.parametrize(
    ("shipping", "prefer", "default"),
    [
        (("IQ2_M+3", "Q8_0"), ("IQ2_M", "Q8_0"), "IQ2_M+3"),
        (("IQ2_M+3", "Q8_0"), ("Q8_0", "IQ2_M"), "Q8_0"),
        (("IQ2_M+3", "Q8_0"), ("IQ2_M+3",), "IQ2_M+3"),
        (("IQ2_M", "IQ2_M+3"), ("IQ2_M",), "IQ2_M"),
        (("Q4_K_M+1",), ("Q8_0", "Q4_K_M"), "Q4_K_M+1"),
    ],
)
def test_a_preferred_type_takes_its_repaired_file(shipping, prefer, default):
    parity = dict.fromkeys(shipping, SHIPS) | {"F16": SHIPS, "IQ2_S": REJECTED}
    assert choose_quantisations(parity, prefer) == (default, tuple(sorted(shipping)))


def test_the_bundle_the_card_and_the_golden_prompts_say_its_name(stages, facts, tmp_path):
    quantised = shutil.copytree(stages.quantised, tmp_path / "quantised")
    (quantised / "Q8_0.gguf").rename(quantised / "IQ2_M+1.gguf")
    parity = {"F16": {"ships": True, "why": ""}, "IQ2_M": REJECTED, "IQ2_M+1": REPAIRED}
    write_json(quantised / "parity.json", {"quant": parity})
    moved = stages.records["quantize"].model_copy(update={"uri": str(quantised)})
    out = tmp_path / "out"
    record = stage.run(
        PackageConfig(context_length=256, prefer=("IQ2_M",)),
        {**stages.records, "quantize": moved},
        out,
        Reporter(out),
        facts=facts,
    )
    bundle = out / "bundle"
    manifest = json.loads((bundle / "manifest.json").read_text())
    assert record.meta["default"] == manifest["default"] == "IQ2_M+1"
    assert manifest["models"]["IQ2_M+1"]["file"] == "models/IQ2_M+1.gguf"
    assert (bundle / "models/IQ2_M+1.gguf").is_file() and "models/IQ2_M+1.gguf" in manifest["files"]
    assert json.loads((bundle / "golden_prompts.json").read_text())["quant"] == "IQ2_M+1"
    card = (bundle / "model_card.md").read_text()
    assert "| Default quantisation | IQ2_M+1 |" in card
    assert "ships: IQ2_M with `blk.0.attn_k.weight` as Q4_K" in card
    bom = json.loads((bundle / "sbom.cdx.json").read_text())
    assert "model:IQ2_M+1" in [c["bom-ref"] for c in bom["components"]]
    verify.check_files(bundle, manifest["files"])
