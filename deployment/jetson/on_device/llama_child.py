"""The model server as a child on a free loopback port: llama_cpp.server, or a llama-server.

Standard library only, Python 3.10. The child wants a random key that only this process knows (its
own pages allow any origin), reads it from a file of mode 0600, and dies with this process.
"""

import collections
import ctypes
import http.client
import json
import logging
import os
import secrets
import signal
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path

try:
    from deployment.jetson.on_device.conversation import RequestError
    from deployment.jetson.on_device.runtime import RuntimeMismatchError, absolute_program
except ModuleNotFoundError:  # beside this file on the device
    from conversation import RequestError  # type: ignore[import-not-found,no-redef]
    from runtime import (  # type: ignore[import-not-found,no-redef]
        RuntimeMismatchError,
        absolute_program,
    )

log = logging.getLogger("llama")
LOOPBACK = "127.0.0.1"
N_UBATCH = 128
"""Rows computed at once: 128 instead of 512 frees about 225 MiB at a vocabulary of 150,000."""
_PR_SET_PDEATHSIG = 1
_TAIL_LINES = 30
_POLL_S = 0.1


class ChildError(RuntimeError):
    """The model server did not start or has died; carries the last lines it wrote."""


def free_port() -> int:
    """A loopback port that nothing listens on now."""
    with socket.socket() as probe:
        probe.bind((LOOPBACK, 0))
        return probe.getsockname()[1]


def _die_with_parent() -> None:
    """In the child, before exec: be killed when the parent dies, however it dies (Linux)."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def server_config(
    model: Path, serving: Mapping, name: str, port: int, key: str, threads: int
) -> dict:
    """Settings of `llama_cpp.server`: the GGUF's own template, logits of the last token only."""
    context = serving["context_length"]
    return {
        "host": LOOPBACK,
        "port": port,
        "api_key": key,
        "models": [
            {
                "model": str(model),
                "model_alias": name,
                "chat_format": "chat_template.default",
                "n_ctx": context,
                "n_batch": min(512, context),
                "n_ubatch": min(N_UBATCH, context),
                "n_gpu_layers": serving["n_gpu_layers"],
                "n_threads": threads,
                "n_threads_batch": threads,
                "logits_all": False,
                "verbose": False,
            }
        ],
    }


def llama_server_options(
    model: Path, serving: Mapping, name: str, port: int, key_file: Path, threads: int
) -> "list[str]":
    """The same as options of llama-server: one slot, no pages, nothing fetched, text as it is."""
    context, layers = serving["context_length"], serving["n_gpu_layers"]
    options = {
        "--model": str(model),
        "--alias": name,
        "--host": LOOPBACK,
        "--port": port,
        "--api-key-file": str(key_file),
        "--ctx-size": context,
        "--batch-size": min(512, context),
        "--ubatch-size": min(N_UBATCH, context),
        "--gpu-layers": "all" if layers < 0 else layers,
        "--threads": threads,
        "--threads-batch": threads,
        "--parallel": 1,
        "--flash-attn": "off",  # as the golden prompts were made
        "--reasoning-format": "none",
    }
    words = [str(word) for pair in options.items() for word in pair]
    return [*words, "--jinja", "--offline", "--no-webui", "--no-slots"]


def _write_private(path: Path, text: str) -> Path:
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(handle, "w") as file:
        file.write(text)
    return path


class LlamaChild:
    """Starts, asks and stops the model server."""

    def __init__(
        self,
        python: str,
        model: Path,
        serving: Mapping,
        name: str,
        threads: int,
        *,
        llama_server: "str | None" = None,
    ) -> None:
        """Start it: `llama_server` where one is named, else `python -m llama_cpp.server`.

        Raises:
            ChildError: there is no such program.
        """
        self._name, self.port, self._key = name, free_port(), secrets.token_hex(24)
        self._is_llama_server = llama_server is not None
        try:
            program = (
                absolute_program(python, "--python")
                if llama_server is None
                else absolute_program(llama_server, "llama_server")
            )
        except RuntimeMismatchError as error:
            raise ChildError(f"{error}; name one that serves GGUF files") from None
        self._tail = collections.deque(maxlen=_TAIL_LINES)
        self._folder = tempfile.TemporaryDirectory(prefix="rl-pipeline-")
        folder = Path(self._folder.name)
        if self._is_llama_server:
            key = _write_private(folder / "key", self._key + "\n")
            words = llama_server_options(model, serving, name, self.port, key, threads)
        else:
            config = server_config(model, serving, name, self.port, self._key, threads)
            path = _write_private(folder / "server.json", json.dumps(config))
            words = ["-m", "llama_cpp.server", "--config_file", str(path)]
        environment = {
            k: v
            for k, v in os.environ.items()
            if k not in ("CONFIG_FILE", "HOST", "PORT") and not k.startswith("LLAMA_ARG_")
        }
        self._process = subprocess.Popen(
            [program, *words],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            cwd=self._folder.name,
            env=environment,
            preexec_fn=_die_with_parent,
        )
        self._reader = threading.Thread(target=self._read_output, daemon=True)
        self._reader.start()
        self.ready = False

    def _read_output(self) -> None:
        for raw in self._process.stdout:
            line = raw.decode(errors="replace").rstrip()
            self._tail.append(line)
            log.debug("%s", line)

    @property
    def pid(self) -> int:
        """Process id of the model server."""
        return self._process.pid

    def exited(self) -> "int | None":
        """Exit status, None while it runs."""
        return self._process.poll()

    def failure(self) -> ChildError:
        """What to say about a model server that ended."""
        self._reader.join(timeout=2)
        said = "\n".join(self._tail) or "(it wrote nothing)"
        return ChildError(f"the model server ended with status {self.exited()}:\n{said}")

    def wait_ready(self, deadline_s: float, stop: threading.Event) -> None:
        """Return once the server lists our model, or when `stop` is set.

        Raises:
            ChildError: it ended, or was not ready in time.
        """
        end_s = time.monotonic() + deadline_s
        while not stop.is_set():
            if self.exited() is not None:
                raise self.failure()
            if self._lists_model():
                self.ready = True
                return
            if time.monotonic() > end_s:
                raise ChildError(
                    f"the model was not loaded within {deadline_s:.0f} s; raise --deadline, or "
                    "free memory"
                )
            stop.wait(_POLL_S)

    def _lists_model(self) -> bool:
        try:
            status, body = self.request("GET", "/v1/models", None, timeout_s=5)
        except (OSError, http.client.HTTPException):
            return False
        return status == 200 and self._name in [m.get("id") for m in json.loads(body)["data"]]

    def request(
        self, method: str, path: str, body: "bytes | None", timeout_s: float
    ) -> "tuple[int, bytes]":
        """Send one request; (status, body)."""
        connection = http.client.HTTPConnection(LOOPBACK, self.port, timeout=timeout_s)
        try:
            headers = {"Authorization": f"Bearer {self._key}", "Content-Type": "application/json"}
            connection.request(method, path, body, headers)
            response = connection.getresponse()
            return response.status, response.read()
        finally:
            connection.close()

    def forward(
        self, method: str, path: str, body: "bytes | None", timeout_s: float
    ) -> "tuple[int, bytes]":
        """As `request`, for a path of the agent's own; a llama-server tokenises elsewhere.

        Raises:
            RequestError: the body of a tokenise request has no `input`.
        """
        if not self._is_llama_server or path != "/extras/tokenize":
            return self.request(method, path, body, timeout_s)
        try:
            text = json.loads(body or b"")["input"]
        except (ValueError, KeyError, TypeError, RecursionError):
            raise RequestError('expected {"input": text}') from None
        asked = {"content": text, "add_special": True, "parse_special": True}
        return self.request("POST", "/tokenize", json.dumps(asked).encode(), timeout_s)

    def asker(self, timeout_s: float) -> Callable:
        """A function that sends one turn and returns the reply; errors become `RequestError`."""

        def ask(body: dict) -> dict:
            try:
                status, raw = self.request(
                    "POST", "/v1/chat/completions", json.dumps(body).encode(), timeout_s
                )
            except TimeoutError:
                raise RequestError(f"no answer within {timeout_s:.0f} s", 504, "timeout") from None
            except (OSError, http.client.HTTPException):
                raise RequestError("the model server is gone", 503, "unavailable") from None
            return _reply(status, raw)

        return ask

    def stop(self) -> None:
        """End the server and clean up; safe to call twice."""
        if self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(timeout=5)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        self._reader.join(timeout=2)
        self._folder.cleanup()


def _is_too_long(error: object, message: "str | None") -> bool:
    """Whether the prompt did not fit: the two servers say it in words and in a type."""
    kind = error.get("type") if isinstance(error, dict) else None
    return kind == "exceed_context_size_error" or "exceed context window" in (message or "")


def _reply(status: int, raw: bytes) -> dict:
    try:
        reply = json.loads(raw)
    except ValueError:
        raise RequestError("the model server sent no JSON", 502, "upstream_error") from None
    if status == 200:
        return reply
    error = reply.get("error") if isinstance(reply, dict) else None
    message = error.get("message") if isinstance(error, dict) else None
    if _is_too_long(error, message):
        raise RequestError(str(message), 400, "context_length_exceeded")
    if status == 400 and isinstance(error, dict):
        code = error.get("code")
        word = code if isinstance(code, str) else "invalid_request_error"
        raise RequestError(str(message), 400, word)
    log.error("model server: status %s: %s", status, raw[:2000].decode(errors="replace"))
    raise RequestError(f"the model server failed (status {status})", 502, "upstream_error")
