"""Settings of the engines: what contradicts itself is refused by key."""

import pytest
from pydantic import TypeAdapter, ValidationError

from configs.schema.rl import RLConfig
from configs.schema.rl_engines import Engine, VllmEngineConfig


def test_the_type_chooses_the_engine():
    read = TypeAdapter(Engine).validate_python
    assert read({"type": "transformers"}).on_publish == "carry"
    vllm = read({"type": "vllm", "on_publish": "finish", "kv_cache_gib": 0.5})
    assert isinstance(vllm, VllmEngineConfig) and vllm.kv_cache_gib == 0.5
    with pytest.raises(ValidationError, match="tensor_parallel_size"):
        read({"type": "transformers", "tensor_parallel_size": 2})


def test_colocated_needs_one_process():
    engine = {"type": "vllm", "colocated": True}
    inline = {"staleness_limit": 0, "runtime": {"type": "inline"}}
    assert RLConfig.model_validate(inline | {"engine": engine}).engine.colocated
    with pytest.raises(ValidationError, match=r"colocated=true with rl\.runtime\.type=ray"):
        RLConfig.model_validate({"engine": engine, "runtime": {"type": "ray"}})


@pytest.mark.parametrize("wrong", [{"grow_below": 0.8}, {"halve_at": 0.7}, {"back_off_at": 0.95}])
def test_concurrency_bounds_rise(wrong):
    with pytest.raises(ValidationError, match="must rise in this order"):
        VllmEngineConfig.model_validate({"type": "vllm", "concurrency": wrong})
