"""The file of devices: which machines take bundles, how they are reached, what is expected there.

Secrets are never in it: the SSH key is named by path or by an environment variable that holds one.
"""

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, model_validator

from configs.schema.base import Config

_HOST = re.compile(r"[A-Za-z0-9]([A-Za-z0-9.-]*[A-Za-z0-9])?|[0-9A-Fa-f:]*:[0-9A-Fa-f:.]+")


def _host(value: str) -> str:
    if not _HOST.fullmatch(value) or ".." in value:
        raise ValueError(
            "a host name or an address without user, port or scheme, such as "
            "orin-1.lan or 192.168.1.20"
        )
    return value


def _absolute(value: str) -> str:
    if not value.startswith("/") or any(c.isspace() or c in "\"'\\%$" for c in value):
        raise ValueError("an absolute path without spaces, quotes, % or $")
    return value


AbsolutePath = Annotated[str, AfterValidator(_absolute)]


class Device(Config):
    """One device."""

    name: str = Field(pattern=r"^[a-z0-9][a-z0-9_-]{0,62}$")
    """What it is called here, and what its host key is pinned under."""
    host: Annotated[str, AfterValidator(_host)]
    """Host name or address."""
    port: int = Field(22, ge=1, le=65535)
    user: str = Field("root", pattern=r"^[a-z_][a-z0-9_.-]{0,31}$")
    sudo: bool = False
    """True has the device's side run as root by `sudo -n`; needed where `user` is not root."""
    identity: str | None = None
    """SSH private key: a path, or `env:NAME` for the variable that holds one. None asks the
    agent that SSH_AUTH_SOCK names."""
    root: AbsolutePath = "/"
    """Folder everything is placed below; / on a real device."""
    service: Literal["systemd", "process"] = "systemd"
    """What keeps the agent running; `process` is for machines without systemd."""
    python: AbsolutePath = "/opt/rl-pipeline-runtime/bin/python"
    """Interpreter on the device that has llama-cpp-python."""
    serve_port: int = Field(8080, ge=1, le=65535)
    """Loopback port the agent listens on."""
    l4t: str | None = Field(None, pattern=r"^[0-9]{1,3}(\.[0-9]{1,3}){0,2}$")
    """L4T release expected there, such as 36 or 36.4; another one is the wrong device."""
    min_tokens_per_s: float | None = Field(None, ge=0)
    """Instead of `deploy.min_tokens_per_s`, for a device of another speed."""

    def identity_path(self, environ: Mapping[str, str] | None = None) -> Path | None:
        """The SSH key file; None where the agent is asked.

        Raises:
            KeyError: `env:NAME` names a variable that is not set.
        """
        if self.identity is None:
            return None
        text = self.identity
        if text.startswith("env:"):
            text = (os.environ if environ is None else environ)[text.removeprefix("env:")]
        return Path(text).expanduser()


class Fleet(Config):
    """Every device, and the host keys they were enrolled with."""

    known_hosts: str = "runs/devices/known_hosts"
    """Host keys pinned at enrolment; a device with another key is never talked to."""
    devices: tuple[Device, ...] = ()

    @model_validator(mode="after")
    def _names_and_places_are_unique(self) -> "Fleet":
        seen: dict[object, str] = {}
        for device in self.devices:
            place = (device.host, device.port, device.root)
            for key, what in ((device.name, "name"), (place, "host, port and root")):
                if key in seen:
                    raise ValueError(
                        f"devices {seen[key]} and {device.name} have the same {what}; each "
                        "device needs its own"
                    )
                seen[key] = device.name
        return self
