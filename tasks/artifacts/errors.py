"""Errors of reading and writing artefacts."""

from pathlib import Path


class ArtifactError(Exception):
    """Base of what can go wrong with an artefact; `path` names it."""

    def __init__(self, message: str, path: Path | str = "") -> None:
        super().__init__(message, str(path))
        self.message = message
        self.path = str(path)

    def __str__(self) -> str:
        return self.message


class ArtifactWriteError(ArtifactError, OSError):
    """The disk refused (full, read-only); the old file, if any, is untouched."""


class ArtifactCorruptError(ArtifactError, ValueError):
    """Bytes on disk no longer match their recorded hash."""
