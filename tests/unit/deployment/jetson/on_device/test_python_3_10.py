"""The bundle's code on the Python that JetPack 6 has, where one is installed here."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from deployment.jetson.stage import FROM_TRAINING, ON_DEVICE

SOURCES = [name for name in (*ON_DEVICE, *FROM_TRAINING) if name.endswith(".py")]
ALONE = ["-S", "-E", "-B"]


def _python_3_10():
    """An interpreter that really is 3.10: on the path, or among pyenv's."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    found = [shutil.which("python3.10"), *map(str, pyenv.glob("versions/3.10.*/bin/python3.10"))]
    for program in filter(None, found):
        command = [program, "-c", "import sys; print(sys.version_info[:2] == (3, 10))"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.stdout == "True\n":
            return program
    return None


@pytest.fixture(scope="module")
def python():
    """Its path; without one these tests say so (Debian has no package of it to install)."""
    found = _python_3_10()
    if found is None:
        message = "Python 3.10 missing: install it (pyenv install 3.10) to try what a JetPack 6 has"
        pytest.skip(message)
    return found


def test_every_module_imports_with_nothing_but_the_standard_library(package, python):
    names = ", ".join(Path(name).stem for name in SOURCES)
    command = [python, *ALONE, "-c", f"import sys; sys.path.insert(0, '.'); import {names}"]
    done = subprocess.run(
        command, cwd=package.bundle, capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert not list(package.bundle.rglob("*.pyc"))


def test_the_verifier_runs(package, python):
    command = [python, *ALONE, str(package.bundle / "verify.py"), str(package.bundle)]
    command += ["--allowed-signers", str(package.pin)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stderr.startswith("good: agent")) == (0, True), done.stderr


def test_the_agent_answers_its_golden_prompts(package, python):
    """Agent and smoke test in 3.10; the model server in the interpreter that has llama_cpp."""
    command = [python, *ALONE, str(package.bundle / "smoke.py"), "--python", sys.executable]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=240)
    assert done.returncode == 0, done.stderr
    assert "2 golden prompts" in done.stderr


def test_preflight_runs(package, python, tmp_path):
    command = [python, *ALONE, str(package.bundle / "preflight.py"), "--skip-hardware"]
    command += ["--root", str(tmp_path), "--target", str(tmp_path), "--python", sys.executable]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
