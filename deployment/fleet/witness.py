"""Asks a device's endpoint from here, through the tunnel: what the device says is not believed."""

import http.client
import json
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

from deployment.fleet.errors import UnhealthyReleaseError, WrongReleaseError
from deployment.fleet.ssh import Shell
from deployment.jetson.on_device.smoke import SmokeError, smoke

ANSWER_S = 300.0


class _TunnelConnection(http.client.HTTPConnection):
    """HTTP over the socket a tunnel begins at."""

    def __init__(self, path: Path) -> None:
        super().__init__("localhost", timeout=ANSWER_S)
        self._path = path

    def connect(self) -> None:
        """Open the socket."""
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(ANSWER_S)
        self.sock.connect(str(self._path))


def _ask(
    path: Path, method: str, target: str, body: dict[str, Any] | None, key: str | None
) -> tuple[int, Any]:
    """(status, JSON) of one request."""
    connection = _TunnelConnection(path)
    headers = {"Content-Type": "application/json", "X-RL-Pipeline-Field-Log": "opt-out"}
    if key:
        headers["Authorization"] = f"Bearer {key}"
    try:
        raw = None if body is None else json.dumps(body)
        connection.request(method, target, raw, headers)
        response = connection.getresponse()
        return response.status, json.loads(response.read())
    finally:
        connection.close()


def poster(path: Path, key: str | None) -> Callable[[str, dict[str, Any]], dict[str, Any]]:
    """What `smoke` asks with."""

    def post(target: str, body: dict[str, Any]) -> dict[str, Any]:
        try:
            status, value = _ask(path, "POST", target, body, key)
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise SmokeError(f"{target} does not answer: {error}") from None
        if status != 200 or not isinstance(value, dict):
            raise SmokeError(f"{target} answered {status}: {str(value)[:300]}")
        return value

    return post


def served_release(shell: Shell) -> str | None:
    """The release whose agent answers on the device, None where none does or it does not say."""
    with shell.tunnel(shell.device.serve_port) as path:
        return _health(path)


def _health(path: Path) -> str | None:
    try:
        status, value = _ask(path, "GET", "/health", None, None)
    except (OSError, http.client.HTTPException, ValueError):
        return None
    release = value.get("release") if isinstance(value, dict) else None
    return release if status == 200 and isinstance(release, str) else None


def confirm(
    shell: Shell, release: str, golden: dict[str, Any] | None, key: str | None = None
) -> str:
    """The endpoint serves `release` and answers its golden prompts; one line that says so.

    Raises:
        WrongReleaseError: it serves another, or does not answer.
        UnhealthyReleaseError: a golden prompt is answered otherwise.
    """
    name = shell.device.name
    with shell.tunnel(shell.device.serve_port) as path:
        found = _health(path)
        if found != release:
            serves = f"serves {found[:12]}" if found else "does not answer"
            raise WrongReleaseError(
                f"{name} reports {release[:12]}, but its endpoint {serves}; the device cannot be "
                "believed: look at what holds its port, then deploy again"
            )
        if golden is None:
            return "the endpoint serves it"
        try:
            return smoke(golden, poster(path, key))
        except SmokeError as error:
            raise UnhealthyReleaseError(f"{name}, asked from here: {error}") from None
