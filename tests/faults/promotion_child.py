"""Takes promotion steps in processes that may die anywhere; driven over stdin by the fault test.

One JSON line `{act, name, kill: [event, "before" | "after", nth] | null}` is one step, taken in a
forked child (MLflow is imported once). Answers `{signal, acknowledged}`.
"""

import json
import os
import signal
import sys
from pathlib import Path

from configs.schema import PipelineConfig
from flows.promotion import acts as promotion_acts
from flows.promotion.news import spread
from tasks.tracking import promotion_ledger, registry
from tasks.tracking.promotion_ledger import PromotionLedger


def die() -> None:
    """As a power cut or the kernel's memory killer would have it."""
    os.kill(os.getpid(), signal.SIGKILL)


def deadly(call, when: str, nth: int):
    """`call`, whose `nth` use ends the process before or after it is done."""
    used = 0

    def wrapped(*args, **kwargs):
        nonlocal used
        used += 1
        if used == nth and when == "before":
            die()
        result = call(*args, **kwargs)
        if used == nth and when == "after":
            die()
        return result

    return wrapped


def half_write(handle: int, data: bytes) -> int:
    """Write half of a line, then die."""
    os.write(handle, data[: len(data) // 2])
    os.fsync(handle)
    die()
    return 0


def arm(event: str, when: str, nth: int) -> None:
    """Have the process die at an event."""
    from mlflow import MlflowClient

    if event == "half a line":
        stand_in = type("os", (), {**vars(os), "write": staticmethod(half_write)})
        promotion_ledger.os = stand_in
        return
    owner = {
        "line": PromotionLedger,
        "head": PromotionLedger,
        "follow": registry,
    }.get(event, MlflowClient)
    name = {"line": "_write_line", "head": "_write_head", "follow": "follow_ledger"}.get(
        event, event
    )
    setattr(owner, name, deadly(getattr(owner, name), when, nth))


def take(runs: Path, step: dict, acknowledged: int) -> None:
    """One step, as the command line takes it: ledger first, then everything that follows."""
    if step["kill"]:
        arm(*step["kill"])
    if step["act"] == "rollback":
        act = promotion_acts.rollback(runs, reason="random")
    elif step["act"] == "promote":
        act = promotion_acts.promote(runs, step["name"], force=True, reason="random")
    else:
        release = promotion_acts.find_release(runs, step["name"])
        ledger = PromotionLedger(runs, release.model)
        act = promotion_acts.Act(ledger.append(step["act"], release, reason="random"), ledger)
    os.write(acknowledged, b"y")
    notes = spread(act.entry, act.ledger, PipelineConfig(profile="calc"))
    assert notes == [], notes


def main(runs: Path) -> None:
    """Fork a child for every line."""
    import mlflow  # noqa: F401 - seconds of importing, once

    for line in sys.stdin:
        reader, writer = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(reader)
            code = 1
            try:
                take(runs, json.loads(line), writer)
                code = 0
            finally:
                sys.stderr.flush()
                os._exit(code)
        os.close(writer)
        acknowledged = os.read(reader, 1) == b"y"
        os.close(reader)
        _, status = os.waitpid(pid, 0)
        how = os.WTERMSIG(status) if os.WIFSIGNALED(status) else -os.WEXITSTATUS(status)
        sys.stdout.write(json.dumps({"signal": how, "acknowledged": acknowledged}) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
