"""Asks a served agent: which release it is, whether it answers as recorded, how fast it is."""

import http.client
import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from deployment.fleet.on_device.places import DeviceError, Places, release_hash
from deployment.jetson.on_device import preflight as check
from deployment.jetson.on_device.api_key import ApiKeyError, read_key
from deployment.jetson.on_device.settings import KEY_FILE

LOOPBACK = "127.0.0.1"
SPEED_PROMPTS = 3
_ASK_S = 10.0
_ANSWER_S = 300.0
_POLL_S = 0.1


def _request(port: int, method: str, path: str, body: "bytes | None", root: Path, wait_s: float):
    headers = {"Content-Type": "application/json", "X-RL-Pipeline-Field-Log": "opt-out"}
    if path != "/health" and (key := client_key(root)) is not None:
        headers["Authorization"] = f"Bearer {key}"
    connection = http.client.HTTPConnection(LOOPBACK, port, timeout=wait_s)
    try:
        connection.request(method, path, body, headers)
        response = connection.getresponse()
        return response.status, response.read()
    finally:
        connection.close()


def client_key(root: Path) -> "str | None":
    """What the device's agent wants its clients to send, None where it wants nothing.

    Raises:
        DeviceError: there is a key file, and it cannot be used.
    """
    path = root / KEY_FILE
    if not path.exists():
        return None
    try:
        return read_key(path)
    except ApiKeyError as error:
        raise DeviceError("api_key", str(error)) from None


def served(port: int, root: Path) -> dict:
    """`{"answers", "ready", "release"}` of whatever listens on the port."""
    try:
        status, raw = _request(port, "GET", "/health", None, root, _ASK_S)
    except (OSError, http.client.HTTPException):
        return {"answers": False, "ready": False, "release": None}
    try:
        release = json.loads(raw).get("release")
    except (ValueError, AttributeError):
        release = None
    release = release if isinstance(release, str) else None
    return {"answers": True, "ready": status == 200, "release": release}


def wait_served(
    port: int, root: Path, wanted: str, deadline_s: float, gave_up: Callable[[], bool]
) -> None:
    """Return once the port serves the release `wanted` (64 digits).

    Raises:
        DeviceError: `wrong_release` where another answers, `unhealthy` where none does in time.
    """
    end_s = time.monotonic() + deadline_s
    while True:
        found = served(port, root)
        if found["ready"]:
            if found["release"] == wanted:
                return
            other = found["release"] or "a release that does not say which"
            if time.monotonic() > end_s or gave_up():
                raise DeviceError(
                    "wrong_release",
                    f"port {port} serves {other[:12]}, not {wanted[:12]}; something else holds it",
                )
        elif time.monotonic() > end_s:
            raise DeviceError("unhealthy", f"port {port} was not healthy within {deadline_s:.0f} s")
        elif gave_up():
            raise DeviceError("unhealthy", "the agent ended and will not start")
        time.sleep(_POLL_S)


def rehearse(release: Path, python: str, deadline_s: float) -> str:
    """Start the release's own agent on a free port, replay its golden prompts, stop it again.

    Raises:
        DeviceError: it does not answer as recorded.
    """
    options = ["--python", python, "--deadline", str(deadline_s)]
    return _smoke(release, options, deadline_s + _ANSWER_S)


def replay(release: Path, port: int, deadline_s: float) -> str:
    """Replay the release's golden prompts against the port.

    Raises:
        DeviceError: it does not answer as recorded.
    """
    url = f"http://{LOOPBACK}:{port}"
    return _smoke(release, ["--url", url, "--deadline", str(deadline_s)], deadline_s + _ANSWER_S)


def _smoke(release: Path, options: "list[str]", limit_s: float) -> str:
    command = [sys.executable, "-S", "-E", "-B", str(release / "smoke.py")]
    command += ["--bundle", str(release), *options]
    try:
        done = subprocess.run(command, capture_output=True, timeout=limit_s, check=False)
    except subprocess.TimeoutExpired:
        raise DeviceError("golden", f"golden prompts took over {limit_s:.0f} s") from None
    said = [line for line in done.stderr.decode(errors="replace").splitlines() if line]
    if done.returncode != 0:
        raise DeviceError("golden", "golden prompts: " + "; ".join(said[-3:])[-1500:])
    return said[-1].removeprefix("smoke: ") if said else "golden prompts agree"


def speed(release: Path, port: int, root: Path) -> float:
    """Tokens generated per second over the first golden prompts, the best of them.

    The best, since the first request after a start also warms caches.

    Raises:
        DeviceError: no answer, or an answer without a count of tokens.
    """
    golden = json.loads((release / "golden_prompts.json").read_bytes())
    best = 0.0
    for prompt in golden["prompts"][:SPEED_PROMPTS]:
        body = json.dumps({"messages": prompt["messages"], "temperature": 0}).encode()
        start_s = time.monotonic()
        try:
            status, raw = _request(port, "POST", "/v1/chat/completions", body, root, _ANSWER_S)
            tokens = json.loads(raw)["usage"]["completion_tokens"] if status == 200 else None
        except (OSError, http.client.HTTPException, ValueError, KeyError, TypeError) as error:
            raise DeviceError("unhealthy", f"asking a golden prompt failed: {error}") from None
        if not isinstance(tokens, int):
            raise DeviceError("unhealthy", f"asking a golden prompt was answered with {status}")
        best = max(best, tokens / max(time.monotonic() - start_s, 1e-9))
    return best


def planned_bytes(release: Path, *, margin: bool) -> int:
    """What the release's default model is planned to need, with or without its margin."""
    manifest = json.loads((release / "manifest.json").read_bytes())
    plan = manifest["models"][manifest["default"]]["memory"]
    return plan["total_bytes"] - (0 if margin else plan.get("margin_bytes", 0))


def preflight(places: Places, release: Path, python: str, reclaim: int) -> "list[str]":
    """L4T, memory, runtime against the release's manifest; `reclaim` bytes come free on the way.

    Raises:
        DeviceError: the device cannot take it; names every check that failed.
    """
    manifest = json.loads((release / "manifest.json").read_bytes())
    try:
        return check.preflight(manifest, places.root, None, python, hardware=True, reclaim=reclaim)
    except check.PreflightError as error:
        raise DeviceError("preflight", str(error)) from None


def matches(release: Path, found: dict) -> bool:
    """Whether what `served` found is this release, ready."""
    return bool(found["ready"]) and found["release"] == release_hash(release)
