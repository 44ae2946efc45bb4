"""One call from the machine that deploys: a request comes in, lines of JSON go out.

`{"say": …}` tells progress; the last line is `{"result": …}` or `{"error": {"kind", "message"}}`.
A call whose asker has gone goes on to its end: half-way is never where it stops.
"""

import contextlib
import json
import signal
import sys
from pathlib import Path
from typing import BinaryIO

from deployment.fleet.on_device import field_rows, keep_alive, probe, receive, state
from deployment.fleet.on_device.activate import Demands, activate, settle
from deployment.fleet.on_device.journal import locked
from deployment.fleet.on_device.places import DeviceError, Places
from deployment.fleet.on_device.service import Service


def _tell(line: dict) -> None:
    """Write one line; an asker that has gone is no reason to stop."""
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.write(json.dumps(line) + "\n")
        sys.stdout.flush()


def _say(text: str) -> None:
    _tell({"say": text})


class Call:
    """A request with what all operations need."""

    def __init__(self, request: dict, source: str, stream: BinaryIO) -> None:
        self.device, self.args, self.stream = request["device"], request["args"], stream
        self.root, self.port = self.device["root"], self.device["port"]
        self._source = source

    def places(self) -> Places:
        """Paths of the agent that is meant."""
        return Places(self.root, self.args["agent"])

    def service(self) -> Service:
        """The service of the agent that is meant."""
        scope, python = self.device["service"], self.device["python"]
        return Service(self.places(), scope, python, self.port, self._source)

    def demands(self) -> Demands:
        """What a release must show."""
        wanted = self.args["demands"]
        return Demands(
            wanted["health_timeout_s"], wanted["min_tokens_per_s"], wanted["keep_releases"]
        )


def _facts(call: Call) -> dict:
    return state.facts(call.root, call.port)


def _client_key(call: Call) -> dict:
    return {"key": probe.client_key(Path(call.root))}


def _pin(call: Call) -> dict:
    return state.pin_key(call.root, call.args["text"], call.args["replace"])


def _arrived(call: Call) -> dict:
    with locked(call.places(), call.args["wait_s"]):
        sizes = call.args["size"], call.args["unpacked"]
        return receive.arrived(call.places(), call.args["sha256"], *sizes)


def _append(call: Call) -> dict:
    with locked(call.places(), call.args["wait_s"]):
        args = call.args["sha256"], call.args["offset"], call.args["size"]
        return receive.append(call.places(), *args, call.stream)


def _place(call: Call) -> dict:
    with locked(call.places(), call.args["wait_s"]):
        args = call.args["sha256"], call.args["release"], call.args["unpacked"]
        return receive.place(call.places(), *args, _say)


def _has(call: Call) -> dict:
    """Whether a release lies on the device, whole and signed."""
    places = call.places()
    folder = places.release(call.args["release"][:12])
    if not folder.is_dir():
        return {"has": False}
    try:
        receive.check_bundle(folder, places.pin)
    except DeviceError as error:
        if error.kind == "not_enrolled":
            raise
        return {"has": False, "why": error.message}
    return {"has": True}


def _activate(call: Call) -> dict:
    places = call.places()
    with locked(places, call.args["wait_s"]):
        sha12 = call.args["release"][:12]
        return activate(places, call.service(), sha12, call.demands(), _say)


def _settle(call: Call) -> dict:
    places = call.places()
    if not places.app.is_dir():
        return {"returned_to": None}
    with locked(places, call.args["wait_s"]):
        return {"returned_to": settle(places, call.service(), call.demands(), _say)}


def _stop(call: Call) -> dict:
    with locked(call.places(), call.args["wait_s"]):
        call.service().stop()
    return {}


def _collect(call: Call) -> dict:
    limits = call.args["max_rows"], call.args["max_bytes"]
    return field_rows.opted_in(call.places(), *limits)


OPERATIONS = {
    "facts": _facts,
    "client_key": _client_key,
    "pin": _pin,
    "arrived": _arrived,
    "append": _append,
    "place": _place,
    "has": _has,
    "activate": _activate,
    "settle": _settle,
    "stop": _stop,
    "collect": _collect,
}


def run(request: dict, stream: "BinaryIO | None" = None) -> int:
    """Carry a request out; 0 where it was, 1 where an error was told."""
    for number in (signal.SIGHUP, signal.SIGPIPE):
        signal.signal(number, signal.SIG_IGN)
    source = getattr(keep_alive, "SOURCE", "")
    try:
        call = Call(request, source, stream or sys.stdin.buffer)
        result = OPERATIONS[request["op"]](call)
    except DeviceError as error:
        _tell({"error": {"kind": error.kind, "message": error.message}})
        return 1
    except PermissionError as error:
        _tell({"error": {"kind": "permission", "message": f"{error.filename}: {error.strerror}"}})
        return 1
    except OSError as error:
        if error.errno in receive.FULL:
            full = receive.full_disk(call.places().app, "the device could not write", error)
            _tell({"error": {"kind": full.kind, "message": full.message}})
        else:
            _tell({"error": {"kind": "os", "message": f"{error.filename}: {error.strerror}"}})
        return 1
    _tell({"result": result})
    return 0
