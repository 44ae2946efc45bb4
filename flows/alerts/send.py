"""Alerts: what a run tells people, through Apprise, to whatever addresses the environment names.

Every alert is one line of `runs/alerts.jsonl`, written before anything is sent, and its outcome is
another. That file also decides what is a repeat. Nothing here raises for a receiver that fails,
and no address is ever written down: a receiver is named by its variable and its place in it.
"""

import json
import logging
import os
import re
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from configs.schema.operations import AlertsConfig
from tasks.artifacts.append_log import LogLines, locked_log, read_log
from tasks.artifacts.errors import ArtifactWriteError
from tasks.artifacts.provenance import module_environment

logger = logging.getLogger(__name__)

LOG_NAME = "alerts.jsonl"
TEST_EVENT = "test"
"""Always sent, whatever `alerts.events` says, and never a repeat."""
MAX_TITLE, MAX_BODY = 160, 3000
START_GRACE_S = 10.0
"""Time the sender process may take to start, on a busy machine, before receivers have any."""
_CONTROL = re.compile(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]+")
_SEVERITY = {
    "promotion": "success",
    "test": "info",
    "skipped": "info",
    "cost": "warning",
    "nightly_missing": "warning",
}
IN_FLIGHT_SLACK_S = START_GRACE_S + 5.0
"""Beyond `timeout_s`, an alert still marked as being sent was cut short by a kill."""

Status = Literal["sent", "partly", "failed", "nobody", "repeated", "off"]
"""`nobody`: no address is configured; `off`: the profile does not ask for this event."""


@dataclass(frozen=True)
class Alert:
    """Something a person should hear of."""

    event: str
    """One of `alerts.events`, or `test`."""
    title: str
    body: str
    key: str
    """What makes it the same alert as an earlier one, such as `failure:calculator:rl`."""


@dataclass(frozen=True)
class Receiver:
    """How one receiver did; `name` holds no address."""

    name: str
    ok: bool
    why: str = ""


@dataclass(frozen=True)
class AlertOutcome:
    """What became of an alert."""

    status: Status
    receivers: tuple[Receiver, ...] = ()
    note: str = ""

    @property
    def problems(self) -> tuple[str, ...]:
        """One line for each receiver that was not reached, and for a log that was not written."""
        failed = [f"alert not taken by {r.name}: {r.why}" for r in self.receivers if not r.ok]
        return (*failed, *([self.note] if self.note else []))


def alert_addresses(config: AlertsConfig) -> dict[str, str]:
    """Addresses by the receiver's name; the same address given twice counts once."""
    found: dict[str, str] = {}
    for variable in config.urls_env:
        for place, url in enumerate(os.environ.get(variable, "").split(), start=1):
            if url not in found.values():
                found[f"{variable}[{place}]{_kind(url)}"] = url
    return found


def _kind(url: str) -> str:
    """The scheme of an address, which says what it is and holds no secret."""
    scheme, separator, _ = url.partition("://")
    return f" ({scheme})" if separator and re.fullmatch(r"[A-Za-z0-9+.-]{1,20}", scheme) else ""


def send_alert(config: AlertsConfig, alert: Alert, runs_dir: Path) -> AlertOutcome:
    """Log an alert and send it; takes at most `alerts.timeout_s` once the sender has started."""
    return start_alert(config, alert, runs_dir).wait()


def start_alert(config: AlertsConfig, alert: Alert, runs_dir: Path) -> "Sending":
    """Log an alert and begin to send it; the caller goes on and asks `wait()` later."""
    alert = _presentable(alert)
    sending = Sending(config, runs_dir / LOG_NAME, uuid.uuid4().hex[:12])
    try:
        urls = sending.begin(alert)
    except ArtifactWriteError as error:  # nobody can tell whether it repeats: better twice
        sending.note = str(error)
        urls = alert_addresses(config) if _wanted(config, alert) else {}
    if urls:
        sending.launch(alert, urls)
    return sending


def _wanted(config: AlertsConfig, alert: Alert) -> bool:
    return alert.event == TEST_EVENT or alert.event in config.events


def _presentable(alert: Alert) -> Alert:
    """Without control characters, bounded, and without the brackets chats read commands from."""

    def clean(text: str) -> str:
        return _CONTROL.sub(" ", text).replace("<", "‹").replace(">", "›")

    title = " ".join(clean(alert.title).split())
    return Alert(alert.event, _cut(title, MAX_TITLE), _cut(clean(alert.body), MAX_BODY), alert.key)


def _cut(text: str, most: int) -> str:
    # a lone surrogate can be neither logged nor sent
    text = text.encode("utf-8", "replace").decode()
    return text if len(text) <= most else text[: most - 1] + "…"


class Sending:
    """One alert on its way."""

    def __init__(self, config: AlertsConfig, log: Path, identity: str) -> None:
        self._config = config
        self._log = log
        self._id = identity
        self._settled: AlertOutcome | None = None
        self._thread: threading.Thread | None = None
        self._names: list[str] = []
        self._found: dict[int, Receiver] = {}
        self.note = ""

    def begin(self, alert: Alert) -> dict[str, str]:
        """Write the alert down and decide; returns the addresses to send to, if any."""
        urls = alert_addresses(self._config)
        with locked_log(self._log) as log:
            now = time.time()  # held: no other alert is younger
            status: Status | Literal["sending"] = "sending"
            if not _wanted(self._config, alert):
                status = "off"
            elif alert.event != TEST_EVENT and told_before(
                log.lines(), alert.key, now, self._config
            ):
                status = "repeated"
            elif not urls:
                status = "nobody"
            log.append(
                {
                    "id": self._id,
                    "time": now,
                    "event": alert.event,
                    "title": alert.title,
                    "body": alert.body,
                    "key": alert.key,
                    "status": status,
                }
            )
        if status != "sending":
            self._settled = AlertOutcome(status)
            return {}
        return urls

    def launch(self, alert: Alert, urls: Mapping[str, str]) -> None:
        """Start the sender process and a thread that reads its answers until the deadline."""
        self._names = list(urls)
        job = {
            "title": alert.title,
            "body": alert.body or alert.title,
            "type": _SEVERITY.get(alert.event, "failure"),
            "timeout_s": self._config.timeout_s,
            "urls": list(urls.values()),
        }
        self._thread = threading.Thread(target=self._deliver, args=(job,), daemon=True)
        self._thread.start()

    def wait(self) -> AlertOutcome:
        """What became of it."""
        if self._settled is None:
            if self._thread is not None:
                self._thread.join()
            self._settled = self._outcome()
            self._write(self._settled)
        return self._settled

    def _deliver(self, job: dict[str, Any]) -> None:
        try:
            process = subprocess.Popen(
                [sys.executable, "-m", "flows.alerts.sender"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,  # a library's traceback could hold an address
                env=module_environment(),
                start_new_session=True,  # Ctrl-C ends the run, not the word of it
            )
        except OSError as error:
            self.note = f"the alert sender could not be started: {error.strerror}"
            return
        assert process.stdin is not None and process.stdout is not None
        deadline = _kill_after(process, START_GRACE_S)
        try:
            process.stdin.write(json.dumps(job).encode())
            process.stdin.close()
            process.stdout.readline()  # it has started: from now on receivers have their time
            deadline.cancel()
            deadline = _kill_after(process, self._config.timeout_s)
            for line in process.stdout:
                self._answered(line)
        except BrokenPipeError:
            self.note = "the alert sender ended before it took its job"
        finally:
            deadline.cancel()
            process.kill()
            process.wait()
            process.stdout.close()

    def _answered(self, line: bytes) -> None:
        try:
            said = json.loads(line)
            index, ok, why = int(said["index"]), said["ok"] is True, str(said["why"])
        except (ValueError, KeyError, TypeError):
            return  # whatever it was, it was no answer: the receiver stays unanswered
        self._found[index] = Receiver(self._names[index], ok, why)

    def _outcome(self) -> AlertOutcome:
        silent = f"no answer within alerts.timeout_s={self._config.timeout_s:g} s, given up"
        receivers = tuple(
            self._found.get(index, Receiver(name, False, silent))
            for index, name in enumerate(self._names)
        )
        return AlertOutcome(_judge(receivers), receivers, self.note)

    def _write(self, outcome: AlertOutcome) -> None:
        line = {
            "id": self._id,
            "time": time.time(),
            "status": outcome.status,
            "receivers": [{"name": r.name, "ok": r.ok, "why": r.why} for r in outcome.receivers],
        }
        try:
            with locked_log(self._log) as log:
                log.append(line)
        except ArtifactWriteError as error:
            logger.warning("%s", error)


def _kill_after(process: "subprocess.Popen[bytes]", seconds: float) -> threading.Timer:
    timer = threading.Timer(seconds, process.kill)
    timer.daemon = True
    timer.start()
    return timer


def _judge(receivers: Sequence[Receiver]) -> Status:
    taken = sum(r.ok for r in receivers)
    if not receivers:
        return "nobody"
    if taken == len(receivers):
        return "sent"
    return "partly" if taken else "failed"


def told_before(lines: LogLines, key: str, now: float, config: AlertsConfig) -> bool:
    """Whether somebody was told of `key` within `repeat_after_s`, or is being told right now.

    An alert that reached nobody was not told; one dated in the future (a clock set back) does not
    silence what comes.
    """
    repeat_s = config.repeat_after_s
    silent_s = {
        "sent": repeat_s,
        "partly": repeat_s,
        "sending": min(repeat_s, config.timeout_s + IN_FLIGHT_SLACK_S),
    }
    return any(
        entry.key == key and 0 <= now - entry.time < silent_s.get(entry.status, 0.0)
        for entry in entries(lines)
    )


@dataclass(frozen=True)
class Entry:
    """One alert of the log with its outcome."""

    id: str
    time: float
    event: str
    title: str
    body: str
    key: str
    status: str
    """Of the outcome; `sending` where none was written."""
    receivers: tuple[dict[str, Any], ...] = field(default=())


def entries(lines: LogLines) -> list[Entry]:
    """The alerts of a log, oldest first, each with its outcome."""
    alerts: dict[str, dict[str, Any]] = {}
    for row in lines.rows:
        if "event" in row:
            alerts[str(row.get("id"))] = dict(row)
        elif (known := alerts.get(str(row.get("id")))) is not None:
            known.update(status=row.get("status"), receivers=row.get("receivers", []))
    return [
        Entry(
            id=str(row.get("id")),
            time=float(row.get("time") or 0.0),
            event=str(row.get("event")),
            title=str(row.get("title")),
            body=str(row.get("body")),
            key=str(row.get("key")),
            status=str(row.get("status")),
            receivers=tuple(r for r in row.get("receivers", ()) if isinstance(r, dict)),
        )
        for row in alerts.values()
    ]


def read_alerts(runs_dir: Path) -> tuple[list[Entry], tuple[int, ...]]:
    """The alerts of a runs folder, oldest first, and the numbers of lines nobody can read."""
    lines = read_log(runs_dir / LOG_NAME)
    return entries(lines), lines.unreadable
