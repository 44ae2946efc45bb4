"""What one stage hands to the next: a small JSON record, never a model."""

from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict


class ArtifactRecord(BaseModel):
    """`uri` is a folder or file relative to the working directory; `sha256` its content hash."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: str
    uri: str
    sha256: str
    meta: dict[str, Any] = {}

    @property
    def path(self) -> Path:
        """Where it lies."""
        return Path(self.uri)
