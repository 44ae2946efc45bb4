"""Lock, guard and arrows hold for what is committed."""

import re
import subprocess
import sys
from pathlib import Path

from configs.keys import all_keys
from flows.cli import app
from flows.commands.config_view import markdown

ROOT = Path(__file__).resolve().parents[2]


def pins(name: str) -> list[str]:
    lines = (ROOT / name).read_text(encoding="utf-8").splitlines()
    return [line for line in lines if line and not line.startswith("#")]


def test_the_lock_is_exact_pins_only() -> None:
    for pin in pins("requirements.lock"):
        assert re.fullmatch(r"[A-Za-z0-9._-]+==[A-Za-z0-9.]+", pin), pin


def test_the_lock_has_one_torch_and_none_of_its_companions() -> None:
    locked = pins("requirements.lock")
    assert "torch==2.13.0" in locked
    names = {pin.split("==")[0] for pin in locked}
    assert names & {"torchvision", "torchaudio", "torchcodec", "vllm"} == set()


def test_the_lock_holds_everything_asked_for() -> None:
    def key(name: str) -> str:
        return re.sub(r"[-_.]+", "-", name).lower()

    locked = {key(pin.split("==")[0]) for pin in pins("requirements.lock")}
    asked = {key(re.split(r"[<>=!#\s]", line)[0]) for line in pins("requirements.in")}
    assert asked - locked == set()


def guard(*paths: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / ".ci/guard.py"), *map(str, paths)]
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)


def test_the_guard_refuses_large_files_and_paths_of_one_machine(tmp_path: Path) -> None:
    large, local, good = tmp_path / "large.txt", tmp_path / "local.py", tmp_path / "good.py"
    large.write_bytes(b"x" * (512 * 1024 + 1))
    local.write_text(f"PATH = '{'/'}home/someone/data'\n")
    good.write_text("PATH = 'runs/latest'\n")
    done = guard(large, local, good)
    assert done.returncode == 1
    assert "524289 bytes" in done.stdout and f"{local}:1" in done.stdout
    assert "good.py" not in done.stdout
    assert guard(good).returncode == 0


def test_what_is_committed_passes_the_guard() -> None:
    done = guard()
    assert done.returncode == 0, done.stdout


def test_the_arrows_hold() -> None:
    command = [str(Path(sys.executable).with_name("lint-imports"))]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, cwd=ROOT,
        env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:]


def test_licence_is_apache() -> None:
    text = (ROOT / "LICENSE").read_text(encoding="utf-8")
    assert "Apache License" in text and "Version 2.0, January 2004" in text
    assert "END OF TERMS AND CONDITIONS" in text


def test_the_configuration_page_is_that_of_the_schema() -> None:
    page = (ROOT / "docs/configuration.md").read_text(encoding="utf-8")
    assert page.endswith(markdown(all_keys())), "the schema changed: make docs"


def test_links_between_documents_lead_somewhere() -> None:
    for page in (*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")):
        for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text(encoding="utf-8")):
            assert (page.parent / target).exists(), f"{page.name}: {target}"


def test_commands_in_the_readme_are_commands_there_are() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    named = set(re.findall(r"rl-pipeline ([a-z]+)", text))
    commands = {c.name or c.callback.__name__ for c in app.registered_commands if c.callback}
    commands |= {str(group.name) for group in app.registered_groups}
    assert named <= commands
    targets = set(re.findall(r"^([a-z0-9-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"`make ([a-z0-9-]+)`", text)) <= targets
