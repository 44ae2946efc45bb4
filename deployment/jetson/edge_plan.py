"""The plan for one model on one device: which quantisations fit, how fast, what would help."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from deployment.jetson.device import Device
from deployment.jetson.errors import MissingInputError, UnknownModelError
from deployment.jetson.file_size import FILE_TYPES, FileSize, FileType, measured_file, predict_file
from deployment.jetson.memory_plan import (
    MemoryPlan,
    Remedy,
    Serving,
    longest_context,
    plan_memory,
    remedies,
)
from deployment.jetson.model_shape import ModelShape, known_shape, read_config_shape, read_shape
from deployment.jetson.on_device.verify import safe_relative
from deployment.jetson.throughput import Speed, speeds

PREFERRED: FileType = "Q4_K_M"


@dataclass(frozen=True)
class Subject:
    """What a plan is made for: a shape, and the files of it that exist."""

    name: str
    shape: ModelShape
    files: Mapping[str, FileSize]
    """Type → its measured file; empty where none was made yet."""
    default: str | None = None


def subject_of_bundle(bundle: Path, manifest: Mapping[str, Any]) -> Subject:
    """A bundle's models.

    Raises:
        MissingInputError: a model file is not readable.
    """
    models = manifest["models"].items()
    paths = {quant: bundle / safe_relative(entry["file"]) for quant, entry in models}
    shape = read_shape(paths[manifest["default"]])
    files = {quant: measured_file(path) for quant, path in paths.items()}
    return Subject(str(manifest["name"]), shape, files, manifest["default"])


def find_subject(what: str) -> Subject:
    """A GGUF file, a model folder or its config.json, or a model's usual name.

    Raises:
        UnknownModelError: none of these.
        MissingInputError: it cannot be read.
    """
    path = Path(what)
    if path.is_file() and path.suffix == ".gguf":
        shape = read_shape(path)
        return Subject(path.name, shape, {path.stem: measured_file(path)}, path.stem)
    if (path / "config.json").is_file() or (path.is_file() and path.suffix == ".json"):
        return Subject(path.name, read_config_shape(path), {})
    if path.exists():
        raise MissingInputError(
            f"{what} holds no bundle, no GGUF and no config.json; name one of these, or a model"
        )
    if "/" in what and what.count("/") != 1:
        raise UnknownModelError(f"{what} does not exist")
    return Subject(what, known_shape(what), {})


@dataclass(frozen=True)
class EdgePlace:
    """A device and how much of its memory is free; bytes."""

    device: Device
    available_bytes: int


@dataclass(frozen=True)
class Choice:
    """One quantisation on the device."""

    type: str
    measured: bool
    """The file exists; else its size is predicted."""
    file: FileSize
    memory: MemoryPlan
    fits: bool
    longest_context: int
    speeds: list[Speed]


@dataclass(frozen=True)
class EdgePlan:
    """Everything `rl-pipeline edge plan` says; bytes."""

    subject: str
    device: Device
    available_bytes: int
    serving: Serving
    shape: ModelShape
    choices: list[Choice]
    chosen: Choice
    remedies: list[Remedy]
    """Empty where the chosen quantisation fits."""

    def as_json(self) -> dict[str, Any]:
        """For `--json`."""
        return {**asdict(self), "fits": self.chosen.fits}


def _choice(
    kind: str, file: FileSize, measured: bool, subject: Subject, serving: Serving, place: EdgePlace
) -> Choice:
    memory = plan_memory(subject.shape, file, serving)
    per_slot = serving.context // serving.slots
    return Choice(
        type=kind,
        measured=measured,
        file=file,
        memory=memory,
        fits=memory.total_bytes <= place.available_bytes,
        longest_context=longest_context(subject.shape, file, serving, place.available_bytes),
        speeds=speeds(place.device, subject.shape, file, per_slot, serving.kv_type),
    )


def make_plan(
    subject: Subject,
    serving: Serving,
    device: Device,
    *,
    wanted: str | None = None,
    available: int | None = None,
    headless: bool = False,
) -> EdgePlan:
    """Plan every type; the chosen one is `wanted`, else the subject's default, else Q4_K_M.

    `available` is MemAvailable as read on the device, bytes; without it, the device's usual value,
    with what leaving the desktop frees where `headless`.

    Raises:
        UnknownModelError: `wanted` is no type that exists or can be predicted.
        ServingError: it cannot be served this way.
    """
    usual = device.available_bytes + (device.headless_bytes if headless else 0)
    place = EdgePlace(device, usual if available is None else available)
    files: dict[str, FileSize] = {kind: predict_file(subject.shape, kind) for kind in FILE_TYPES}
    files.update(subject.files)
    chosen = wanted or subject.default or PREFERRED
    if chosen not in files:
        raise UnknownModelError(f"--type {chosen}: choose one of {', '.join(files)}")
    order = sorted(files, key=lambda kind: -files[kind].file_bytes)
    choices = [
        _choice(kind, files[kind], kind in subject.files, subject, serving, place) for kind in order
    ]
    picked = next(choice for choice in choices if choice.type == chosen)
    found: list[Remedy] = []
    if not picked.fits:
        may_leave = device.headless_bytes if available is None and not headless else 0
        found = remedies(
            subject.shape,
            picked.file,
            serving,
            place.available_bytes,
            file_type=next((t for t in FILE_TYPES if t == chosen), None),
            headless_bytes=may_leave,
        )
    return EdgePlan(
        subject=subject.name,
        device=device,
        available_bytes=place.available_bytes,
        serving=serving,
        shape=subject.shape,
        choices=choices,
        chosen=picked,
        remedies=found,
    )
