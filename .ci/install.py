"""Installs requirements.lock and this project into the running environment, showing progress."""

import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PIP = [sys.executable, "-m", "pip", "install", "--disable-pip-version-check"]
STEPS = ("Collecting ", "Downloading ", "Building wheel", "Installing collected", "Successfully")


def install(label: str, arguments: list[str]) -> int:
    """Run pip, one short line for each package; the whole output where it fails."""
    started_s = time.monotonic()
    process = subprocess.Popen(
        [*PIP, *arguments],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )
    seen: list[str] = []
    collected = 0
    if process.stdout is None:
        raise RuntimeError("pip was started without a pipe")
    for line in process.stdout:
        seen.append(line)
        text = line.strip()
        collected += text.startswith(("Collecting ", "Requirement already"))
        if text.startswith(STEPS):
            elapsed_s = time.monotonic() - started_s
            sys.stdout.write(f"  [{elapsed_s:5.0f} s] {label} {collected:3d}  {text[:90]}\n")
            sys.stdout.flush()
    code = process.wait()
    if code:
        sys.stderr.write("".join(seen[-60:]))
        sys.stderr.write(f"\npip stopped with {code} while installing {label}; see above\n")
    return code


def main() -> int:
    """The lock, then vLLM and the project itself without dependencies."""
    code = install("lock", ["-r", "requirements.lock"])
    code = code or install("vLLM", ["--no-deps", "-r", vllm_requirements()])
    return code or install("project", ["--no-deps", "--no-build-isolation", "-e", "."])


def vllm_requirements() -> str:
    """The file of the vLLM that fits the torch just installed."""
    import torch

    return f"requirements-vllm-{'cuda' if torch.version.cuda else 'cpu'}.txt"


if __name__ == "__main__":
    raise SystemExit(main())
