"""A self-contained page from a template beside it: no network, no script, every value escaped."""

from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined, Template
from markupsafe import Markup

from flows.report.text import visible

_FOLDER = Path(__file__).parent


def page_template(path: Path) -> Template:
    """The template at `path`, which may use the macros of this package and its style as `css`."""
    environment = Environment(
        loader=FileSystemLoader([path.parent, _FOLDER]),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=_shown,
        trim_blocks=True,
    )
    environment.globals["css"] = Markup((_FOLDER / "report.css").read_text(encoding="utf-8"))
    return environment.get_template(path.name)


def _shown(value: Any) -> Any:
    """Every value a template prints, except finished markup, with unprintables made visible."""
    return visible(value) if isinstance(value, str) and not isinstance(value, Markup) else value
