"""What `rl-pipeline config` prints: keys with type, default and meaning."""

import json
from typing import Any

from rich.markup import escape
from rich.table import Table

from configs.keys import Key, all_keys
from configs.load import ConfigError, ConfigProblem, dump_config, load_config
from configs.problems import MISSING
from configs.problems import shorten as as_typed
from flows.commands.console import console


def show_keys(path: str, profile: str | None) -> None:
    """Print the keys at and under `path`; without one, the blocks.

    Raises:
        ConfigError: there is no such key.
    """
    from configs.load import describe

    try:
        keys = describe(path)
    except KeyError as error:
        raise ConfigError([ConfigProblem(path, MISSING, str(error.args[0]))]) from None
    values = dump_config(load_config(profile)) if profile else None
    if not path:
        keys = [key for key in keys if "." not in key.dotted]
    out = console()
    out.print(_table(keys, values))
    if not path:
        out.print(f"\n{len(all_keys())} keys in all: rl-pipeline config rl lists those of a block")


def _table(keys: list[Key], values: dict[str, Any] | None) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0))
    for heading in ("key", "default" if values is None else "value", "what may stand there"):
        table.add_column(heading, overflow="fold")
    for key in keys:
        shown = key.default if values is None else value_at(values, key.dotted)
        text = "" if key.is_block else as_typed(shown, 40)
        when = f" [dim](with {escape(key.when)})[/]" if key.when else ""
        doc = f"\n[dim]{escape(' '.join(key.doc.split()))}[/]" if key.doc else ""
        name = f"[bold]{escape(key.dotted)}[/]" if key.is_block else escape(key.dotted)
        table.add_row(name, escape(text), f"{escape(key.type)}{when}{doc}")
    return table


def value_at(values: dict[str, Any], dotted: str) -> Any:
    """The value at a dotted key of a resolved config; None where its variant is not chosen."""
    found: Any = values
    for name in dotted.split("."):
        found = found.get(name) if isinstance(found, dict) else None
    return found


def markdown(keys: list[Key]) -> str:
    """The keys as the table of docs/configuration.md."""
    lines = ["| key | default | what may stand there | meaning |", "| --- | --- | --- | --- |"]
    for key in keys:
        if key.is_block:
            lines.append(f"| **`{key.dotted}`** | | {key.type} | {_flat(key.doc)} |")
            continue
        when = f" (with `{key.when}`)" if key.when else ""
        default = json.dumps(key.default, ensure_ascii=False)
        lines.append(
            f"| `{key.dotted}` | `{default}` | {_flat(key.type)}{when} | {_flat(key.doc)} |"
        )
    return "\n".join(lines) + "\n"


def _flat(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")
