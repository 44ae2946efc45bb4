"""Shapes against the parameter counts that the models' own cards and files give."""

import json

import pytest

from configs.schema.model import GgufPackageModel, PretrainedModel, ScratchModel
from tasks.models.shapes import PUBLISHED, ModelShape, UnknownShapeError, shape_of

TOTALS = {  # tensors of each published safetensors file, a tied output layer once
    "Qwen2.5-0.5B": 494_032_768,
    "Qwen2.5-1.5B": 1_543_714_304,
    "Qwen2.5-3B": 3_085_938_688,
    "Qwen2.5-7B": 7_615_616_512,
    "Qwen3-0.6B": 596_049_920,
    "Qwen3-1.7B": 1_720_574_976,
    "Qwen3-4B": 4_022_468_096,
    "Qwen3-8B": 8_190_735_360,
    "SmolLM2-135M": 134_515_008,
}


@pytest.mark.parametrize("name", sorted(TOTALS))
def test_parameters_of_published_models(name: str) -> None:
    assert PUBLISHED[name].parameters == TOTALS[name]


def test_every_published_shape_is_checked() -> None:
    assert set(PUBLISHED) == set(TOTALS)


def test_adapter_and_cache_worked_out_by_hand() -> None:
    shape = PUBLISHED["Qwen2.5-0.5B"]
    # 24 layers, rank 16: queries 896 → 896, values 896 → 128
    assert shape.adapter_parameters(16, ("q_proj", "v_proj")) == 24 * 16 * (1792 + 1024)
    assert shape.adapter_parameters(16, ()) == 0
    # keys and values, 24 layers, 2 heads of 64, two bytes
    assert shape.cache_bytes_per_token() == 2 * 24 * 2 * 64 * 2


def test_a_tiny_model_counted_by_hand() -> None:
    shape = ModelShape(4, 1, 2, 1, 2, 8, 10, tied=False, qkv_bias=True, head_norm=True)
    # q 4·4, k and v 4·2 each, o 4·4, three of 4·8; biases 4+2+2; norms 4+4 and 2+2; ends 2·10·4 + 4
    assert shape.parameters == 16 + 8 + 8 + 16 + 96 + 8 + 12 + 84


@pytest.mark.parametrize(
    ("path", "hidden"),
    [("Qwen/Qwen2.5-0.5B-Instruct", 896), ("Qwen/Qwen3-4B", 2560), ("/models/Qwen3-8B-FP8", 4096)],
)
def test_published_ids_and_folders_are_known_by_name(path: str, hidden: int) -> None:
    assert shape_of(PretrainedModel(path=path)).hidden == hidden


def test_a_name_that_only_begins_alike_is_another_model() -> None:
    with pytest.raises(UnknownShapeError, match=r"model.path=Qwen/Qwen3-40B.*config.json"):
        shape_of(PretrainedModel(path="Qwen/Qwen3-40B"))
    with pytest.raises(UnknownShapeError, match=r"model\.file=other\.gguf"):
        shape_of(GgufPackageModel(file="other.gguf"))
    assert shape_of(GgufPackageModel()).hidden == 576


def test_a_folder_is_read(tmp_path) -> None:
    body = {
        "model_type": "qwen3", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 32, "intermediate_size": 96, "vocab_size": 300,
        "tie_word_embeddings": True,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(body))
    found = shape_of(PretrainedModel(path=str(tmp_path)))
    assert found == ModelShape(64, 2, 4, 2, 32, 96, 300, True, head_norm=True)
    (tmp_path / "config.json").write_text('{"hidden_size": 64}')
    with pytest.raises(UnknownShapeError, match="does not say the shape"):
        shape_of(PretrainedModel(path=str(tmp_path)))


def test_the_scratch_model_is_the_one_that_is_made() -> None:
    pytest.importorskip("transformers")
    from transformers import Qwen3Config, Qwen3ForCausalLM

    model = ScratchModel()
    made = Qwen3ForCausalLM(
        Qwen3Config(
            hidden_size=model.hidden_size, num_hidden_layers=model.layers,
            num_attention_heads=model.heads, num_key_value_heads=model.kv_heads,
            head_dim=model.hidden_size // model.heads, intermediate_size=model.ffn_size,
            vocab_size=model.vocab_size, tie_word_embeddings=True,
        )
    )  # fmt: skip
    assert shape_of(model).parameters == sum(p.numel() for p in made.parameters())
