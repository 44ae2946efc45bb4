"""Packages the shipping quantisations as a signed bundle, and the bundle as one archive."""

import json
import logging
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import version
from importlib.resources import files
from pathlib import Path
from typing import Any

from configs.schema.package import PackageConfig
from configs.schema.quantize import recipe_of
from deployment.jetson.archive import write_archive
from deployment.jetson.documents import license_text, model_card, notice, template
from deployment.jetson.errors import (
    MissingInputError,
    NothingShipsError,
    PackageError,
    UnknownToolError,
)
from deployment.jetson.facts import BundleFacts
from deployment.jetson.golden import make_golden, read_prompts
from deployment.jetson.model_facts import context_of, measured_here, model_facts
from deployment.jetson.on_device.conversation import OWNED_TOOLS, AgentSettings
from deployment.jetson.on_device.l4t import L4tError, parse_version
from deployment.jetson.on_device.verify import FORMAT, MANIFEST, SIGNATURE
from deployment.jetson.runtime_source import source_of
from deployment.jetson.sbom import make_sbom
from deployment.jetson.signing import SigningKey, sign, signing_key
from tasks.artifacts import ArtifactRecord, hash_file, write_atomic, write_json
from tasks.artifacts.atomic import fsync_folder
from tasks.artifacts.errors import ArtifactWriteError
from tasks.artifacts.progress import Reporter
from tasks.environments.renderer import PromptRenderer

log = logging.getLogger(__name__)

GREEDY = {
    "temperature": 0.0,
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "repeat_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
}
"""Sampling unless a client says otherwise: as the quantisations were judged. The model server's
own default would penalise repetition by 1.1."""
ON_DEVICE = (
    "agent.py",
    "api_key.py",
    "build_llama_server.sh",
    "conversation.py",
    "field_log.py",
    "front.py",
    "install.sh",
    "l4t.py",
    "llama_child.py",
    "metrics.py",
    "preflight.py",
    "preflight.sh",
    "runtime.py",
    "settings.py",
    "smoke.py",
    "smoke.sh",
    "uninstall.sh",
    "verify.py",
)
UNITS = ("agent.service", "headless.conf")
FROM_TRAINING = ("calculator_tool.py", "sanitise.py", "toolcall.py")
"""Copied verbatim from `tasks/environments`: training and the device run the same code."""
STEPS = 7
MEASURED = "measured.json"
"""Beside the bundle: memory and speed here, which differ from run to run."""


@dataclass(frozen=True)
class _Inputs:
    """The folders and tables the bundle is made from."""

    quantised: Path
    policy: Path
    rollouts: Path
    parity: dict[str, dict[str, Any]]
    evaluation: dict[str, Any]
    lineage: dict[str, str]


def _json(path: Path) -> Any:
    try:
        return json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise MissingInputError(f"cannot read {path}: {error}; run its stage again") from error


def _read_inputs(inputs: Mapping[str, ArtifactRecord], facts: BundleFacts) -> _Inputs:
    missing = [name for name in ("quantize", "rl", "evaluation") if name not in inputs]
    if missing:
        raise MissingInputError(f"package needs the outputs of {', '.join(missing)}")
    quantised, rl = inputs["quantize"].path, inputs["rl"].path
    parity_file = quantised / "parity.json"
    variants = _json(parity_file).get("quant")
    if not isinstance(variants, dict) or not variants:
        raise MissingInputError(f'{parity_file} has no "quant"; run quantize again')
    lineage = {**{name: record.sha256 for name, record in inputs.items()}, **facts.lineage}
    return _Inputs(
        quantised=quantised,
        policy=rl / "policy",
        rollouts=rl / "rollouts.jsonl",
        parity=variants,
        evaluation=_json(inputs["evaluation"].path / "summary.json"),
        lineage=lineage,
    )


def choose_quantisations(
    parity: Mapping[str, Mapping[str, Any]], prefer: tuple[str, ...]
) -> tuple[str, tuple[str, ...]]:
    """(default, all that ship): the default is the first of `prefer` that ships.

    A preferred type that does not ship may have been repaired: then the repaired file is meant.
    F16 is the yardstick of the others and never ships.

    Raises:
        NothingShipsError: nothing passed its gate, or nothing of `prefer`.
    """
    shipping = tuple(sorted(q for q in parity if parity[q].get("ships") is True and q != "F16"))
    chosen = next(
        (q for wanted in prefer for q in shipping if wanted in (q, recipe_of(q))),
        None,
    )
    if chosen is None:
        why = "; ".join(f"{q}: {parity[q].get('why') or 'rejected'}" for q in sorted(parity))
        raise NothingShipsError(
            f"no quantisation of package.prefer={list(prefer)} ships ({why}). Quantise to a larger "
            "type (quantize.types=[Q8_0]), or train a policy that passes its gate"
        )
    return chosen, shipping


def _check(config: PackageConfig, facts: BundleFacts) -> None:
    try:
        lowest = parse_version(config.l4t_min)
    except L4tError as error:
        raise PackageError(f"package.l4t_min: {error}") from None
    if lowest.major > config.l4t_max_major:
        raise PackageError(
            f"package.l4t_min={config.l4t_min} is above package.l4t_max_major="
            f"{config.l4t_max_major}; no device could take the bundle"
        )
    unknown = sorted(set(facts.tools) - set(OWNED_TOOLS))
    if unknown:
        raise UnknownToolError(
            f"tools={unknown}: the device has no code for them; have {sorted(OWNED_TOOLS)}"
        )


def _renderer(policy: Path, facts: BundleFacts) -> PromptRenderer:
    from tasks.models.load import load_tokenizer

    if not (policy / "tokenizer_config.json").is_file():
        raise MissingInputError(f"{policy} holds no tokenizer; run the rl stage again")
    try:
        tokenizer = load_tokenizer(policy)
    except (OSError, ValueError) as error:
        raise MissingInputError(f"cannot load the tokenizer in {policy}: {error}") from error
    return PromptRenderer(tokenizer, facts.system_prompt)


def _normaliser(renderer: PromptRenderer) -> str | None:
    """The Unicode form the tokenizer puts text in; llama.cpp leaves that to the caller."""
    spec = json.loads(renderer.tokenizer.backend_tokenizer.to_str())["normalizer"] or {}
    steps = [s["type"] for s in spec.get("normalizers", [spec] if spec else [])]
    if steps not in ([], ["NFC"]):
        raise PackageError(f"the tokenizer normalises with {steps}; the device only knows NFC")
    return steps[0] if steps else None


def _write_code(folder: Path) -> None:
    """The on-device code and the service unit."""
    sources = [(files("deployment.jetson.on_device"), ON_DEVICE)]
    sources += [(files("tasks.environments"), FROM_TRAINING)]
    for package, names in sources:
        for name in names:
            path = write_atomic(folder / name, package.joinpath(name).read_bytes())
            if path.suffix == ".sh":
                path.chmod(0o755)
    for name in UNITS:
        write_atomic(folder / name, template(name).read_bytes())


def _add_models(
    folder: Path, source: _Inputs, config: PackageConfig, quants: tuple[str, ...]
) -> tuple[dict[str, Any], int]:
    """Copy the GGUF files; their manifest entries, and the context length all of them can hold."""
    context = config.context_length
    paths = {quant: folder / "models" / f"{quant}.gguf" for quant in quants}
    for quant, target in paths.items():
        origin = source.quantised / f"{quant}.gguf"
        if not origin.is_file():
            raise MissingInputError(f"{origin} is missing though {quant} ships; quantise again")
        target.parent.mkdir(exist_ok=True)
        shutil.copyfile(origin, target)
        context = context_of(target, context)
    models = {
        quant: {
            "file": f"models/{quant}.gguf",
            "sha256": hash_file(target),
            "size": target.stat().st_size,
            "bits_per_weight": source.parity[quant].get("bits_per_weight"),
            **model_facts(target, quant, context),
        }
        for quant, target in paths.items()
    }
    return models, context


def _manifest(
    config: PackageConfig,
    facts: BundleFacts,
    source: _Inputs,
    renderer: PromptRenderer,
    default: str,
    models: dict[str, Any],
    context: int,
) -> dict[str, Any]:
    """Everything but the file table."""
    limits = facts.limits
    return {
        "format": FORMAT,
        "name": config.name,
        "profile": facts.profile,
        "default": default,
        "models": models,
        "parity": source.parity,
        "evaluation": source.evaluation,
        "prompt": {
            "chat_template": renderer.tokenizer.chat_template,
            "system_prompt": facts.system_prompt,
            "special_strings": list(renderer.special_strings),
            "end_of_turn_id": renderer.end_of_turn_id,
            "normaliser": _normaliser(renderer),
        },
        "serving": {
            "context_length": context,
            "n_gpu_layers": -1,
            "tools": list(facts.tools),
            "sampling": GREEDY,
            "max_new_tokens": limits.max_new_tokens,
            "max_turns": limits.max_turns,
            "max_request_bytes": limits.max_request_bytes,
            "turn_timeout_s": limits.turn_timeout_s,
        },
        "l4t": {"min": config.l4t_min, "max_major": config.l4t_max_major},
        "llama_cpp_python": version("llama_cpp_python"),
        "llama_cpp_source": source_of(version("llama_cpp_python")),
        "lineage": source.lineage,
        "code": {"git_sha": facts.git_sha, "dirty": facts.git_dirty},
        "mlflow": {"run_id": facts.mlflow_run_id, "tracking_uri": facts.mlflow_tracking_uri},
        "license": facts.base_license,
        "base_model": facts.base_model,
    }


def _file_table(folder: Path) -> dict[str, dict[str, Any]]:
    return {
        path.relative_to(folder).as_posix(): {
            "sha256": hash_file(path),
            "size": path.stat().st_size,
        }
        for path in sorted(p for p in folder.rglob("*") if p.is_file())
    }


def _write_documents(folder: Path, manifest: dict[str, Any], facts: BundleFacts) -> None:
    name, models = manifest["name"], manifest["models"]
    described = {
        quant: {**entry, "license": facts.base_license, "base_model": facts.base_model}
        for quant, entry in models.items()
    }
    release = models[manifest["default"]]["sha256"][:12]
    write_json(folder / "sbom.cdx.json", make_sbom(name, release, described))
    write_atomic(folder / "LICENSE", license_text(facts))
    write_atomic(folder / "NOTICE", notice(name, facts))
    write_atomic(folder / "model_card.md", model_card(manifest, facts))


def _build(
    folder: Path,
    config: PackageConfig,
    facts: BundleFacts,
    source: _Inputs,
    key: SigningKey,
    report: Reporter,
) -> dict[str, Any]:
    """Fill `folder`; return the manifest it was signed with."""
    default, quants = choose_quantisations(source.parity, config.prefer)
    renderer = _renderer(source.policy, facts)
    report.progress(1, STEPS, f"copying {', '.join(quants)}")
    models, context = _add_models(folder, source, config, quants)
    manifest = _manifest(config, facts, source, renderer, default, models, context)
    report.progress(2, STEPS, "golden prompts")
    settings = AgentSettings.from_manifest(manifest)
    prompts = read_prompts(source.rollouts, config.golden_prompts, facts.system_prompt)
    tools = {name: OWNED_TOOLS[name] for name in facts.tools}
    model = folder / models[default]["file"]
    golden = make_golden(model, default, context, renderer, settings, tools, prompts)
    write_json(folder / "golden_prompts.json", golden)
    report.progress(3, STEPS, "code and documents")
    _write_code(folder)
    _write_documents(folder, manifest, facts)
    report.progress(4, STEPS, "hashes and signature")
    manifest["files"] = _file_table(folder)
    write_json(folder / MANIFEST, manifest)
    signature = sign((folder / MANIFEST).read_bytes(), key.private)
    write_atomic(folder / SIGNATURE, signature)
    return manifest


def run(
    config: PackageConfig,
    inputs: Mapping[str, ArtifactRecord],
    out_dir: Path,
    report: Reporter,
    *,
    facts: BundleFacts,
) -> ArtifactRecord:
    """Make `bundle/` and `<name>-<sha12>.tar.gz` in `out_dir`; the record's hash is the manifest's.

    Both appear whole or not at all; a second run replaces what is there.

    Raises:
        PackageError: naming what is missing or wrong (nothing ships, an unknown tool, a tokenizer
            that differs between training and llama.cpp, an unusable key).
        ArtifactWriteError: the disk refused.
    """
    _check(config, facts)
    source = _read_inputs(inputs, facts)
    key = signing_key(facts.key_dir)
    working, bundle = out_dir / f".bundle.{os.getpid()}", out_dir / "bundle"
    _clear(out_dir, config.name)
    try:
        working.mkdir(parents=True)
        manifest = _build(working, config, facts, source, key, report)
        sha256 = hash_file(working / MANIFEST)
        report.progress(5, STEPS, "memory and speed on this machine")
        measured = measured_here(working, manifest)
        report.progress(6, STEPS, "archive")
        top = f"{config.name}-{sha256[:12]}"
        archive = write_archive(working, out_dir / f"{top}.tar.gz", top)
        write_json(out_dir / MEASURED, measured)
        working.rename(bundle)
        fsync_folder(out_dir)
    except OSError as error:
        if isinstance(error, ArtifactWriteError):
            raise
        raise ArtifactWriteError(
            f"could not write the bundle under {out_dir}: {error.strerror or error}; free some "
            "space, then run again: finished stages are reused",
            out_dir,
        ) from error
    finally:
        shutil.rmtree(working, ignore_errors=True)
    report.progress(STEPS, STEPS, f"{archive.name} signed by {key.fingerprint}")
    log.info("bundle %s signed by %s", archive, key.fingerprint)
    meta = {
        "bundle": str(bundle),
        "archive": str(archive),
        "archive_sha256": hash_file(archive),
        "archive_bytes": archive.stat().st_size,
        "manifest_sha256": sha256,
        "default": manifest["default"],
        "quantisations": sorted(manifest["models"]),
        "measured": measured,
        "signed": True,
        "key": key.fingerprint,
        "allowed_signers": str(key.allowed_signers),
    }
    return ArtifactRecord(kind="bundle", uri=str(out_dir), sha256=sha256, meta=meta)


def _clear(out_dir: Path, name: str) -> None:
    """Take away what an earlier or killed attempt left."""
    for old in (out_dir / "bundle", *out_dir.glob(".bundle.*")):
        shutil.rmtree(old, ignore_errors=True)
    (out_dir / MEASURED).unlink(missing_ok=True)
    for old in [*out_dir.glob(f"{name}-*.tar.gz"), *out_dir.glob(f".{name}-*.tar.gz.*")]:
        old.unlink()
