"""What a bundle says of each model file: size, memory and speed, predicted and measured."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from deployment.jetson.device import DEVICES
from deployment.jetson.file_size import FILE_TYPES, measured_file, predict_file
from deployment.jetson.measurement import measure, reported_buffers
from deployment.jetson.memory_plan import Serving, plan_memory
from deployment.jetson.model_shape import read_shape
from deployment.jetson.throughput import speeds

PLANNED_DEVICE = "orin-nano-8gb"


def context_of(gguf: Path, wanted: int) -> int:
    """The context a file is served with: what is wanted, or all it was trained for."""
    return min(wanted, read_shape(gguf).trained_context)


def model_facts(gguf: Path, quant: str, context: int) -> dict[str, Any]:
    """`memory`, `predicted` and `reported` of a model's manifest entry; the same on every machine.

    `reported` is what llama.cpp says of its own buffers. A file whose types were raised one by one
    has no predicted size.

    Raises:
        MissingInputError: llama.cpp cannot open the file.
    """
    shape, serving = read_shape(gguf), Serving(context)
    file = measured_file(gguf)
    recipe = next((kind for kind in FILE_TYPES if kind == quant), None)
    device = DEVICES[PLANNED_DEVICE]
    bounds = {
        one.mode: {
            "bound": round(one.bound, 1),
            "expected": [round(one.expected_low, 1), round(one.expected_high, 1)],
        }
        for one in speeds(device, shape, file, context)
    }
    return {
        "memory": plan_memory(shape, file, serving).as_json(),
        "predicted": {
            "device": device.name,
            "file_bytes": predict_file(shape, recipe).file_bytes if recipe else None,
            "tokens_per_s": bounds,
        },
        "reported": reported_buffers(gguf, serving),
    }


def measured_here(bundle: Path, manifest: Mapping[str, Any]) -> dict[str, Any]:
    """Memory and speed of each model on this machine's CPU; not signed, since no two runs agree."""
    serving = Serving(manifest["serving"]["context_length"])
    models = manifest["models"].items()
    return {quant: measure(bundle / entry["file"], serving) for quant, entry in models}
