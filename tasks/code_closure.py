"""Which of our files a stage's code consists of: a static walk over imports, nothing is run."""

import ast
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path

from tasks.artifacts import hash_file
from tasks.artifacts.provenance import project_root

PACKAGES = ("flows", "tasks", "configs", "quantize", "deployment")


class CodeClosureError(ValueError):
    """A module of ours cannot be found or parsed."""


def _module_path(name: str, root: Path) -> Path | None:
    """File of a dotted module name within our packages, None where there is none."""
    if name.split(".")[0] not in PACKAGES:
        return None
    base = root.joinpath(*name.split("."))
    if base.with_suffix(".py").is_file():
        return base.with_suffix(".py")
    init = base / "__init__.py"
    return init if init.is_file() else None


@lru_cache(maxsize=1024)
def _names_in(path: Path, module: str, mtime_ns: int) -> frozenset[str]:
    """Dotted names a file imports anywhere, in functions and through `import_module("…")` too."""
    try:
        tree = ast.parse(path.read_bytes(), filename=str(path))
    except SyntaxError as error:
        raise CodeClosureError(f"{path}:{error.lineno} does not parse: {error.msg}") from error
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            names.update(_from_names(node, package))
        elif isinstance(node, ast.Call):
            names.update(_dynamic_names(node))
    return frozenset(names)


def _from_names(node: ast.ImportFrom, package: str) -> Iterable[str]:
    """`from a.b import c`: `a.b`, and `a.b.c` in case it is a module."""
    base = node.module or ""
    if node.level:
        above = package.split(".")[: len(package.split(".")) - node.level + 1]
        base = ".".join([*above, *([node.module] if node.module else [])])
    return [base, *(f"{base}.{alias.name}" for alias in node.names)]


def _dynamic_names(node: ast.Call) -> Iterable[str]:
    """A string constant handed to a call named `import_module`."""
    name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
    if name != "import_module":
        return []
    return [a.value for a in node.args if isinstance(a, ast.Constant) and isinstance(a.value, str)]


def _ancestors(module: str) -> Iterable[str]:
    """`a.b.c` → `a`, `a.b`, `a.b.c`: importing a module runs the packages above it."""
    parts = module.split(".")
    return [".".join(parts[: n + 1]) for n in range(len(parts))]


def _data_files(folder: Path, *, python: bool) -> Iterable[Path]:
    """Files a module may read from beside itself."""
    for path in folder.rglob("*"):
        if path.is_file() and "__pycache__" not in path.parts:
            if path.suffix in (".pyc", ".so") or (path.suffix == ".py" and not python):
                continue
            yield path


def code_closure(modules: Iterable[str], root: Path | None = None) -> dict[str, str]:
    """Sha256 by relative path of every file of ours that `modules` reach through imports.

    The folder of the first module counts with all its files (templates, code that is copied and
    not imported); profiles in `configs/` do not: their values count key by key.

    Raises:
        CodeClosureError: an entry module is missing, or a file does not parse.
    """
    root = root or project_root()
    entries = list(modules)
    paths: set[Path] = set()
    waiting, seen = list(entries), set(entries)
    while waiting:
        module = waiting.pop()
        path = _module_path(module, root)
        if path is None:
            if module in entries:
                raise CodeClosureError(f"module {module} is not under {root}")
            continue
        paths.add(path)
        for name in _names_in(path, module, path.stat().st_mtime_ns):
            new = {m for m in _ancestors(name) if _module_path(m, root) is not None} - seen
            seen |= new
            waiting += new
    first = _module_path(entries[0], root)
    if first is not None and first.parent not in (root, root / "tasks"):
        paths.update(_data_files(first.parent, python=True))
    return {path.relative_to(root).as_posix(): hash_file(path) for path in sorted(paths)}
