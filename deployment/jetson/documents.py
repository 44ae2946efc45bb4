"""What the bundle says to people: model card, notice, licence."""

from collections.abc import Mapping
from importlib.resources import files
from importlib.resources.abc import Traversable
from string import Template
from typing import Any

from deployment.jetson.errors import MissingInputError
from deployment.jetson.facts import BundleFacts
from deployment.jetson.on_device.verify import IDENTITY, NAMESPACE

TEMPLATES = "deployment.jetson"
_SPDX = "https://spdx.org/licenses/"


def template(name: str) -> Traversable:
    """A file of `templates/`."""
    return files(TEMPLATES).joinpath("templates", *name.split("/"))


def license_text(facts: BundleFacts) -> str:
    """The text of the base model's licence, or where it stands if it is not at hand.

    Raises:
        MissingInputError: the facts name a licence file that cannot be read.
    """
    if facts.license_file is not None:
        try:
            return facts.license_file.read_text(encoding="utf-8")
        except OSError as error:
            raise MissingInputError(
                f"cannot read the licence file {facts.license_file}: {error.strerror}"
            ) from error
    known = template(f"licenses/{facts.base_license}.txt")
    if known.is_file():
        return known.read_text(encoding="utf-8")
    return (
        f"SPDX-License-Identifier: {facts.base_license}\n\n"
        f"The base model, {facts.base_model}, is under this licence. Its text comes with the base\n"
        f"model and stands at {_SPDX}\n"
    )


def notice(name: str, facts: BundleFacts) -> str:
    """Who made what."""
    text = template("NOTICE").read_text(encoding="utf-8")
    values = {
        "name": name,
        "base_model": facts.base_model,
        "base_license": facts.base_license,
    }
    return Template(text).substitute(values)


def _figure(value: Any, digits: int) -> str:
    return "unknown" if value is None else f"{value:.{digits}f}"


def _quantisation_rows(parity: Mapping[str, Mapping[str, Any]], shipped: set[str]) -> str:
    rows = []
    for quant in sorted(parity):
        facts = parity[quant]
        why = facts.get("why") or "no reason given"
        cells = [
            quant,
            "yes" if quant in shipped else "no",
            str(facts.get("size_bytes", "unknown")),
            _figure(facts.get("bits_per_weight"), 2),
            _figure(facts.get("kld_mean"), 6),
            _figure(facts.get("top1"), 4),
            _figure(facts.get("accuracy"), 3),
            f"ships{_raised(facts)}"
            if facts.get("ships")
            else f"rejected: {why.removeprefix('rejected: ')}",
        ]
        rows.append("| " + " | ".join(cells).replace("\n", " ") + " |")
    return "\n".join(rows)


def _raised(facts: Mapping[str, Any]) -> str:
    """Which tensors of a repaired file differ from its recipe."""
    repaired = facts.get("repaired") or {}
    tensors = repaired.get("tensors") or {}
    if not tensors:
        return ""
    named = ", ".join(f"`{name}` as {kind['to']}" for name, kind in sorted(tensors.items()))
    return f": {repaired['of']} with {named}"


def _device_rows(models: Mapping[str, Mapping[str, Any]]) -> str:
    """Size, memory and speed of every model file; power modes of equal speed share a phrase."""
    rows = []
    for quant in sorted(models):
        entry = models[quant]
        spans: dict[str, list[str]] = {}
        for mode, speed in entry["predicted"]["tokens_per_s"].items():
            low, high = speed["expected"]
            spans.setdefault(f"{low:.0f} to {high:.0f}", []).append(mode)
        predicted = entry["predicted"]["file_bytes"]
        cells = [
            quant,
            str(entry["size"]),
            "unknown" if predicted is None else str(predicted),
            str(entry["memory"]["total_bytes"] >> 20),
            "; ".join(f"{span} ({', '.join(modes)})" for span, modes in spans.items()),
        ]
        rows.append("| " + " | ".join(cells) + " |")
    return "\n".join(rows)


def _heldout(evaluation: Mapping[str, Any]) -> str:
    """Accuracy before and after RL, as the evaluation stage wrote it."""
    lines = []
    for key, title in (("snapshot", "SFT snapshot"), ("policy", "RL policy")):
        block = evaluation.get(key)
        if isinstance(block, Mapping) and block.get("accuracy") is not None:
            lines.append(f"- {title}: {block['accuracy']:.3f} (n = {block.get('n', 'unknown')})")
    delta = evaluation.get("delta")
    if isinstance(delta, Mapping) and delta.get("value") is not None:
        low, high = delta.get("ci95") or (None, None)
        interval = f"{_figure(low, 3)} to {_figure(high, 3)}"
        lines.append(f"- Difference: {delta['value']:+.3f}, 95 % interval {interval}")
    return "\n".join(lines) or "See `evaluation` in manifest.json."


def model_card(manifest: Mapping[str, Any], facts: BundleFacts) -> str:
    """The model card, from the manifest (without its file table) and the facts."""
    default = manifest["models"][manifest["default"]]
    serving = manifest["serving"]
    values = {
        "name": manifest["name"],
        "summary": "A language model trained by SFT and reinforcement learning, as GGUF, with its "
        "tool loop, for a Jetson Orin Nano.",
        "base_model": facts.base_model,
        "base_license": facts.base_license,
        "profile": facts.profile,
        "default": manifest["default"],
        "context": serving["context_length"],
        "tools": ", ".join(facts.tools) or "none",
        "l4t_min": manifest["l4t"]["min"],
        "l4t_max_major": manifest["l4t"]["max_major"],
        "llama_cpp_python": manifest["llama_cpp_python"],
        "git": facts.git_sha + (" (dirty)" if facts.git_dirty else ""),
        "mlflow_run_id": facts.mlflow_run_id or "none",
        "heldout": _heldout(manifest["evaluation"]),
        "quantisations": _quantisation_rows(manifest["parity"], set(manifest["models"])),
        "identity": IDENTITY,
        "namespace": NAMESPACE,
        "max_turns": serving["max_turns"],
        "max_new_tokens": serving["max_new_tokens"],
        "device": default["predicted"]["device"],
        "device_rows": _device_rows(manifest["models"]),
        "source_file": manifest["llama_cpp_source"]["file"],
        "source_sha256": manifest["llama_cpp_source"]["sha256"],
        "source_place": manifest["llama_cpp_source"]["place"],
        "memory_mib": default["memory"]["total_bytes"] >> 20,
    }
    return Template(template("model_card.md").read_text(encoding="utf-8")).substitute(values)
