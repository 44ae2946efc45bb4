import dataclasses
import json

import pytest
from random_gguf import SHAPES, shape, write_gguf

from deployment.jetson.errors import MissingInputError, UnknownModelError
from deployment.jetson.file_size import predict_file
from deployment.jetson.model_shape import (
    known_names,
    known_shape,
    read_config_shape,
    read_shape,
    shape_of,
)


@pytest.mark.parametrize("name", ["llama tied, rows off 32", "qwen2 untied, GQA 7, rows off 256"])
def test_shape_of_a_file_is_what_it_was_written_with(name, tmp_path):
    found = read_shape(write_gguf(tmp_path / "x.gguf", shape(name)))
    assert found.header_bytes > SHAPES[name][7] * 12
    assert dataclasses.replace(found, header_bytes=0) == shape(name)


def test_policy_folder_gives_the_shape_of_its_gguf(stages):
    """Header included: its size is worked out from the tokenizer, before any conversion."""
    planned = read_config_shape(stages.policy)
    converted = read_shape(stages.quantised / "Q8_0.gguf")
    assert dataclasses.replace(planned, header_bytes=0) == dataclasses.replace(
        converted, header_bytes=0
    )
    assert planned.header_bytes == pytest.approx(converted.header_bytes, rel=0.1)
    size = (stages.quantised / "Q8_0.gguf").stat().st_size
    assert predict_file(planned, "Q8_0").file_bytes == pytest.approx(size, rel=0.02)


def test_config_json_alone(stages, tmp_path):
    config = json.loads((stages.policy / "config.json").read_bytes())
    del config["head_dim"], config["num_key_value_heads"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    found = read_config_shape(tmp_path / "config.json")
    assert (found.kv_heads, found.key_length) == (found.heads, found.hidden // found.heads)
    assert found.header_bytes == 39 * found.vocabulary


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("", "cannot read"),
        ("[]", "cannot read"),
        ('{"architectures": ["Qwen3ForCausalLM"]}', "num_attention_heads"),
        (
            '{"architectures": ["Qwen3ForCausalLM"], "num_attention_heads": "x", "hidden_size": 1}',
            "cannot read",
        ),
    ],
)
def test_config_that_says_too_little(text, match, tmp_path):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(MissingInputError, match=match):
        read_config_shape(tmp_path)


def test_other_architectures_are_refused(tmp_path):
    (tmp_path / "config.json").write_text('{"architectures": ["MixtralForCausalLM"]}')
    with pytest.raises(UnknownModelError, match="Mixtral"):
        read_config_shape(tmp_path)
    with pytest.raises(UnknownModelError, match="'falcon'"):
        shape_of({"general.architecture": "falcon"})


@pytest.mark.parametrize(
    "name", ["qwen3-8b", "Qwen/Qwen2.5-0.5B-Instruct", "meta-llama/Llama-3.1-8B"]
)
def test_models_by_their_usual_name(name):
    found = known_shape(name)
    assert found.heads % found.kv_heads == 0
    assert found.vocabulary > 100_000


def test_unknown_name_lists_the_known_ones():
    with pytest.raises(UnknownModelError, match="qwen3-4b"):
        known_shape("gpt-5")
    assert len(known_names()) >= 10


def test_defaults_where_a_file_names_no_key_length_or_kv_heads():
    metadata = {
        "general.architecture": "llama",
        "llama.block_count": 4,
        "llama.embedding_length": 64,
        "llama.attention.head_count": 8,
        "llama.feed_forward_length": 128,
        "llama.context_length": 512,
    }
    found = shape_of(metadata, vocabulary=100, tied=True, header_bytes=0)
    assert (found.kv_heads, found.key_length, found.value_length) == (8, 8, 8)


@pytest.mark.parametrize("value", [None, 0, -1, "8", 1.5])
def test_missing_or_odd_key_is_named(value):
    metadata = {"general.architecture": "llama", "llama.attention.head_count": value}
    metadata = {key: v for key, v in metadata.items() if v is not None}
    with pytest.raises(MissingInputError, match=r"llama\.attention\.head_count="):
        shape_of(metadata)


@pytest.mark.parametrize("content", [b"", b"GGUF", b"not a model at all, but long enough"])
def test_file_that_is_no_gguf(tmp_path, content):
    (tmp_path / "x.gguf").write_bytes(content)
    with pytest.raises(MissingInputError, match="quantise again"):
        read_shape(tmp_path / "x.gguf")
