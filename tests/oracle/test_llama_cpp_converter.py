"""The project's converter against llama.cpp's own: every tensor and every key."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from gguf import GGUFReader

sys.path.insert(0, str(Path(__file__).parents[1] / "unit" / "quantize"))

from tiny_models import make_model, make_tokenizer, save

from quantize.convert import convert

SOURCE = os.environ.get("LLAMA_CPP_SOURCE", "")
pytestmark = [
    pytest.mark.oracle,
    pytest.mark.skipif(not SOURCE, reason="LLAMA_CPP_SOURCE is not set; run `make oracle`"),
]

DESCRIPTIVE = ("general.name", "general.size_label", "general.basename", "general.finetune")
"""Made from the folder's name and the parameter count; nothing computes with them."""
OURS_ALONE = {
    "attention.key_length",
    "attention.value_length",  # theirs only where config.json holds head_dim
    "tokenizer.ggml.bos_token_id",  # a missing one would be read as 11
    "tokenizer.ggml.add_bos_token",
    "tokenizer.ggml.add_eos_token",
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
MODELS = {
    "qwen2": ("qwen2", {}),
    "qwen2 tied": ("qwen2", {"tie_word_embeddings": True}),
    "qwen2 small rows": ("qwen2", {"hidden_size": 96, "intermediate_size": 160}),
    "qwen2 yarn": ("qwen2", {"rope": YARN}),
    "qwen3": ("qwen3", {}),
    "qwen3 tied": ("qwen3", {"tie_word_embeddings": True, "head_dim": 128}),
    "llama": ("llama", {"bos_token_id": 1}),
    "llama biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama linear": ("llama", {"rope": {"rope_type": "linear", "factor": 4.0}}),
    "llama llama3": ("llama", {"rope": LLAMA3, "tie_word_embeddings": True}),
}


def theirs(folder: Path, out: Path, out_type: str) -> Path:
    runner = Path(__file__).with_name("run_converter.py")
    done = subprocess.run(
        [sys.executable, str(runner), SOURCE, str(folder), str(out), out_type, "qwen2"],
        capture_output=True,
        text=True,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return out


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("out_type", ["f16", "f32"])
def test_tensors_and_keys_are_llama_cpps(name, out_type, tmp_path):
    arch, settings = MODELS[name]
    folder = save(make_model(arch, **settings), make_tokenizer(), tmp_path / "model")
    mine = GGUFReader(convert(folder, tmp_path / "mine.gguf", out_type).path)
    other = GGUFReader(theirs(folder, tmp_path / "theirs.gguf", out_type))

    ours, expected = ({t.name: t for t in r.tensors} for r in (mine, other))
    assert set(ours) == set(expected)
    for tensor_name, tensor in expected.items():
        assert ours[tensor_name].tensor_type == tensor.tensor_type, tensor_name
        assert list(ours[tensor_name].shape) == list(tensor.shape), tensor_name
        # their frequency factors are computed in float32, ours in float64; weights are copied
        tolerance = 1e-6 if tensor_name == "rope_freqs.weight" else 0.0
        np.testing.assert_allclose(
            ours[tensor_name].data, tensor.data, rtol=tolerance, atol=0, err_msg=tensor_name
        )

    my_keys, their_keys = (
        {n: (f.types[-1], f.contents()) for n, f in r.fields.items() if not n.startswith("GGUF.")}
        for r in (mine, other)
    )
    for key, value in their_keys.items():
        if not key.startswith(DESCRIPTIVE):
            assert my_keys[key] == value, key
    extra = {key.removeprefix(f"{arch}.") for key in set(my_keys) - set(their_keys)}
    assert extra <= OURS_ALONE
