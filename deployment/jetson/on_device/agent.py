"""The agent on the device: an OpenAI-style endpoint on loopback that finishes tool calls itself.

Standard library only, Python 3.10.

    python3 -S -E -B agent.py --bundle DIR --port 8080 --python /path/to/venv/bin/python

`POST /v1/chat/completions` (`stream` too), `GET /v1/models`, `GET /health` (503 while the model
loads, 200 after; with the release that is served), `GET /metrics` (Prometheus), `POST
/extras/tokenize`. Tools named in a request that the bundle does not own are shown to the model and
come back as `tool_calls` for the client to answer. All but `/health` want the API key, where the
device has one; `/etc/rl-pipeline` of the device the bundle is installed on says what else its owner
chose (see settings.py).
"""

import argparse
import hashlib
import ipaddress
import json
import logging
import os
import signal
import sys
import threading
from pathlib import Path

try:
    from deployment.jetson.on_device.api_key import ApiKeyError, read_key
    from deployment.jetson.on_device.field_log import FieldLog
    from deployment.jetson.on_device.front import Front, Served
    from deployment.jetson.on_device.llama_child import ChildError, LlamaChild
    from deployment.jetson.on_device.settings import (
        FIELD_FOLDER,
        KEY_FILE,
        DeviceSettings,
        SettingsError,
        installed_root,
        read_settings,
    )
except ModuleNotFoundError:  # beside this file on the device
    from api_key import ApiKeyError, read_key  # type: ignore[import-not-found,no-redef]
    from field_log import FieldLog  # type: ignore[import-not-found,no-redef]
    from front import Front, Served  # type: ignore[import-not-found,no-redef]
    from llama_child import ChildError, LlamaChild  # type: ignore[import-not-found,no-redef]
    from settings import (  # type: ignore[import-not-found,no-redef]
        FIELD_FOLDER,
        KEY_FILE,
        DeviceSettings,
        SettingsError,
        installed_root,
        read_settings,
    )

log = logging.getLogger("agent")


class OptionError(ValueError):
    """An option of the command line that cannot be."""


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _parse(argv: "list[str] | None") -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    here = Path(__file__).resolve().parent
    parser.add_argument("--bundle", type=Path, default=here)
    parser.add_argument("--host", default="127.0.0.1", help="a loopback address")
    parser.add_argument("--port", type=int, default=8080)
    parser.add_argument("--quant", help="a quantisation of the bundle; its default otherwise")
    parser.add_argument("--python", default="python3", help="an interpreter that has llama_cpp")
    parser.add_argument(
        "--api-key-file", type=Path, help="what clients must send; default: the device's, if any"
    )
    parser.add_argument(
        "--state", type=Path, help="folder of the field log; default: below the device's root"
    )
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


def _api_key(given: "Path | None", root: "Path | None") -> "str | None":
    """The key of the file named, else of the device's own, else none.

    Raises:
        ApiKeyError: the file named, or the device's, cannot be used.
    """
    if given is not None:
        return read_key(given)
    if root is not None and (root / KEY_FILE).exists():
        return read_key(root / KEY_FILE)
    return None


def _field_log(chosen: DeviceSettings, state: "Path | None", name: str) -> FieldLog:
    settings = chosen.field_log
    return FieldLog(
        state if settings.enabled else None,
        name,
        max_bytes=settings.max_bytes,
        max_rows=settings.max_rows,
        opt_in=settings.opt_in,
        keep_private_text=settings.keep_private_text,
    )


def _open(options: argparse.Namespace) -> "tuple[Front, str]":
    """(the listening front with its model server started, what to say when it is ready).

    Raises:
        OptionError, SettingsError, ApiKeyError, ChildError: nothing was left running.
    """
    if not _is_loopback(options.host):
        raise OptionError(
            f"--host {options.host}: only a loopback address is allowed; use an SSH tunnel"
        )
    raw = (options.bundle / "manifest.json").read_bytes()
    manifest = json.loads(raw)
    quant, name = options.quant or manifest["default"], manifest["name"]
    if quant not in manifest["models"]:
        raise OptionError(f"--quant {quant}: have {', '.join(sorted(manifest['models']))}")
    root = installed_root(options.bundle)
    chosen, key = read_settings(root), _api_key(options.api_key_file, root)
    state = options.state or (root / FIELD_FOLDER if root is not None else None)
    model = (options.bundle / manifest["models"][quant]["file"]).resolve()
    child = LlamaChild(
        options.python,
        model,
        manifest["serving"],
        name,
        options.threads,
        llama_server=chosen.llama_server,
    )
    served = Served(
        child=child,
        manifest=manifest,
        release=hashlib.sha256(raw).hexdigest(),
        quant=quant,
        api_key=key,
        field_log=_field_log(chosen, state, name),
    )
    try:
        front = Front((options.host, options.port), served)
    except OSError as error:
        child.stop()
        raise OptionError(
            f"cannot listen on {options.host}:{options.port}: {error.strerror}"
        ) from None
    return front, f"http://%s:%d/v1 serves {name} ({quant})" % front.server_address[:2]


def run(options: argparse.Namespace) -> int:
    """Serve until told to stop; 1 where the model server failed, 2 where the options are wrong."""
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    try:
        front, words = _open(options)
    except (OptionError, SettingsError, ApiKeyError, ChildError) as error:
        log.error("%s", error)
        return 2
    child = front.child
    if options.with_stdin:
        threading.Thread(target=_stop_with_stdin, args=(stop,), daemon=True).start()
    threading.Thread(target=front.serve_forever, daemon=True).start()
    try:
        child.wait_ready(options.deadline, stop)
        log.info("ready: %s", words)
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
        front.field_log.close()
    return 0


def main(argv: "list[str] | None" = None) -> int:
    """Command line."""
    options = _parse(argv)
    level = logging.DEBUG if options.verbose else logging.INFO
    logging.basicConfig(level=level, format="%(name)s: %(message)s", stream=sys.stderr)
    return run(options)


if __name__ == "__main__":
    sys.exit(main())
