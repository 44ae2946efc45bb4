"""The root of an enrolled device in a folder, and the two scripts that change it."""

import shutil
import subprocess
import sys

import pytest

from tasks.artifacts import hash_file

RELEASE = "# R36 (release), REVISION: 4.3, GCID: 1, BOARD: generic\n"


@pytest.fixture
def root(tmp_path, package):
    """The root of an enrolled device."""
    root = tmp_path / "root"
    for folder in ("etc/rl-pipeline", "proc"):
        (root / folder).mkdir(parents=True)
    (root / "etc/nv_tegra_release").write_text(RELEASE)
    (root / "proc/meminfo").write_text("MemAvailable: 6000000 kB\n")
    shutil.copy(package.pin, root / "etc/rl-pipeline/allowed_signers")
    return root


def install(bundle, root, *options):
    """`install.sh` of a bundle."""
    command = [bundle / "install.sh", "--root", root, "--python", sys.executable, *options]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)


def bundle_sha(bundle):
    """The name of a bundle's release."""
    return hash_file(bundle / "manifest.json")[:12]


def app(root):
    """The folder of the agent."""
    return root / "opt/rl-pipeline/agent"


def uninstall(root, *options, script=None):
    """`uninstall.sh` of the current release, or another."""
    script = script or app(root) / "current/uninstall.sh"
    command = [script, "--root", root, *options]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
