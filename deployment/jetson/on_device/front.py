"""The agent's HTTP front: who may ask, what is asked, and what is counted and kept of it.

Standard library only, Python 3.10.
"""

import http.client
import http.server
import json
import logging
import threading
import time
from dataclasses import dataclass
from urllib.parse import urlsplit

try:
    from deployment.jetson.on_device.api_key import allows
    from deployment.jetson.on_device.conversation import (
        AgentSettings,
        RequestError,
        as_chunks,
        complete,
    )
    from deployment.jetson.on_device.field_log import HEADER, WISHES, FieldLog
    from deployment.jetson.on_device.llama_child import LlamaChild
    from deployment.jetson.on_device.metrics import CONTENT_TYPE, Metrics
except ModuleNotFoundError:  # beside this file on the device
    from api_key import allows  # type: ignore[import-not-found,no-redef]
    from conversation import (  # type: ignore[import-not-found,no-redef]
        AgentSettings,
        RequestError,
        as_chunks,
        complete,
    )
    from field_log import HEADER, WISHES, FieldLog  # type: ignore[import-not-found,no-redef]
    from llama_child import LlamaChild  # type: ignore[import-not-found,no-redef]
    from metrics import CONTENT_TYPE, Metrics  # type: ignore[import-not-found,no-redef]

log = logging.getLogger("agent")
MAX_WAITING = 8
"""Requests being answered or waiting; one more is told to come back later."""
SOCKET_TIMEOUT_S = 60
LOOPBACK_NAMES = ("127.0.0.1", "localhost", "::1")


def _hostname(address: str) -> "str | None":
    try:
        return urlsplit(address).hostname
    except ValueError:
        return None


@dataclass(frozen=True)
class Served:
    """What a front serves, and whom."""

    child: LlamaChild
    manifest: dict
    release: str
    """Sha256 of the manifest."""
    quant: str
    api_key: "str | None"
    """None lets every program on this machine ask."""
    field_log: FieldLog


class Front(http.server.ThreadingHTTPServer):
    """The listening socket and what every request needs."""

    daemon_threads = True
    allow_reuse_address = True

    def __init__(self, address: "tuple[str, int]", served: Served) -> None:
        self.child, self.release, self.api_key = served.child, served.release, served.api_key
        self.field_log = served.field_log
        self.metrics = Metrics(served.release, served.quant)
        self.settings = AgentSettings.from_manifest(served.manifest)
        serving = served.manifest["serving"]
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
        """`/health`, `/metrics` and `/v1/models`."""
        self._guarded(self._get)

    def do_POST(self) -> None:
        """`/v1/chat/completions` and `/extras/tokenize`."""
        self._guarded(self._post)

    def log_message(self, format: str, *args: object) -> None:
        """Requests go to the log at debug level: no prompt text, no noise."""
        log.debug("%s %s", self.address_string(), format % args)

    def _guarded(self, handle) -> None:
        start_s, self._status = time.monotonic(), 0
        self.server.metrics.begin()
        try:
            self._check_origin()
            self._check_key()
            handle()
        except RequestError as error:
            self._error(error)
        except (BrokenPipeError, ConnectionResetError):
            self.close_connection = True
        finally:
            path = urlsplit(self.path).path
            self.server.metrics.end(path, self._status, time.monotonic() - start_s)

    def _check_key(self) -> None:
        """Everything but `/health` needs the key, where there is one."""
        key = self.server.api_key
        if key is None or urlsplit(self.path).path == "/health":
            return
        if not allows(self.headers.get("Authorization"), key):
            self.close_connection = True
            raise RequestError("the API key is missing or wrong", 401, "invalid_api_key")

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
        elif path == "/metrics":
            page = self.server.metrics.render(ready=self.server.child.ready)
            self._send(200, page.encode(), CONTENT_TYPE)
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
        start_s, said = time.monotonic(), self.headers.get(HEADER)
        opted_in = self.server.field_log.wish(said)
        if opted_in is None:
            raise RequestError(f"{HEADER}: {said!r}, expected one of {', '.join(WISHES)}")
        request, response, code = None, None, None
        try:
            request = _parsed(body)
            ask = self.server.child.asker(self.server.turn_timeout_s)
            response = complete(request, self.server.settings, ask)
            self._count_tokens(response["usage"])
            if request.get("stream"):
                self._stream(as_chunks(response))
            else:
                self._json(200, response)
        except RequestError as error:
            code = error.code
            raise
        finally:
            self._keep(request, response, code, time.monotonic() - start_s, opted_in)

    def _count_tokens(self, usage: dict) -> None:
        for name in ("prompt_tokens", "completion_tokens"):
            self.server.metrics.count(name, usage[name])

    def _keep(
        self,
        request: object,
        response: "dict | None",
        code: "str | None",
        seconds: float,
        opted_in: bool,
    ) -> None:
        """One row of the field log, where it is on."""
        field_log = self.server.field_log
        if not field_log.enabled:
            return
        row = {
            "time": time.time(),
            "messages": request.get("messages") if isinstance(request, dict) else None,
            "answer": None if response is None else _said(response),
            "latency_s": round(seconds, 6),
            "error": code,
            "release": self.server.release,
            "opted_in": opted_in,
        }
        kept = field_log.add(row)
        self.server.metrics.count("field_rows" if kept else "field_log_failures", 1)

    def _forward(self, method: str, body: "bytes | None") -> None:
        try:
            path = urlsplit(self.path).path
            status, raw = self.server.child.forward(method, path, body, SOCKET_TIMEOUT_S)
        except (OSError, http.client.HTTPException):
            raise RequestError("the model server is not ready", 503, "unavailable") from None
        self._send(status, raw, "application/json")

    def _stream(self, chunks: "list[dict]") -> None:
        lines = [f"data: {json.dumps(chunk)}\n\n" for chunk in chunks] + ["data: [DONE]\n\n"]
        self._send(200, "".join(lines).encode(), "text/event-stream")

    def _error(self, error: RequestError) -> None:
        self.server.metrics.error(error.code)
        kind = "invalid_request_error" if error.status < 500 else "server_error"
        value = {"message": error.message, "type": kind, "param": None, "code": error.code}
        self._json(error.status, {"error": value})

    def _json(self, status: int, value: dict) -> None:
        self._send(status, json.dumps(value).encode(), "application/json")

    def _send(self, status: int, body: bytes, kind: str) -> None:
        self._status = status
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        if status == 401:
            self.send_header("WWW-Authenticate", "Bearer")
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(body)


def _parsed(body: bytes) -> dict:
    """The JSON object of a request.

    Raises:
        RequestError: not JSON, or no object.
    """
    try:
        request = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"the body is not JSON: {error}") from None
    if not isinstance(request, dict):
        raise RequestError("the body must be a JSON object")
    return request


def _said(response: dict) -> str:
    """The answer as text; tool calls left to the client as JSON."""
    message = response["choices"][0]["message"]
    if message["content"] is None:
        return json.dumps(message["tool_calls"], ensure_ascii=False)
    return message["content"]
