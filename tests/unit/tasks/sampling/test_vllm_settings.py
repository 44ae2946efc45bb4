"""What cannot work is refused before vLLM loads anything, with the key and what to do."""

import os
import pickle

import pytest

from configs.schema.rl_engines import VllmEngineConfig
from configs.schema.training import FullWeights, Lora
from tasks.sampling.errors import EngineStartError
from tasks.sampling.vllm_settings import check_startable, environment


@pytest.mark.parametrize(
    ("settings", "trainable", "on_cpu", "says"),
    [
        ({"tensor_parallel_size": 2}, Lora(), True, r"tensor_parallel_size=2 .*must be 1"),
        ({"colocated": True}, Lora(), True, r"rl\.engine\.colocated=true"),
        ({"tensor_parallel_size": 2}, FullWeights(), False, "train an adapter"),
        ({}, Lora(r=16, alpha=24), False, r"alpha=24 over r=16 is no power of two"),
        ({}, Lora(targets=("q_proj", "lm_head")), False, r"targets=\['lm_head'\].*transformers"),
    ],
)
def test_what_cannot_work_is_refused(settings, trainable, on_cpu, says, tmp_path):
    with pytest.raises(EngineStartError, match=says) as caught:
        check_startable(VllmEngineConfig(**settings), trainable, tmp_path, on_cpu=on_cpu)
    assert isinstance(pickle.loads(pickle.dumps(caught.value)), RuntimeError)


def test_what_a_gpu_can_is_let_through(tmp_path):
    settings = VllmEngineConfig(tensor_parallel_size=4, colocated=True)
    for lora in (Lora(r=16, alpha=32), Lora(r=16, alpha=8), Lora(r=8, alpha=8)):
        check_startable(settings, lora, tmp_path, on_cpu=False)
    check_startable(VllmEngineConfig(), FullWeights(), tmp_path, on_cpu=False)


def test_vllm_missing_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(EngineStartError, match="vLLM is not installed here; run `make install`"):
        check_startable(VllmEngineConfig(), Lora(), tmp_path, on_cpu=True)


def test_the_environment_is_as_before_afterwards(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    monkeypatch.delenv("VLLM_NO_USAGE_STATS", raising=False)
    before = dict(os.environ)
    with pytest.raises(RuntimeError), environment(threads=2, start_timeout_s=90.5):
        assert os.environ["OMP_NUM_THREADS"] == "2"
        assert os.environ["VLLM_NO_USAGE_STATS"] == "1"
        assert os.environ["VLLM_ENGINE_READY_TIMEOUT_S"] == "91"
        os.environ["LD_PRELOAD"] = "what vLLM sets for its children"
        raise RuntimeError
    assert dict(os.environ) == before
