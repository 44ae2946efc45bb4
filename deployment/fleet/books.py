"""What runs where: `runs/devices/<name>.json`; every attempt: `runs/devices/history.jsonl`."""

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from deployment.fleet.device import DeviceResult
from tasks.artifacts import write_json
from tasks.artifacts.append_log import LogLines, locked_log, read_log
from tasks.artifacts.errors import ArtifactCorruptError


def now() -> str:
    """The time as the books have it: UTC, to the second."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


class DeviceBooks:
    """The two files, under one runs folder."""

    def __init__(self, runs_dir: Path) -> None:
        self.folder = runs_dir / "devices"
        self.history_path = self.folder / "history.jsonl"

    def record(self, name: str) -> dict[str, Any] | None:
        """What a device runs, as far as is known here; None where nothing was ever deployed.

        Raises:
            ArtifactCorruptError: the file is there and cannot be read.
        """
        path = self.folder / f"{name}.json"
        try:
            value = json.loads(path.read_bytes())
            if not isinstance(value, dict):
                raise ValueError("no object")
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            raise ArtifactCorruptError(
                f"{path} cannot be read ({error}); take it away, then `rl-pipeline devices status`",
                path,
            ) from error
        return value

    def history(self) -> LogLines:
        """Every attempt, oldest first."""
        return read_log(self.history_path)

    def bundle_of(self, release: str) -> str | None:
        """Where the bundle of a release lay when it was last deployed."""
        for row in reversed(self.history().rows):
            if row.get("release") == release and row.get("bundle"):
                return str(row["bundle"])
        return None

    def enter(self, result: DeviceResult, agent: str, bundle: str | None) -> None:
        """Write an attempt into the history, then what the device serves now, where known.

        Raises:
            ArtifactWriteError: the disk refused.
        """
        time = now()
        with locked_log(self.history_path) as log:
            log.append(
                {
                    "time": time,
                    "device": result.device,
                    "action": result.action,
                    "agent": agent,
                    "release": result.release,
                    "previous": result.previous,
                    "serving": result.serving,
                    "bundle": bundle,
                    "ok": result.ok,
                    "outcome": result.outcome,
                    "reason": result.reason,
                    "error": result.error,
                    "tokens_per_s": result.tokens_per_s,
                }
            )
        if result.serving is not None:
            self.enter_serving(result.device, agent, result.serving, time)

    def enter_serving(self, device: str, agent: str, release: str, time: str | None = None) -> None:
        """Write what a device was found to serve."""
        known = self.record(device) or {}
        if known.get("release") == release:
            return
        write_json(
            self.folder / f"{device}.json",
            {
                "device": device,
                "agent": agent,
                "release": release,
                "bundle": self.bundle_of(release),
                "time": time or now(),
            },
        )
