"""The agent on the device: an OpenAI-style endpoint on loopback that finishes tool calls itself.

Standard library only, Python 3.10.

    python3 -S -E -B agent.py --bundle DIR --port 8080 --python /path/to/venv/bin/python

`POST /v1/chat/completions` (`stream` too), `GET /v1/models`, `GET /health` (503 while the model
loads, 200 after; with the release that is served), `POST /extras/tokenize`. Tools named in a request that the bundle does not own
are shown to the model and come back as `tool_calls` for the client to answer.
"""

import argparse
import hashlib
import http.client
import http.server
import ipaddress
import json
import logging
import os
import signal
import sys
import threading
from pathlib import Path
from urllib.parse import urlsplit

try:
    from deployment.jetson.on_device.conversation import (
        AgentSettings,
        RequestError,
        as_chunks,
        complete,
    )
    from deployment.jetson.on_device.llama_child import ChildError, LlamaChild
except ModuleNotFoundError:  # beside this file on the device
    from conversation import (  # type: ignore[import-not-found,no-redef]
        AgentSettings,
        RequestError,
        as_chunks,
        complete,
    )
    from llama_child import ChildError, LlamaChild  # type: ignore[import-not-found,no-redef]

log = logging.getLogger("agent")
MAX_WAITING = 8
"""Requests being answered or waiting; one more is told to come back later."""
SOCKET_TIMEOUT_S = 60
LOOPBACK_NAMES = ("127.0.0.1", "localhost", "::1")


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _hostname(address: str) -> "str | None":
    try:
        return urlsplit(address).hostname
    except ValueError:
        return None


class Front(http.server.ThreadingHTTPServer):
    """The listening socket and what every request needs."""

    daemon_threads = True
    allow_reuse_address = True

    def __init__(
        self, address: "tuple[str, int]", child: LlamaChild, manifest: dict, release: str
    ) -> None:
        self.child = child
        self.release = release
        self.settings = AgentSettings.from_manifest(manifest)
        serving = manifest["serving"]
        self.max_request_bytes = serving["max_request_bytes"]
        self.turn_timeout_s = serving["turn_timeout_s"]
        self.slots = threading.BoundedSemaphore(MAX_WAITING)
        super().__init__(address, Handler)


class Handler(http.server.BaseHTTPRequestHandler):
    """One connection."""

    protocol_version = "HTTP/1.1"
    server_version = "rl-pipeline-agent"
    sys_version = ""
    timeout = SOCKET_TIMEOUT_S
    server: Front

    def do_GET(self) -> None:
        """`/health` and `/v1/models`."""
        self._guarded(self._get)

    def do_POST(self) -> None:
        """`/v1/chat/completions` and `/extras/tokenize`."""
        self._guarded(self._post)

    def log_message(self, format: str, *args: object) -> None:
        """Requests go to the log at debug level: no prompt text, no noise."""
        log.debug("%s %s", self.address_string(), format % args)

    def _guarded(self, handle) -> None:
        try:
            self._check_origin()
            handle()
        except RequestError as error:
            self._error(error)
        except (BrokenPipeError, ConnectionResetError):
            self.close_connection = True

    def _check_origin(self) -> None:
        """A web page elsewhere must not reach the agent through the user's browser."""
        asked = ["//" + self.headers.get("Host", "localhost"), *self.headers.get_all("Origin", [])]
        if not all(_hostname(address) in LOOPBACK_NAMES for address in asked):
            self.close_connection = True
            raise RequestError("only pages and clients on this machine may ask", 403, "forbidden")

    def _get(self) -> None:
        path = urlsplit(self.path).path
        if path == "/health":
            ready = self.server.child.ready
            status = "ok" if ready else "loading"
            self._json(200 if ready else 503, {"status": status, "release": self.server.release})
        elif path == "/v1/models":
            self._forward("GET", None)
        else:
            raise RequestError(f"no such path {path}", 404, "not_found")

    def _post(self) -> None:
        path = urlsplit(self.path).path
        body = self._body()
        if path not in ("/v1/chat/completions", "/extras/tokenize"):
            raise RequestError(f"no such path {path}", 404, "not_found")
        if not self.server.child.ready:
            raise RequestError("the model is still loading", 503, "unavailable")
        if not self.server.slots.acquire(blocking=False):
            raise RequestError("too many requests at once; try again", 429, "rate_limited")
        try:
            if path == "/extras/tokenize":
                self._forward("POST", body)
            else:
                self._chat(body)
        finally:
            self.server.slots.release()

    def _body(self) -> bytes:
        length = self.headers.get("Content-Length", "")
        if not length.isdecimal() or self.headers.get("Transfer-Encoding") is not None:
            self.close_connection = True
            raise RequestError("Content-Length is needed", 411, "length_required")
        if int(length) > self.server.max_request_bytes:
            self.close_connection = True
            limit = self.server.max_request_bytes
            raise RequestError(f"the body is over {limit} bytes", 413, "too_large")
        body = self.rfile.read(int(length))
        if len(body) != int(length):
            self.close_connection = True
            raise RequestError("the body is shorter than Content-Length says")
        return body

    def _chat(self, body: bytes) -> None:
        try:
            request = json.loads(body)
        except (ValueError, RecursionError) as error:
            raise RequestError(f"the body is not JSON: {error}") from None
        ask = self.server.child.asker(self.server.turn_timeout_s)
        response = complete(request, self.server.settings, ask)
        if request.get("stream"):
            self._stream(as_chunks(response))
        else:
            self._json(200, response)

    def _forward(self, method: str, body: "bytes | None") -> None:
        try:
            path = urlsplit(self.path).path
            status, raw = self.server.child.request(method, path, body, SOCKET_TIMEOUT_S)
        except (OSError, http.client.HTTPException):
            raise RequestError("the model server is not ready", 503, "unavailable") from None
        self._send(status, raw, "application/json")

    def _stream(self, chunks: "list[dict]") -> None:
        lines = [f"data: {json.dumps(chunk)}\n\n" for chunk in chunks] + ["data: [DONE]\n\n"]
        self._send(200, "".join(lines).encode(), "text/event-stream")

    def _error(self, error: RequestError) -> None:
        kind = "invalid_request_error" if error.status < 500 else "server_error"
        value = {"message": error.message, "type": kind, "param": None, "code": error.code}
        self._json(error.status, {"error": value})

    def _json(self, status: int, value: dict) -> None:
        self._send(status, json.dumps(value).encode(), "application/json")

    def _send(self, status: int, body: bytes, kind: str) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(body)


def _parse(argv: "list[str] | None") -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    here = Path(__file__).resolve().parent
    parser.add_argument("--bundle", type=Path, default=here)
    parser.add_argument("--host", default="127.0.0.1", help="a loopback address")
    parser.add_argument("--port", type=int, default=8080)
    parser.add_argument("--quant", help="a quantisation of the bundle; its default otherwise")
    parser.add_argument("--python", default="python3", help="an interpreter that has llama_cpp")
    parser.add_argument("--deadline", type=float, default=300, help="seconds to load the model")
    parser.add_argument("--threads", type=int, default=max(1, (os.cpu_count() or 2) // 2))
    parser.add_argument(
        "--with-stdin", action="store_true", help="stop when standard input closes (used by serve)"
    )
    parser.add_argument("--verbose", action="store_true")
    return parser.parse_args(argv)


def _stop_with_stdin(stop: threading.Event) -> None:
    while os.read(0, 4096):
        pass
    stop.set()


def run(options: argparse.Namespace) -> int:
    """Serve until told to stop; 1 where the model server failed, 2 where the options are wrong."""
    if not _is_loopback(options.host):
        log.error("--host %s: only a loopback address is allowed; use an SSH tunnel", options.host)
        return 2
    raw = (options.bundle / "manifest.json").read_bytes()
    manifest, release = json.loads(raw), hashlib.sha256(raw).hexdigest()
    quant = options.quant or manifest["default"]
    if quant not in manifest["models"]:
        log.error("--quant %s: have %s", quant, ", ".join(sorted(manifest["models"])))
        return 2
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    model = (options.bundle / manifest["models"][quant]["file"]).resolve()
    name = manifest["name"]
    try:
        child = LlamaChild(options.python, model, manifest["serving"], name, options.threads)
    except ChildError as error:
        log.error("%s", error)
        return 2
    try:
        front = Front((options.host, options.port), child, manifest, release)
    except OSError as error:
        child.stop()
        log.error("cannot listen on %s:%d: %s", options.host, options.port, error.strerror)
        return 2
    if options.with_stdin:
        threading.Thread(target=_stop_with_stdin, args=(stop,), daemon=True).start()
    threading.Thread(target=front.serve_forever, daemon=True).start()
    try:
        child.wait_ready(options.deadline, stop)
        log.info("ready: http://%s:%d/v1 serves %s (%s)", *front.server_address[:2], name, quant)
        while not stop.wait(0.2):
            if child.exited() is not None:
                raise child.failure()
    except ChildError as error:
        log.error("%s", error)
        return 1
    finally:
        front.shutdown()
        front.server_close()
        child.stop()
    return 0


def main(argv: "list[str] | None" = None) -> int:
    """Command line."""
    options = _parse(argv)
    level = logging.DEBUG if options.verbose else logging.INFO
    logging.basicConfig(level=level, format="%(name)s: %(message)s", stream=sys.stderr)
    return run(options)


if __name__ == "__main__":
    sys.exit(main())
