"""Counters of the agent in the text form Prometheus reads.

Standard library only, Python 3.10. Labels take values from fixed sets only, so that no client can
make the page grow.
"""

import threading
import time
from collections import Counter

PATHS = ("/v1/chat/completions", "/v1/models", "/extras/tokenize", "/health", "/metrics")
BUCKETS_S = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
MAX_CODES = 32
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_PREFIX = "rl_pipeline_"


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')


def _line(name: str, labels: "dict[str, str]", value: "int | float") -> str:
    inner = ",".join(f'{key}="{_escaped(text)}"' for key, text in labels.items())
    number = f"{value:.6f}".rstrip("0").rstrip(".") if isinstance(value, float) else str(value)
    return f"{_PREFIX}{name}{{{inner}}} {number}" if inner else f"{_PREFIX}{name} {number}"


class Metrics:
    """Counts what was asked and how it went; safe from any thread."""

    def __init__(self, release: str, quant: str) -> None:
        self._lock = threading.Lock()
        self._start_s = time.monotonic()
        self._info = {"release": release, "quant": quant}
        self._requests: Counter[tuple[str, int]] = Counter()
        self._errors: Counter[str] = Counter()
        self._counts: Counter[str] = Counter()
        self._buckets = [0] * len(BUCKETS_S)
        self._chats, self._chat_seconds = 0, 0.0
        self._running = 0

    def begin(self) -> None:
        """A request came in."""
        with self._lock:
            self._running += 1

    def end(self, path: str, status: int, seconds: float) -> None:
        """It was answered; `status` 0 means that the client went away."""
        path = path if path in PATHS else "other"
        with self._lock:
            self._running -= 1
            self._requests[path, status] += 1
            if path == PATHS[0]:
                self._chats += 1
                self._chat_seconds += seconds
                for index, limit in enumerate(BUCKETS_S):
                    self._buckets[index] += seconds <= limit

    def error(self, code: str) -> None:
        """A request was refused or failed; codes are the agent's own words."""
        with self._lock:
            known = code in self._errors or len(self._errors) < MAX_CODES
            self._errors[code if known else "other"] += 1

    def count(self, name: str, amount: int) -> None:
        """Add to `prompt_tokens`, `completion_tokens`, `field_rows` or `field_log_failures`."""
        with self._lock:
            self._counts[name] += amount

    def render(self, *, ready: bool) -> str:
        """The page."""
        with self._lock:
            return "\n".join(self._lines(ready)) + "\n"

    def _lines(self, ready: bool):
        yield from self._head("info", "gauge", "What is served.")
        yield _line("info", self._info, 1)
        yield from self._head("ready", "gauge", "1 when the model is loaded.")
        yield _line("ready", {}, int(ready))
        yield from self._head("uptime_seconds", "gauge", "Seconds since the agent started.")
        yield _line("uptime_seconds", {}, time.monotonic() - self._start_s)
        yield from self._head("requests_running", "gauge", "Requests being answered.")
        yield _line("requests_running", {}, self._running)
        yield from self._head("requests_total", "counter", "Requests, by path and HTTP status.")
        for (path, status), number in sorted(self._requests.items()):
            yield _line("requests_total", {"path": path, "status": str(status)}, number)
        yield from self._head("errors_total", "counter", "Requests that failed, by code.")
        for code, number in sorted(self._errors.items()):
            yield _line("errors_total", {"code": code}, number)
        for name, text in (
            ("prompt_tokens", "Tokens read by the model."),
            ("completion_tokens", "Tokens generated."),
            ("field_rows", "Rows written to the field log."),
            ("field_log_failures", "Rows the field log could not write."),
        ):
            yield from self._head(f"{name}_total", "counter", text)
            yield _line(f"{name}_total", {}, self._counts[name])
        yield from self._head("chat_seconds", "histogram", "Seconds to answer a chat request.")
        for limit, number in zip(BUCKETS_S, self._buckets, strict=True):
            yield _line("chat_seconds_bucket", {"le": f"{limit:g}"}, number)
        yield _line("chat_seconds_bucket", {"le": "+Inf"}, self._chats)
        yield _line("chat_seconds_sum", {}, self._chat_seconds)
        yield _line("chat_seconds_count", {}, self._chats)

    def _head(self, name: str, kind: str, text: str) -> "list[str]":
        return [f"# HELP {_PREFIX}{name} {text}", f"# TYPE {_PREFIX}{name} {kind}"]
