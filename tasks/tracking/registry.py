"""MLflow's model registry, made to follow the promotion ledger.

A registered model for each profile, a version for each release, and the aliases `champion` and
`previous`. The ledger is written first; what stands here is derived from it, as often as wanted:
every call compares and mends only what differs. An alias is never taken from MLflow.
"""

import contextlib
import fcntl
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tasks.tracking.promotion_entries import Entry, LedgerState, Release, fold
from tasks.tracking.promotion_ledger import PromotionLedger

if TYPE_CHECKING:
    from mlflow import MlflowClient

CHAMPION, PREVIOUS = "champion", "previous"
LEDGER_TAG = "ledger.first"
"""Hash of the ledger's first entry: which ledger a registered model follows."""
SHA_TAG = "bundle.sha256"
_PAGE = 200
_VALUE_CHARS = 5000


class ForeignRegistryError(RuntimeError):
    """The registered model follows another ledger; its aliases are not ours to move."""


@dataclass(frozen=True)
class Followed:
    """What a look at the registry changed."""

    model: str
    champion: str | None
    """MLflow's version number of the champion; None where there is none."""
    previous: str | None
    changes: tuple[str, ...] = ()
    """In words, in the order they were made; empty where the registry agreed already."""


def follow_ledger(client: "MlflowClient", ledger: PromotionLedger) -> Followed:
    """Bring the registry in line with the ledger; an empty ledger changes nothing.

    Versions first, then `previous`, then `champion`, and only then is a stale `previous` taken
    away: at no moment is there a champion the ledger does not know, and a process killed anywhere
    in between leaves what the next call mends.

    Raises:
        ForeignRegistryError: the model follows another ledger.
        LedgerError: the ledger cannot be relied on.
        MlflowException: the store does not answer.
    """
    with _one_at_a_time(ledger):
        entries = ledger.entries()
        state = fold(entries)
        if not entries:
            return Followed(ledger.model, None, None)
        changes: list[str] = []
        _own_model(client, ledger.model, entries[0], changes)
        versions = _versions(client, ledger.model)
        for release in state.releases:
            if release.bundle_sha256 not in versions:
                versions[release.bundle_sha256] = _make_version(client, release)
                changes.append(f"version {release.version} made")
        _tag_versions(client, ledger.model, state, versions)
        wanted = {
            name: versions[release.bundle_sha256]
            for name, release in ((PREVIOUS, state.previous), (CHAMPION, state.champion))
            if release is not None
        }
        changes += _move_aliases(client, ledger.model, wanted)
    return Followed(ledger.model, wanted.get(CHAMPION), wanted.get(PREVIOUS), tuple(changes))


def aliases(client: "MlflowClient", model: str) -> dict[str, str]:
    """Alias → bundle sha256 as the registry has it; empty where the model is not registered."""
    from mlflow.exceptions import MlflowException

    try:
        moved = client.get_registered_model(model).aliases
    except MlflowException as error:
        if error.error_code == "RESOURCE_DOES_NOT_EXIST":
            return {}
        raise
    return {
        name: client.get_model_version(model, version).tags.get(SHA_TAG, "")
        for name, version in moved.items()
        if name in (CHAMPION, PREVIOUS)
    }


@contextlib.contextmanager
def _one_at_a_time(ledger: PromotionLedger) -> Iterator[None]:
    """Two followers would make a version twice."""
    ledger.path.parent.mkdir(parents=True, exist_ok=True)
    path = ledger.path.with_name(f"{ledger.model}.registry.lock")
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def _own_model(client: "MlflowClient", model: str, first: Entry, changes: list[str]) -> None:
    """Make the registered model, or see that it follows this ledger."""
    from mlflow.exceptions import MlflowException

    tags = {LEDGER_TAG: first.hash, "profile": first.release.profile}
    try:
        found = client.get_registered_model(model)
    except MlflowException as error:
        if error.error_code != "RESOURCE_DOES_NOT_EXIST":
            raise
        client.create_registered_model(
            model,
            tags=tags,
            description="Signed bundles of one profile. The aliases follow the promotion ledger; "
            "move them with `rl-pipeline promote` and `rollback`, not here.",
        )
        changes.append(f"model {model} registered")
        return
    owner = found.tags.get(LEDGER_TAG)
    if owner is None:
        for name, value in tags.items():
            client.set_registered_model_tag(model, name, value)
    elif owner != first.hash:
        raise ForeignRegistryError(
            f"the registered model {model} follows another promotion ledger (its first entry is "
            f"{owner[:12]}, ours {first.hash[:12]}), as when two checkouts share one MLflow; its "
            "aliases are left alone. Give this profile another name, or, if the other ledger is "
            f"gone, delete the model's tag {LEDGER_TAG} in MLflow"
        )


def _versions(client: "MlflowClient", model: str) -> dict[str, str]:
    """MLflow's version number by bundle sha256; of two with the same, the older."""
    found: dict[str, str] = {}
    token = None
    while True:
        page = client.search_model_versions(
            f"name = '{model}'", max_results=_PAGE, page_token=token
        )
        for version in page:
            sha256 = version.tags.get(SHA_TAG)
            if sha256 and (sha256 not in found or int(version.version) < int(found[sha256])):
                found[sha256] = str(version.version)
        token = page.token
        if not token:
            return found


def _make_version(client: "MlflowClient", release: Release) -> str:
    """Register a release; its source is the run that made it, where MLflow knows that run."""
    run_id = _run_of(client, release.run_id)
    source = f"rl-pipeline:/bundle/{release.bundle_sha256}"
    if run_id is not None:
        source = client.get_run(run_id).info.artifact_uri
    made = client.create_model_version(
        release.model,
        source=source,
        run_id=run_id,
        tags=_clip(
            {
                SHA_TAG: release.bundle_sha256,
                "release.version": str(release.version),
                "bundle": release.bundle,
                "run_id": release.run_id,
                **_facts(release),
            }
        ),
        description=f"{release.name}, packaged by run {release.run_id}",
        await_creation_for=0,
    )
    return str(made.version)


def _facts(release: Release) -> dict[str, str]:
    """Hashes of what it was made from, and its quantisation."""
    records = release.records
    facts = {f"{stage}.sha256": record.sha256 for stage, record in sorted(records.items())}
    if "rl" in records:
        facts["policy.sha256"] = records["rl"].sha256
    if "package" in records:
        meta: dict[str, Any] = records["package"].meta
        facts["quantisation"] = str(meta.get("default", ""))
        facts["quantisations"] = ", ".join(map(str, meta.get("quantisations", ())))
    return {name: value for name, value in facts.items() if value}


def _run_of(client: "MlflowClient", run_id: str) -> str | None:
    """MLflow's id of one of our runs, in whichever experiment; None where it was not logged."""
    experiments = [e.experiment_id for e in client.search_experiments()]
    quoted = run_id.replace("'", "")
    found = client.search_runs(experiments, f"tags.run_id = '{quoted}'", max_results=1)
    return str(found[0].info.run_id) if found else None


def _tag_versions(
    client: "MlflowClient", model: str, state: LedgerState, versions: dict[str, str]
) -> None:
    """Put the newest entry about each release beside it."""
    for sha256, entry in state.latest.items():
        version = versions[sha256]
        said = _clip(
            {
                "ledger.hash": entry.hash,
                "ledger.action": entry.action,
                "ledger.actor": entry.actor,
                "ledger.reason": entry.reason,
                "ledger.time": entry.time,
            }
        )
        has = client.get_model_version(model, version).tags
        for name, value in said.items():
            if has.get(name) != value:
                client.set_model_version_tag(model, version, name, value)


def _move_aliases(client: "MlflowClient", model: str, wanted: dict[str, str]) -> list[str]:
    """`previous`, then `champion`, then what must go."""
    has = {name: str(v) for name, v in client.get_registered_model(model).aliases.items()}
    changes = []
    for name in (PREVIOUS, CHAMPION):
        if name in wanted and has.get(name) != wanted[name]:
            client.set_registered_model_alias(model, name, wanted[name])
            changes.append(f"{name} moved to version {wanted[name]}")
    for name in (CHAMPION, PREVIOUS):
        if name in has and name not in wanted:
            client.delete_registered_model_alias(model, name)
            changes.append(f"{name} taken away")
    return changes


def _clip(tags: dict[str, str]) -> dict[str, str]:
    return {name: value[:_VALUE_CHARS] for name, value in tags.items()}
