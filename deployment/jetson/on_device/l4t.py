"""Which L4T (Jetson Linux) releases fit together: the major version must be the same.

Standard library only, Python 3.10. From major 36 on, a host runs images of its own major that are
not newer than itself. Below, and for newer images, the same major makes a candidate only: the exact
release is preferred and a smoke test decides (libraries moved between point releases).
"""

import re
from collections.abc import Iterable
from enum import Enum
from typing import NamedTuple

RELEASE_FILE = "etc/nv_tegra_release"
_RELEASE = re.compile(r"^#\s*R(\d+)\s*\(release\),\s*REVISION:\s*(\d+)\.(\d+)", re.MULTILINE)
_DOTTED = re.compile(r"r?(\d+)\.(\d+)(?:\.(\d+))?\Z", re.IGNORECASE)
FIRST_COMPATIBLE_MAJOR = 36


class L4tError(ValueError):
    """The host's or the image's release is unknown, or nothing fits; nothing is guessed."""


class L4tVersion(NamedTuple):
    """`36.4.3` as numbers."""

    major: int
    minor: int
    patch: int

    def __str__(self) -> str:
        return f"{self.major}.{self.minor}.{self.patch}"


class Fit(Enum):
    """How an image fits a host."""

    YES = "yes"
    SMOKE_TEST = "same major: try it, and let the smoke test decide"
    NO = "no"


def parse_version(text: str) -> L4tVersion:
    """`36.4.3`, `r36.4.3` or `36.4` as numbers.

    Raises:
        L4tError: anything else.
    """
    match = _DOTTED.match(text.strip()) if isinstance(text, str) else None
    if match is None:
        raise L4tError(f"{text!r} is not an L4T release; expected a form like 36.4.3")
    return L4tVersion(int(match[1]), int(match[2]), int(match[3] or 0))


def parse_release_file(text: str) -> L4tVersion:
    """The release in the text of `/etc/nv_tegra_release`.

    Raises:
        L4tError: no release line in it.
    """
    match = _RELEASE.search(text)
    if match is None:
        raise L4tError(
            f"/{RELEASE_FILE} names no release (expected '# R36 (release), REVISION: 4.3, …'); the "
            "host is unknown and nothing is guessed"
        )
    return L4tVersion(int(match[1]), int(match[2]), int(match[3]))


def fits(host: L4tVersion, image: L4tVersion) -> Fit:
    """Whether something built for `image` can run on `host`."""
    if host.major != image.major:
        return Fit.NO
    if host == image or (host.major >= FIRST_COMPATIBLE_MAJOR and image <= host):
        return Fit.YES
    return Fit.SMOKE_TEST


def choose(host: L4tVersion, images: Iterable[str]) -> "tuple[str, Fit]":
    """The image to use: the exact release first, then the newest not newer than the host.

    Every image is checked, wherever it comes from: one that lies here already is no exception.

    Raises:
        L4tError: no image listed, an image of unknown release, or none of the host's major.
    """
    listed = {parse_version(image): image for image in images}
    if not listed:
        raise L4tError(f"no image is listed for L4T {host}; name one built for {host.major}.x")
    candidates = [version for version in listed if fits(host, version) is not Fit.NO]
    if not candidates:
        have = ", ".join(str(version) for version in sorted(listed))
        raise L4tError(f"host runs L4T {host}; none of {have} has major {host.major}")
    best = max(candidates, key=lambda version: (version == host, version <= host, version))
    return listed[best], fits(host, best)


def check_range(host: L4tVersion, minimum: str, max_major: int) -> None:
    """Refuse a host outside the range a bundle was made for.

    Raises:
        L4tError: older than `minimum`, or of another major than `minimum.major … max_major`.
    """
    lowest = parse_version(minimum)
    if host < lowest or host.major > max_major:
        raise L4tError(
            f"host runs L4T {host}; this bundle is for {lowest} up to {max_major}.x. Flash a "
            "JetPack of that range, or build the bundle for this one"
        )
