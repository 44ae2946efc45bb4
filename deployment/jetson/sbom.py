"""The bill of materials (CycloneDX 1.6 JSON): the model files, and the packages that made them."""

import re
import uuid
from collections.abc import Iterable, Mapping
from importlib.metadata import Distribution, PackageNotFoundError, distribution, distributions
from typing import Any

from packaging.requirements import InvalidRequirement, Requirement

from tasks.artifacts import hash_json

RUNTIME = ("llama-cpp-python",)
RUNTIME_EXTRAS = ("server",)
_SEPARATORS = re.compile(r"[-_.]+")
_LONGEST_NAME = 100


def canonical(name: str) -> str:
    """A package name as indexes compare it."""
    return _SEPARATORS.sub("-", name).lower()


def requirements_of(package: Distribution, extras: Iterable[str]) -> list[Requirement]:
    """Requirements of an installed package that hold here, with `extras` asked for."""
    found = []
    for line in package.requires or []:
        try:
            requirement = Requirement(line)
        except InvalidRequirement:
            continue
        environments = [{"extra": extra} for extra in ("", *extras)]
        marker = requirement.marker
        if marker is None or any(marker.evaluate(e) for e in environments):
            found.append(requirement)
    return found


def runtime_closure(roots: Iterable[str], extras: Iterable[str]) -> set[str]:
    """Canonical names of what the device's model server needs, itself included."""
    queue = [(canonical(name), tuple(extras)) for name in roots]
    seen: set[tuple[str, tuple[str, ...]]] = set()
    while queue:
        name, wanted = item = queue.pop()
        if item in seen:
            continue
        try:
            package = distribution(name)
        except PackageNotFoundError:
            continue
        seen.add(item)
        queue += [
            (canonical(r.name), tuple(sorted(r.extras))) for r in requirements_of(package, wanted)
        ]
    return {name for name, _ in seen}


def license_of(package: Distribution) -> list[dict[str, Any]]:
    """CycloneDX licences of a package: its SPDX expression, else its short name or classifier."""
    metadata = package.metadata
    expression = metadata.get("License-Expression")
    if expression:
        return [{"expression": expression}]
    name = (metadata.get("License") or "").strip()
    if name and "\n" not in name and len(name) <= _LONGEST_NAME:
        return [{"license": {"name": name}}]
    classifiers = [c for c in metadata.get_all("Classifier") or [] if c.startswith("License ::")]
    return [{"license": {"name": c.rpartition(" :: ")[2]}} for c in classifiers]


def _library(package: Distribution, runtime: set[str]) -> dict[str, Any]:
    name, version = package.metadata["Name"], package.version
    purl = f"pkg:pypi/{canonical(name)}@{version}"
    component: dict[str, Any] = {
        "type": "library",
        "bom-ref": purl,
        "name": name,
        "version": version,
        "purl": purl,
        "scope": "required" if canonical(name) in runtime else "excluded",
    }
    licenses = license_of(package)
    return {**component, "licenses": licenses} if licenses else component


def _model(name: str, version: str, quant: str, entry: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "type": "machine-learning-model",
        "bom-ref": f"model:{quant}",
        "name": f"{name}-{quant}",
        "version": version,
        "hashes": [{"alg": "SHA-256", "content": entry["sha256"]}],
        "licenses": [{"expression": entry["license"]}],
        "properties": [
            {"name": "rl-pipeline:file", "value": entry["file"]},
            {"name": "rl-pipeline:size", "value": str(entry["size"])},
            {"name": "rl-pipeline:base-model", "value": entry["base_model"]},
        ],
    }


def make_sbom(name: str, version: str, models: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """The document; the same environment and models give the same document.

    `models`: quantisation → `file`, `size`, `sha256`, `license`, `base_model`. Packages the device
    needs have scope `required`; those that only made the bundle are `excluded` from it.
    """
    runtime = runtime_closure(RUNTIME, RUNTIME_EXTRAS)
    packages = {
        (canonical(p.metadata["Name"]), p.version): p
        for p in distributions()
        if p.metadata["Name"] is not None
    }
    libraries = [_library(packages[key], runtime) for key in sorted(packages)]
    weights = [_model(name, version, quant, models[quant]) for quant in sorted(models)]
    needed = [c["bom-ref"] for c in libraries if c["scope"] == "required"]
    subject = {"type": "application", "bom-ref": f"bundle:{name}", "name": name, "version": version}
    components = [*weights, *libraries]
    serial = uuid.uuid5(uuid.NAMESPACE_OID, hash_json([subject, components]))
    return {
        "$schema": "http://cyclonedx.org/schema/bom-1.6.schema.json",
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "serialNumber": f"urn:uuid:{serial}",
        "version": 1,
        "metadata": {"component": subject},
        "components": components,
        "dependencies": [
            {
                "ref": subject["bom-ref"],
                "dependsOn": [c["bom-ref"] for c in weights] + needed,
            }
        ],
    }
