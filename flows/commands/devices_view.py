"""What `rl-pipeline devices` does: enrol, status, rollback, drill."""

import json
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer
from rich.table import Table

from configs.devices import choose, load_fleet
from configs.load import load_config
from configs.schema import PipelineConfig
from configs.schema.devices import Device, Fleet
from deployment.fleet.books import DeviceBooks
from deployment.fleet.enrol import choose_host_key, enrol, offered
from deployment.fleet.errors import DeployError, NothingToDeployError
from deployment.fleet.remote import Remote
from deployment.fleet.ssh import Shell
from flows.commands.console import console
from flows.commands.deploy_view import plain, results_table, watching

AT_ONCE = 8
"""Devices asked for their state at a time."""


@dataclass(frozen=True)
class EnrolOptions:
    """What `rl-pipeline devices enrol` was given."""

    name: str
    fingerprint: str | None
    replace_host_key: bool
    replace_key: bool
    devices: str | None
    allowed_signers: Path | None
    runs: Path


def _fleet(devices: str | None, config: PipelineConfig | None = None) -> Fleet:
    return load_fleet(devices or (config or PipelineConfig()).deploy.devices)


def enrol_and_show(options: EnrolOptions) -> None:
    """Compare the fingerprint, pin both keys, say what changed.

    Raises:
        DeployError, ConfigError: nothing was pinned on the device.
    """
    from flows.devices.flow import pinned

    fleet = _fleet(options.devices)
    (device,) = choose(fleet, [options.name])
    out = console()
    keys = offered(device)
    wanted = options.fingerprint or _ask(device, list(keys))
    done = enrol(
        device,
        Path(fleet.known_hosts),
        choose_host_key(device, keys, wanted),
        pinned(options.runs, options.allowed_signers),
        replace_host_key=options.replace_host_key,
        replace_key=options.replace_key,
    )
    said = {True: "pinned now", False: "was pinned already"}
    out.print(
        f"[green]enrolled[/] {done.device}: host key {done.host_key} {said[done.host_key_changed]}"
        f", signing key {said[done.signing_key_changed]}",
        soft_wrap=True,
    )
    facts = done.facts
    out.print(
        f"  L4T {plain(str(facts.get('l4t') or 'of no known release'))}, Python "
        f"{plain(str(facts.get('python')))}, {int(str(facts.get('free_bytes'))) >> 20:,} MiB free",
        soft_wrap=True,
    )
    if not facts.get("ssh_keygen"):
        out.print(
            "[yellow]![/] ssh-keygen is missing there: no bundle can be verified; install "
            "openssh-client"
        )


def _ask(device: Device, fingerprints: list[str]) -> str:
    """Have a person compare; without a terminal there is nobody to ask."""
    out = console(stderr=True)
    out.print(f"{device.name} at {device.host}:{device.port} shows", soft_wrap=True)
    for text in fingerprints:
        out.print(f"  {text}", soft_wrap=True)
    out.print("On the device: ssh-keygen -lf /etc/ssh/ssh_host_ed25519_key.pub")
    if not out.is_terminal:
        raise NothingToDeployError(
            f"{device.name}: give --fingerprint, read on the device itself; a key that only the "
            "network vouches for is not pinned"
        )
    typed: str = typer.prompt("Type the fingerprint that the device itself shows")
    return typed.strip()


def ask_state(device: Device, fleet: Fleet) -> dict[str, Any]:
    """What a device says of itself, and what its endpoint serves; an error instead, if there is."""
    from deployment.fleet.witness import served_release

    try:
        with Shell(device, Path(fleet.known_hosts)) as shell:
            facts = Remote(shell).call("facts", limit_s=60)
            return {"facts": facts, "serves": served_release(shell), "error": None}
    except DeployError as error:
        return {"facts": None, "serves": None, "error": str(error)}


def judge(device: Device, state: Mapping[str, Any], record: Mapping[str, Any] | None) -> list[str]:
    """What is wrong with a device; empty where it serves what the books say."""
    if state["error"] is not None:
        return [str(state["error"])]
    facts, serves = state["facts"], state["serves"]
    problems = []
    if facts["pin"] is None:
        problems.append("pins no signing key: enrol it")
    agents: Mapping[str, Any] = facts["agents"]
    for name, agent in agents.items():
        if agent["trying"] is not None:
            problems.append(f"{name}: a deployment was killed half-way; deploy again")
    known = (record or {}).get("release")
    current = {agent["current"] for agent in agents.values()}
    if serves is None:
        problems.append("its endpoint does not answer" if agents else "nothing was deployed yet")
    elif current and serves not in current:
        problems.append(f"serves {serves[:12]}, though `current` names another release")
    if known is not None and serves is not None and serves != known:
        problems.append(f"serves {serves[:12]}, the books say {str(known)[:12]}")
    return problems


def show_status(devices: str | None, only: tuple[str, ...], runs: Path, *, as_json: bool) -> bool:
    """Ask the devices; True where all is as the books say. A release unknown here is booked."""
    fleet = _fleet(devices)
    chosen = choose(fleet, only)
    books = DeviceBooks(runs)
    with ThreadPoolExecutor(AT_ONCE) as pool:
        states = list(pool.map(lambda device: ask_state(device, fleet), chosen))
    rows = []
    for device, state in zip(chosen, states, strict=True):
        record = books.record(device.name)
        rows.append(_row(device, state, record, judge(device, state, record)))
    if as_json:
        console().print_json(json.dumps(rows))
    else:
        console().print(_status_table(rows))
    return not any(row["problems"] for row in rows)


def _row(
    device: Device,
    state: Mapping[str, Any],
    record: Mapping[str, Any] | None,
    problems: list[str],
) -> dict[str, Any]:
    facts = state["facts"] or {}
    agents = facts.get("agents", {})
    return {
        "device": device.name,
        "host": device.host,
        "serves": state["serves"],
        "booked": (record or {}).get("release"),
        "previous": next((a["previous"] for a in agents.values()), None),
        "l4t": facts.get("l4t"),
        "free_bytes": facts.get("free_bytes"),
        "agents": agents,
        "problems": problems,
    }


def _status_table(rows: list[dict[str, Any]]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0))
    for heading in ("", "device", "serves", "before", "L4T", "free MiB", "problems"):
        table.add_column(heading, overflow="fold")
    for row in rows:
        free = "" if row["free_bytes"] is None else f"{int(row['free_bytes']) >> 20:,}"
        table.add_row(
            "[red]fail[/]" if row["problems"] else "[green]good[/]",
            row["device"],
            plain(str(row["serves"] or "–")[:12]),
            plain(str(row["previous"] or "–")[:12]),
            plain(str(row["l4t"] or "–")),
            free,
            plain("; ".join(row["problems"])),
        )
    return table


def rollback_and_show(
    names: tuple[str, ...], devices: str | None, config: str | None, runs: Path, *, every: bool
) -> bool:
    """Roll devices back and show how it went.

    Raises:
        NothingToDeployError: neither names nor --all.
    """
    from flows.devices.flow import roll_back

    if not names and not every:
        raise NothingToDeployError("name the devices to roll back, or give --all")
    settings = load_config(config) if config else PipelineConfig()
    fleet = _fleet(devices, settings)
    out = console()
    with watching(out) as listener:
        results, notes = roll_back(choose(fleet, names), fleet, settings, runs, listener)
    out.print(results_table(results, "rollback"))
    for note in notes:
        out.print(f"[yellow]![/] {plain(note)}", soft_wrap=True)
    return all(result.ok for result in results)


def drill_and_show(name: str, devices: str | None, config: str | None, runs: Path) -> bool:
    """Practise a rollback; True where the device came back to where it was."""
    from flows.devices.flow import drill

    settings = load_config(config) if config else PipelineConfig()
    fleet = _fleet(devices, settings)
    (device,) = choose(fleet, [name])
    out = console()
    with watching(out) as listener:
        results, notes = drill(device, fleet, settings, runs, listener)
    out.print(results_table(results, "drill: back, and forth again"))
    for note in notes:
        out.print(f"[yellow]![/] {plain(note)}", soft_wrap=True)
    good = len(results) == 2 and all(result.ok for result in results)
    if good:
        out.print(
            f"[green]good[/]: a rollback of {name} takes {results[0].seconds:.0f} s, and it is "
            "back where it was"
        )
    return good
