"""What doctor says of memory and of the lag."""

from pathlib import Path

from configs.load import load_config
from flows.doctor.engine import examine_engine, gpu_memory, lag_pays
from flows.doctor.probes import Gpu, MachineFacts

NO_GPU = MachineFacts(cores=2, memory_gib=24, disk_gib=70, gpus=())


def with_gpus(gib: float) -> MachineFacts:
    return MachineFacts(16, 128, 500, (Gpu("card", gib), Gpu("card", gib)))


def test_a_cpu_profile_has_no_gpu_memory_to_look_at(tmp_path: Path) -> None:
    names = [f.name for f in examine_engine(load_config("calculator"), NO_GPU, tmp_path)]
    assert names == ["asynchronous or synchronous"]


def test_without_gpus_the_sizes_that_fit_are_named() -> None:
    shared, *none = gpu_memory(load_config("gsm8k_qwen2.5_7b", ["hardware=1gpu"]), NO_GPU)
    assert none == [] and shared.name == "GPU memory, learner and rollout"
    assert shared.looked_at.startswith("fits 80 GB, 141 GB; not 24 GB, 40 GB, 48 GB (")
    assert shared.status == "pass" and shared.remedy.startswith("on 48 GB: ")


def test_the_gpus_found_are_what_counts() -> None:
    config = load_config("gsm8k_qwen3_8b", ["hardware=2gpu"])
    learner, rollout = gpu_memory(config, with_gpus(79.65))
    assert (learner.status, rollout.status) == ("pass", "pass")
    assert "weights 16.8" in learner.looked_at and "full sequences" in rollout.looked_at
    learner, rollout = gpu_memory(config, with_gpus(23.99))
    assert learner.status == "warn" and learner.remedy
    assert rollout.status == "pass"  # 15.3 GiB of weights and a cache of three GiB


def test_too_many_tokens_at_once_are_answered_with_how_many_fit() -> None:
    many = ["hardware=2gpu", "rl.deepspeed.micro_batch_tokens=65536"]
    learner, _ = gpu_memory(load_config("gsm8k_qwen2.5_0.5b", many), with_gpus(79.65))
    assert learner.status == "warn"
    assert learner.remedy.startswith("rl.deepspeed.micro_batch_tokens=")
    fewer = ["hardware=2gpu", learner.remedy]
    learner, _ = gpu_memory(load_config("gsm8k_qwen2.5_0.5b", fewer), with_gpus(79.65))
    assert learner.status == "pass"


def test_an_unknown_model_is_said_to_be() -> None:
    config = load_config("gsm8k_qwen2.5_0.5b", ["model.path=Someone/Else-1B"])
    (finding,) = gpu_memory(config, NO_GPU)
    assert finding.status == "warn" and "Someone/Else-1B" in finding.looked_at
    assert lag_pays(config, Path("nowhere")).status == "open"


def test_where_a_lag_does_not_pay_synchronous_is_advised(tmp_path: Path) -> None:
    """One shared card: both sides take turns whatever the settings say."""
    finding = lag_pays(load_config("gsm8k_qwen2.5_0.5b", ["hardware=1gpu"]), tmp_path)
    assert finding.status == "warn" and "rl.staleness_limit=0" in finding.remedy
    assert "1 device (assumed" in finding.looked_at


def test_where_tools_are_slow_a_lag_is_advised(tmp_path: Path) -> None:
    slow = {
        "rl.tools.simulated_latency": {"median_s": 2.0, "sigma": 1.0, "max_s": 30.0},
        "rl.staleness_limit": 0, "rl.publish": {"start": 1, "end": 1}, "rl.batch_size": 32,
    }  # fmt: skip
    finding = lag_pays(load_config("calculator", slow), tmp_path)
    assert finding.status == "warn" and finding.remedy.startswith("rl.staleness_limit=")
    with_lag = {**slow, "rl.staleness_limit": 4}
    assert lag_pays(load_config("calculator", with_lag), tmp_path).status == "pass"
