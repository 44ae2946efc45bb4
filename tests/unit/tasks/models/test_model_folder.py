"""Saved models: one hash for the same tensors, whole or not at all."""

import json
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from configs.schema.model import PretrainedModel, ScratchModel
from configs.schema.training import Lora
from tasks.models.base import base_model
from tasks.models.errors import (
    DamagedModelError,
    UnknownArchitectureError,
    VocabularyError,
    WeightsMismatchError,
)
from tasks.models.load import (
    ModelNotFoundError,
    check_vocabulary,
    hash_model,
    load_model,
    load_tokenizer,
    save_model,
)
from tasks.models.merge import merged_tensors
from tasks.models.scratch import build_model, train_tokenizer
from tasks.models.trainable import attach, load_trainable, trainable_tensors

IDS = torch.arange(3, 19)[None]


@torch.no_grad()
def logits(model: torch.nn.Module) -> torch.Tensor:
    return model(input_ids=IDS).logits


def test_a_saved_model_comes_back_bit_for_bit(tiny_model, tiny_tokenizer, tmp_path):
    model = tiny_model()
    sha256 = save_model(model, tiny_tokenizer, tmp_path / "m")
    again = load_model(tmp_path / "m")
    assert hash_model(tmp_path / "m") == sha256
    assert torch.equal(logits(model), logits(again))
    assert again.lm_head.weight.data_ptr() == again.model.embed_tokens.weight.data_ptr()
    assert load_tokenizer(tmp_path / "m").encode("3+4=?") == tiny_tokenizer.encode("3+4=?")
    assert save_model(again, tiny_tokenizer, tmp_path / "n") == sha256
    assert not list(tmp_path.glob(".*"))


def test_saving_over_an_old_folder_leaves_nothing_of_it(tiny_model, tiny_tokenizer, tmp_path):
    folder = tmp_path / "m"
    folder.mkdir()
    (folder / "old.bin").write_text("old")
    leftover = tmp_path / ".m.partial"
    leftover.mkdir()
    (leftover / "half.bin").write_text("half")
    save_model(tiny_model(), tiny_tokenizer, folder)
    assert not (folder / "old.bin").exists() and not (folder / "half.bin").exists()


def test_the_hash_sees_one_changed_weight(tiny_model, tiny_tokenizer, tmp_path):
    model = tiny_model()
    first = save_model(model, tiny_tokenizer, tmp_path / "m")
    with torch.no_grad():
        model.model.norm.weight[0] += 1e-6
    assert save_model(model, tiny_tokenizer, tmp_path / "m") != first


def test_merged_adapters_answer_as_adapters_do(tiny_model, tiny_tokenizer, tmp_path):
    lora = Lora(r=4, alpha=8, targets=("q_proj", "v_proj", "o_proj", "down_proj"))
    model = attach(tiny_model(), lora, seed=0).eval()
    plain = logits(model)
    load_trainable(
        model, {n: torch.randn_like(t) * 0.2 for n, t in trainable_tensors(model).items()}
    )
    adapted = logits(model)
    base = model.get_base_model()
    save_model(base, tiny_tokenizer, tmp_path / "m", tensors=merged_tensors(model))
    merged = load_model(tmp_path / "m")
    assert (adapted - plain).abs().max() > 0.1
    assert (logits(merged) - adapted).abs().max() <= 1e-4
    assert torch.equal(logits(model), adapted)  # merging changed nothing in the model
    assert not any("lora" in n or "base_layer" in n for n in merged.state_dict())


def test_scratch_models_are_the_same_for_one_seed(tiny_tokenizer):
    config = ScratchModel(hidden_size=32, layers=1, heads=2, kv_heads=1, ffn_size=32)
    state = torch.random.get_rng_state()
    models = [build_model(config, tiny_tokenizer, s) for s in (1, 1, 2)]
    assert torch.equal(torch.random.get_rng_state(), state)
    one, two, other = (m.model.embed_tokens.weight for m in models)
    assert torch.equal(one, two) and not torch.equal(one, other)


def test_scratch_tokenizer_knows_every_byte_and_keeps_digits_single():
    tokenizer = train_tokenizer(["12345678 12345678"] * 9, 320)
    text = "".join(chr(c) for c in (0x20, 0x41, 0xE9, 0x4E2D, 0x1F600, 0x2028, 0x0, 0x301))
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert len(tokenizer.encode("12345678")) == 8
    assert [tokenizer.decode([i]) for i in (0, 1, 2)] == ["<|pad|>", "<|im_start|>", "<|im_end|>"]


def test_a17_more_tokens_than_rows_is_an_error_that_names_them(tiny_model, tiny_tokenizer):
    model = tiny_model()
    check_vocabulary(model, tiny_tokenizer)
    grown = train_tokenizer(["abc"], 300)
    rows = model.get_input_embeddings().weight.shape[0]
    grown.add_tokens([f"<|extra_{i}|>" for i in range(rows - len(grown) + 2)])
    with pytest.raises(VocabularyError, match=rf"{rows + 2} tokens.*{rows} rows.*<\|extra_"):
        check_vocabulary(model, grown)


def test_a_folder_or_name_without_a_model_is_an_error_before_any_network(tmp_path):
    with pytest.raises(ModelNotFoundError, match=r"no config\.json"):
        load_model(tmp_path)
    for path in (tmp_path / "missing", "./missing", "one/two/three", "alone"):
        with pytest.raises(ModelNotFoundError, match="is no folder"):
            load_model(path)


def test_an_unsupported_architecture_is_named(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["MambaForCausalLM"]}))
    with pytest.raises(UnknownArchitectureError, match="MambaForCausalLM"):
        load_model(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({}))
    with pytest.raises(UnknownArchitectureError, match="none"):
        load_model(tmp_path)


def change_config(folder, **keys):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | keys))


def cut(name):
    return lambda folder: (folder / name).write_bytes((folder / name).read_bytes()[:300])


DAMAGE = {
    "weights cut off": cut("model.safetensors"),
    "no weights": lambda folder: (folder / "model.safetensors").unlink(),
    "config cut off": cut("config.json"),
    "config a list": lambda folder: (folder / "config.json").write_text("[1]"),
    "config of a wider model": lambda folder: change_config(folder, hidden_size=64),
    "config of a larger vocabulary": lambda folder: change_config(folder, vocab_size=400),
    "config of a deeper model": lambda folder: change_config(folder, num_hidden_layers=3),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_folder_is_named_with_what_to_do(tiny_model, tiny_tokenizer, tmp_path, damage):
    folder = tmp_path / "model"
    save_model(tiny_model(), tiny_tokenizer, folder)
    DAMAGE[damage](folder)
    with pytest.raises(DamagedModelError, match=f"(?s){folder}.*copy the folder again"):
        load_model(folder)


@pytest.mark.parametrize("text", [None, "", "{", "[]"])
def test_a_damaged_tokenizer_is_named(tiny_model, tiny_tokenizer, tmp_path, text):
    folder = tmp_path / "model"
    save_model(tiny_model(), tiny_tokenizer, folder)
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer_config.json").unlink()
    if text is not None:
        (folder / "tokenizer.json").write_text(text)
    with pytest.raises(DamagedModelError, match=f"{folder}.*tokenizer.json.*copy the folder"):
        load_tokenizer(folder)


@pytest.mark.parametrize("left", [None, 0, 7, 300])
def test_damaged_weights_have_no_hash(tiny_model, tiny_tokenizer, tmp_path, left):
    folder = tmp_path / "model"
    save_model(tiny_model(), tiny_tokenizer, folder)
    file = folder / "model.safetensors"
    whole = file.read_bytes()
    file.unlink()
    if left is not None:
        file.write_bytes(whole[:left])
    with pytest.raises(WeightsMismatchError, match=f"{file} is not a whole.*copy the folder again"):
        hash_model(folder)


def test_a_pretrained_folder_is_a_base_model(tiny_tokenizer, tmp_path):
    sizes = {
        "vocab_size": 320, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1,
        "num_attention_heads": 2, "num_key_value_heads": 1,
    }  # fmt: skip
    model = LlamaForCausalLM(LlamaConfig(**sizes))
    sha256 = save_model(model, tiny_tokenizer, tmp_path / "m")
    config = PretrainedModel(path=str(tmp_path / "m"))
    loaded, tokenizer = base_model(config, [], Path("unused"), dtype="float32", seed=0)
    assert type(loaded).__name__ == "LlamaForCausalLM" and len(tokenizer) == len(tiny_tokenizer)
    assert save_model(loaded, tokenizer, tmp_path / "n") == sha256  # an untied head is kept
