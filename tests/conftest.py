"""Options and markers every test knows."""

import os
import shutil
import signal
from pathlib import Path

import pytest

EXTRA_PATHS = ("/usr/sbin", "/sbin", *map(str, Path("/usr/lib/postgresql").glob("*/bin")))


def pytest_addoption(parser):
    parser.addoption("--figure", default=None, help="run only the tests of this promised figure")


def pytest_configure(config):
    config.addinivalue_line("markers", "figure(name): measures a promised figure of tests/figures")
    config.addinivalue_line("markers", "needs(program, ...): drives these programs for real")
    os.environ["PATH"] = os.pathsep.join([os.environ["PATH"], *EXTRA_PATHS])
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        # Started in the background of a script (`nohup make test &`), where Ctrl-C is ignored by
        # whole process trees: tests press it.
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(config, items):
    wanted = config.getoption("--figure")
    if wanted is None:
        return
    chosen = [i for i in items if any(wanted in m.args for m in i.iter_markers("figure"))]
    config.hook.pytest_deselected(items=[i for i in items if i not in chosen])
    items[:] = chosen


def pytest_runtest_setup(item):
    """A missing program is a failure in CI and a skip that names the remedy elsewhere."""
    programs = [p for m in item.iter_markers("needs") for p in m.args]
    missing = [p for p in programs if shutil.which(p) is None]
    if missing:
        message = f"{', '.join(missing)} missing: `make system` installs what tests drive"
        (pytest.fail if os.environ.get("CI") else pytest.skip)(message)
