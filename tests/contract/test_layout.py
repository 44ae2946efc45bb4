"""The shape of the repository: names, sizes, what may import what at load time."""

import ast
import importlib.util
import json
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
import yaml

from configs.load import dump_config, load_config, profiles
from configs.schema import PipelineConfig

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("flows", "tasks", "configs", "quantize", "deployment")
MODULE_LINES, FUNCTION_LINES = 400, 60
ON_DEVICE_PROJECT_FILES = {
    "tasks.environments.calculator_tool",
    "tasks.environments.sanitise",
    "tasks.environments.toolcall",
}


def modules() -> list[Path]:
    return sorted(path for name in PACKAGES for path in (ROOT / name).rglob("*.py"))


def functions(path: Path) -> list[tuple[str, int]]:
    """Name and lines of every function, nested ones too."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return [
        (node.name, (node.end_lineno or node.lineno) - node.lineno + 1)
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]


@pytest.mark.parametrize("name", PACKAGES)
def test_top_level_names_are_ours(name: str) -> None:
    spec = importlib.util.find_spec(name)
    assert spec is not None and spec.origin is not None
    assert Path(spec.origin).is_relative_to(ROOT)
    owners = set(metadata.packages_distributions().get(name, []))
    assert owners <= {"rl-pipeline"}, f"{name} is also shipped by {owners}"


def test_no_module_is_called_utils() -> None:
    assert [p for p in modules() if p.stem in ("utils", "util", "helpers", "misc")] == []


def test_modules_stay_short() -> None:
    long = {
        str(p.relative_to(ROOT)): n
        for p in modules()
        if (n := len(p.read_text(encoding="utf-8").splitlines())) > MODULE_LINES
    }
    assert long == {}


def test_functions_stay_short() -> None:
    long = {
        f"{p.relative_to(ROOT)}:{name}": n
        for p in modules()
        for name, n in functions(p)
        if n > FUNCTION_LINES
    }
    assert long == {}


def test_every_module_says_what_it_is_for() -> None:
    silent = [
        str(p.relative_to(ROOT))
        for p in modules()
        if not ast.get_docstring(ast.parse(p.read_text(encoding="utf-8")))
    ]
    assert silent == []


def test_the_project_has_profiles() -> None:
    assert {"calculator", "gsm8k_smollm2_135m", "gsm8k_qwen2.5_0.5b"} <= set(profiles())


@pytest.mark.parametrize("name", sorted(profiles()))
def test_every_profile_loads_and_round_trips(name: str) -> None:
    config = load_config(name)
    assert config.profile == name
    assert PipelineConfig.model_validate_json(json.dumps(dump_config(config))) == config


@pytest.mark.parametrize("name", sorted(profiles()))
def test_profiles_read_the_same_in_plain_yaml(name: str) -> None:
    """No profile leans on how our reader differs from YAML 1.1, bar floats without a point."""

    def leaves(value: object, path: str = "") -> dict[str, object]:
        if isinstance(value, dict):
            return {k: v for n, x in value.items() for k, v in leaves(x, f"{path}.{n}").items()}
        return {path: value}

    plain = leaves(yaml.safe_load(profiles()[name].read_text(encoding="utf-8")))
    ours = leaves(dump_config(load_config(name)))
    for key, value in plain.items():
        assert isinstance(value, str) or ours.get(key) == value, key


def imported(statement: str) -> set[str]:
    """Top-level names of the modules loaded after `statement` in a fresh interpreter."""
    code = f"import sys; {statement}; print(*{{m.partition('.')[0] for m in sys.modules}})"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return set(done.stdout.split())


def test_configs_import_neither_torch_nor_prefect() -> None:
    heavy = {"torch", "prefect", "transformers", "numpy", "mlflow", "tasks", "flows"}
    assert imported("import configs.load, configs.schema") & heavy == set()


def test_help_imports_nothing_heavy() -> None:
    heavy = {"torch", "prefect", "transformers", "numpy", "mlflow", "great_expectations", "ray"}
    assert imported("import flows.cli") & heavy == set()


def on_device_files() -> list[Path]:
    shared = [ROOT / f"{name.replace('.', '/')}.py" for name in sorted(ON_DEVICE_PROJECT_FILES)]
    return [*sorted((ROOT / "deployment/jetson/on_device").rglob("*.py")), *shared]


@pytest.mark.parametrize("path", on_device_files(), ids=lambda p: p.name)
def test_on_device_code_is_standard_library_only(path: Path) -> None:
    beside = {p.stem for p in on_device_files()}
    foreign = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"), feature_version=(3, 10))):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            names = [node.module or ""]
            if node.module == "tasks.environments":
                names = [f"tasks.environments.{alias.name}" for alias in node.names]
        for name in names:
            top = name.partition(".")[0]
            known = top in sys.stdlib_module_names or top in beside
            known |= name.startswith("deployment.jetson.on_device")
            if not known and name not in ON_DEVICE_PROJECT_FILES:
                foreign.add(name)
    assert foreign == set()


def test_tests_have_unique_names_and_no_packages() -> None:
    files = sorted((ROOT / "tests").rglob("test_*.py"))
    names = [path.name for path in files]
    assert sorted(set(names)) == sorted(names)
    assert list((ROOT / "tests").rglob("__init__.py")) == []
