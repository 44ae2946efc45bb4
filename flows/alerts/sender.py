"""`python -m flows.alerts.sender`: sends one message to every receiver, side by side.

A process of its own, so that a receiver that hangs can be left behind whatever it is doing. The
job comes on standard input, since addresses hold secrets. A first line on standard output says that
all is loaded; then comes each receiver's answer, as `{"index", "ok", "why"}`, without an address.
"""

import json
import logging
import os
import re
import signal
import sys
import threading
from typing import Any

_STATUS = re.compile(r"error=(\d{3})\b")


class _Reasons(logging.Handler):
    """Keeps, for each thread, what kind of failure Apprise told of: never its words."""

    def __init__(self) -> None:
        super().__init__(level=logging.WARNING)
        self.by_thread: dict[int, str] = {}

    def emit(self, record: logging.LogRecord) -> None:
        """Note the kind."""
        message = record.getMessage()
        status = _STATUS.search(message)
        if status:
            reason = f"answered with status {status[1]}"
        elif "onnection" in message or "ocket" in message:
            reason = "could not be reached, or hung up"
        else:
            reason = "refused the message"
        self.by_thread[record.thread or 0] = reason


def main() -> int:
    """Send; the alarm ends the process should its parent be gone by then."""
    job = json.load(sys.stdin)
    import apprise

    sys.stdout.write("ready\n")
    sys.stdout.flush()
    signal.setitimer(signal.ITIMER_REAL, float(job["timeout_s"]) + 1.0)

    reasons = _Reasons()
    logger = logging.getLogger("apprise")
    logger.addHandler(reasons)
    logger.propagate = False
    asset = apprise.AppriseAsset(
        app_id="rl-pipeline",
        app_desc="rl-pipeline",
        app_url="",
        async_mode=False,
        storage_mode=apprise.PersistentStoreMode.MEMORY,
    )
    out = threading.Lock()

    def send(index: int, url: str) -> None:
        ok, why = _send(apprise, asset, job, url, reasons)
        with out:
            sys.stdout.write(json.dumps({"index": index, "ok": ok, "why": why}) + "\n")
            sys.stdout.flush()

    threads = [
        threading.Thread(target=send, args=(i, u), daemon=True) for i, u in enumerate(job["urls"])
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return 0


def _send(
    apprise: Any, asset: Any, job: dict[str, Any], url: str, reasons: _Reasons
) -> tuple[bool, str]:
    receiver = apprise.Apprise.instantiate(url, asset=asset, suppress_exceptions=True)
    if receiver is None:
        return False, "its address is of no kind Apprise knows"
    here = apprise.Apprise(asset=asset)
    here.add(receiver)
    taken = here.notify(
        title=job["title"],
        body=job["body"],
        notify_type=job["type"],
        body_format=apprise.NotifyFormat.TEXT,
    )
    if taken:
        return True, ""
    return False, reasons.by_thread.get(threading.get_ident(), "did not take the message")


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)  # no waiting for pools that a library left
