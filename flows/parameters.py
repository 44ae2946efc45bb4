"""The flow's parameters as Prefect's pages show them: described, with choices, as a form.

The flow itself checks values again, and says better what is wrong: the schema only keeps a
mistyped name from waiting for a worker first.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any

Schema = dict[str, Any]


@dataclass(frozen=True)
class Shown:
    """Replaces a parameter's JSON schema by one worked out when it is asked for, not at import."""

    schema: Callable[[], Schema]

    def __get_pydantic_json_schema__(self, core_schema: Any, handler: Any) -> Schema:
        """What pydantic calls."""
        return self.schema()


def profile_schema() -> Schema:
    """One of the project's profiles, or a file of one's own."""
    from configs.load import profiles

    named = {"title": "profile", "type": "string", "enum": sorted(profiles())}
    return {"anyOf": [named, {"title": "file", "type": "string", "pattern": r"\.(ya?ml|json)$"}]}


def stage_schema() -> Schema:
    """One of the stages."""
    from tasks.stages import STAGES

    return {"type": "string", "enum": list(STAGES)}


Profile = Annotated[str, Shown(profile_schema)]
"""Name of a profile, or path of a config file."""
Stage = Annotated[str, Shown(stage_schema)]
"""Name of a stage."""
