import importlib.metadata
import re

from deployment.jetson.sbom import canonical, license_of, make_sbom, runtime_closure

MODELS = {
    "Q8_0": {
        "file": "models/Q8_0.gguf",
        "size": 7,
        "sha256": "a" * 64,
        "license": "Apache-2.0",
        "base_model": "m",
    }
}


def test_document_is_reproducible_and_has_the_required_keys():
    first, second = (make_sbom("agent", "1", MODELS) for _ in range(2))
    assert first == second
    assert (first["bomFormat"], first["specVersion"], first["version"]) == ("CycloneDX", "1.6", 1)
    assert re.fullmatch(r"urn:uuid:[0-9a-f-]{36}", first["serialNumber"])
    assert make_sbom("agent", "2", MODELS)["serialNumber"] != first["serialNumber"]


def test_the_real_environment_is_listed():
    components = {c["bom-ref"]: c for c in make_sbom("agent", "1", MODELS)["components"]}
    version = importlib.metadata.version("llama_cpp_python")
    llama = components[f"pkg:pypi/llama-cpp-python@{version}"]
    assert llama["scope"] == "required"
    assert llama["licenses"] == [{"license": {"name": "MIT"}}]
    gguf = components[f"pkg:pypi/gguf@{importlib.metadata.version('gguf')}"]
    assert gguf["scope"] == "excluded"
    installed = {canonical(d.metadata["Name"]) for d in importlib.metadata.distributions()}
    listed = {canonical(c["name"]) for c in components.values() if c["type"] == "library"}
    assert listed == installed


def test_references_are_unique_and_resolve():
    bom = make_sbom("agent", "1", MODELS)
    refs = [c["bom-ref"] for c in bom["components"]]
    assert len(set(refs)) == len(refs)
    for dependency in bom["dependencies"]:
        assert set(dependency["dependsOn"]) <= set(refs)
    assert "model:Q8_0" in bom["dependencies"][0]["dependsOn"]


def test_model_component_carries_its_hash():
    model = make_sbom("agent", "1", MODELS)["components"][0]
    assert model["type"] == "machine-learning-model"
    assert model["hashes"] == [{"alg": "SHA-256", "content": "a" * 64}]


def test_runtime_is_the_server_and_what_it_needs():
    closure = runtime_closure(("llama-cpp-python",), ("server",))
    assert {"llama-cpp-python", "numpy", "jinja2", "uvicorn", "starlette-context"} <= closure
    assert not {"torch", "prefect", "gguf"} & closure
    assert runtime_closure(("no-such-package",), ()) == set()


def test_licences_are_short_or_an_expression():
    for package in importlib.metadata.distributions():
        for entry in license_of(package):
            assert len(entry.get("expression") or entry["license"]["name"]) < 500
