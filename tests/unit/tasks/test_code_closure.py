"""The import closure, on a small project written for each test."""

import pytest

from tasks.code_closure import CodeClosureError, code_closure


@pytest.fixture
def project(tmp_path):
    """A stage, a relative import, a helper of the helper, a lazy and a dynamic import."""
    files = {
        "tasks/__init__.py": "",
        "tasks/rl/__init__.py": "",
        "tasks/rl/stage.py": "from . import losses\n\ndef run():\n    from tasks import lazy\n",
        "tasks/rl/losses.py": "from tasks.artifacts.record import Record\n",
        "tasks/rl/notes.md": "kept beside the code",
        "tasks/artifacts/__init__.py": "",
        "tasks/artifacts/record.py": "Record = dict\n",
        "tasks/artifacts/other.py": "x = 1\n",
        "tasks/lazy.py": "import importlib\nimportlib.import_module('quantize.merge')\n",
        "tasks/unrelated.py": "import tasks.rl.stage\n",
        "quantize/__init__.py": "",
        "quantize/merge.py": "import configs.schema\n",
        "configs/__init__.py": "",
        "configs/schema.py": "",
        "configs/calculator.yaml": "rl: {}",
    }
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path


def test_closure_follows_relative_lazy_and_dynamic_imports_and_packages_above(project):
    assert set(code_closure(["tasks.rl.stage"], project)) == {
        "tasks/__init__.py",
        "tasks/rl/__init__.py",
        "tasks/rl/stage.py",
        "tasks/rl/losses.py",
        "tasks/rl/notes.md",
        "tasks/artifacts/__init__.py",
        "tasks/artifacts/record.py",
        "tasks/lazy.py",
        "quantize/__init__.py",
        "quantize/merge.py",
        "configs/__init__.py",
        "configs/schema.py",
    }


@pytest.mark.parametrize(
    ("changed", "noticed"),
    [
        ("tasks/artifacts/record.py", True),  # a helper of a helper
        ("quantize/merge.py", True),
        ("tasks/rl/notes.md", True),
        ("tasks/artifacts/other.py", False),
        ("tasks/unrelated.py", False),
        ("configs/calculator.yaml", False),
    ],
)
def test_a_change_is_noticed_exactly_where_the_code_is_reached(project, changed, noticed):
    before = code_closure(["tasks.rl.stage"], project)
    (project / changed).write_text("changed = True\n")
    assert (code_closure(["tasks.rl.stage"], project) != before) is noticed


def test_a_cycle_of_imports_ends(project):
    (project / "tasks/artifacts/record.py").write_text("import tasks.rl.losses\n")
    assert "tasks/rl/losses.py" in code_closure(["tasks.artifacts.record"], project)


def test_missing_entry_and_unparsable_file_are_named(project):
    with pytest.raises(CodeClosureError, match=r"tasks\.gone"):
        code_closure(["tasks.gone"], project)
    (project / "tasks/rl/losses.py").write_text("def (:\n")
    with pytest.raises(CodeClosureError, match=r"losses\.py:1"):
        code_closure(["tasks.rl.stage"], project)
