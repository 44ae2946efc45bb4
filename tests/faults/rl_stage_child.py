"""Runs RL stages, which may kill themselves at a named point; orders come on stdin.

The heavy imports happen once, here; every order forks. A point is a function of the shipped code,
named as `module:Class.function`; the child sends itself SIGKILL when it is entered or left for the
n-th time, so that nothing of it, no `finally` and no buffer, has a chance to tidy up. Without an
argument there is one order and no fork: Ray does not survive one.
"""

import asyncio
import functools
import importlib
import inspect
import json
import os
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from configs.schema import PipelineConfig
from tasks.artifacts.progress import Reporter
from tasks.artifacts.record import ArtifactRecord
from tasks.rl import stage
from tasks.rl.runtime import inline  # noqa: F401 - imported once, before any fork


def die() -> None:
    """End this process as a power cut would."""
    os.kill(os.getpid(), signal.SIGKILL)


def arm(target: str, when: str, count: int) -> None:
    """Have the `count`-th call of `target` end this process, `before` or `after` it ran."""
    module_name, _, path = target.partition(":")
    owner: Any = importlib.import_module(module_name)
    *parents, name = path.split(".")
    for parent in parents:
        owner = getattr(owner, parent)
    setattr(owner, name, deadly(getattr(owner, name), when, count))


def deadly(function: Callable[..., Any], when: str, count: int) -> Callable[..., Any]:
    """`function`, whose `count`-th call is the last thing this process does."""
    calls = 0

    def due() -> bool:
        nonlocal calls
        calls += 1
        return calls == count

    if inspect.iscoroutinefunction(function):

        @functools.wraps(function)
        async def wrapped(*args: Any, **kwargs: Any) -> Any:
            now = due()
            if now and when == "before":
                die()
            result = await function(*args, **kwargs)
            if now:
                die()
            return result

    else:

        @functools.wraps(function)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            now = due()
            if now and when == "before":
                die()
            result = function(*args, **kwargs)
            if now:
                die()
            return result

    return wrapped


def run(order: dict[str, Any]) -> None:
    """One stage, as an order says; its record goes to `record.json` in its folder."""
    if order.get("kill"):
        arm(**order["kill"])
    out = Path(order["out"])
    inputs = {name: ArtifactRecord.model_validate(r) for name, r in order["inputs"].items()}
    config = PipelineConfig.model_validate(order["config"])
    record = stage.run(config, inputs, out, Reporter(out))
    (out / "record.json").write_text(record.model_dump_json())


def fork(order: dict[str, Any]) -> int:
    """Run an order in a child; its exit status as `subprocess` gives it, negative for a signal."""
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    code = 1
    try:
        asyncio.set_event_loop(None)
        run(order)
        code = 0
    except BaseException:  # noqa: BLE001 - the child must never return into the parent's loop
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def main() -> None:
    """Answer each order, one line of JSON, with its exit status on the descriptor argument 1."""
    if len(sys.argv) == 1:
        run(json.loads(sys.stdin.read()))
        return
    with os.fdopen(int(sys.argv[1]), "w") as answers:  # libraries write to stdout as they like
        for line in sys.stdin:
            answers.write(f"{fork(json.loads(line))}\n")
            answers.flush()


if __name__ == "__main__":
    main()
