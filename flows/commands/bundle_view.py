"""What `rl-pipeline serve` and `verify` do with a bundle."""

import json
import os
from pathlib import Path

from rich.markup import escape

from deployment.jetson import signing
from deployment.jetson.facts import KEY_DIR
from deployment.jetson.on_device import verify
from flows.commands.console import console


class NoBundleError(FileNotFoundError):
    """There is no bundle where one was asked for."""


def find_bundle(path: Path) -> Path:
    """The bundle meant: its folder or archive, a package stage's folder, or a run's folder.

    Raises:
        NoBundleError: none of these; says what is there and what to do.
    """
    if path.is_file() and path.name.endswith(".tar.gz"):
        return path
    for folder in (path, path / "bundle"):
        if (folder / verify.MANIFEST).is_file():
            return folder
    summary = path / "summary.json"
    if summary.is_file():
        named = (json.loads(summary.read_bytes()).get("bundle") or {}).get("path")
        if named is None:
            raise NoBundleError(f"{path}: this run made no bundle; finish it: rl-pipeline run")
        for base in (Path(), *path.resolve().parents):
            bundle = base / str(named)
            if (bundle / verify.MANIFEST).is_file():
                return bundle
    what = f"holds no {verify.MANIFEST}" if path.is_dir() else "is no folder"
    raise NoBundleError(f"{path} {what}; give a bundle folder or a run's folder, as in runs/latest")


def pinned_keys(given: Path | None) -> Path:
    """The file of pinned keys: as given, else beside the key that runs sign with.

    Raises:
        NoBundleError: there is none.
    """
    named = os.environ.get(signing.KEY_VARIABLE)
    path = given or (Path(named).parent if named else KEY_DIR) / signing.PIN_NAME
    if not path.is_file():
        raise NoBundleError(
            f"no pinned keys at {path}; give --allowed-signers FILE, the one the device was "
            "enrolled with. A bundle never brings its own trust"
        )
    return path


def verify_and_show(path: Path, allowed_signers: Path | None) -> None:
    """Check a bundle and say what it holds."""
    from deployment.jetson.serve import verified

    bundle, pinned = find_bundle(path), pinned_keys(allowed_signers)
    with verified(bundle, pinned) as (_, manifest):
        console().print(
            f"[green]good[/]: {escape(str(bundle))}, {len(manifest['files'])} files unchanged, "
            f"signed by a key in {escape(str(pinned))}",
            soft_wrap=True,
        )


def serve_bundle(path: Path, allowed_signers: Path | None, port: int, host: str) -> None:
    """Verify a bundle and answer chat requests until Ctrl-C."""
    from deployment.jetson.serve import RunningAgent, serve

    bundle, pinned = find_bundle(path), pinned_keys(allowed_signers)
    out = console()
    told: set[str] = set()

    def progress(message: str, _seconds: float) -> None:
        if message not in told:
            told.add(message)
            out.print(f"[dim]{escape(message)}[/]")

    def ready(agent: RunningAgent) -> None:
        body = '{"messages": [{"role": "user", "content": "34*7-52=?"}]}'
        out.print(
            f"serving {escape(str(bundle))} on {agent.url}; Ctrl-C ends it. In another shell:\n"
            f"  curl {agent.url}/v1/chat/completions -H 'Content-Type: application/json' \\\n"
            f"    -d '{escape(body)}'",
            soft_wrap=True,
        )

    serve(bundle, pinned, port=port, host=host, on_progress=progress, on_ready=ready)
