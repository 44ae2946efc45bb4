"""Releases: built from a run's records, found by name, verified, and shown to MLflow's registry."""

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from configs.schema import PipelineConfig
from deployment.jetson import signing
from deployment.jetson.on_device.verify import BundleError
from tasks.artifacts import ArtifactRecord
from tasks.run_context import RunContext
from tasks.tracking.operations import follow_ledger
from tasks.tracking.promotion_ledger import PromotionLedger, Release, ledgers, model_name

_VERSION = re.compile(r"(?:(?P<model>.+)[: ])?v?(?P<version>\d{1,9})\Z")
_SHA = re.compile(r"[0-9a-f]{6,64}\Z")


class NoReleaseError(LookupError):
    """No release of that name, or more than one."""

    def __str__(self) -> str:
        return str(self.args[0])


class ReleaseRefusedError(ValueError):
    """The release exists but may not be put into service as asked."""


def make_release(profile: str, run_id: str, records: Mapping[str, ArtifactRecord]) -> Release:
    """A release of what a run made; its version is the ledger's to give.

    Raises:
        NoReleaseError: the run made no bundle.
    """
    package = records.get("package")
    if package is None:
        raise NoReleaseError(f"run {run_id} made no bundle; finish it: rl-pipeline run")
    bundle = package.meta.get("bundle") or str(package.path / "bundle")
    return Release(
        model=model_name(profile),
        profile=profile,
        run_id=run_id,
        bundle_sha256=package.sha256,
        bundle=str(bundle),
        records=dict(records),
    )


def release_of_run(run_dir: Path) -> Release:
    """The release of a finished run's folder.

    Raises:
        NoReleaseError: no such run, no bundle, or records that cannot be read.
    """
    run_dir = run_dir.resolve()
    try:
        raw = json.loads((run_dir / "records.json").read_bytes())
        records = {stage: ArtifactRecord.model_validate(body) for stage, body in raw.items()}
        profile = PipelineConfig.model_validate(_json(run_dir / "config.json")).profile
    except FileNotFoundError as error:
        raise NoReleaseError(
            f"{run_dir} is no finished run ({Path(str(error.filename)).name} is missing); see "
            "rl-pipeline history for what can be promoted"
        ) from None
    except (OSError, ValueError, AttributeError, ValidationError) as error:
        raise NoReleaseError(f"the records of {run_dir} cannot be read: {error}") from error
    return make_release(profile, run_dir.name, records)


def _json(path: Path) -> Any:
    return json.loads(path.read_bytes())


def find_release(runs_dir: Path, name: str, model: str | None = None) -> Release:
    """The release meant: a run (id, folder, `latest`), a version (`v3`, `model:3`), or a hash.

    Raises:
        NoReleaseError: none, or several; says what there is.
    """
    for run_dir in (Path(name), runs_dir / name):
        if (run_dir / "records.json").is_file():
            return known_release(runs_dir, release_of_run(run_dir))
    found = [release for release in _known(runs_dir, model) if _is_named(release, name)]
    if len(found) == 1:
        return found[0]
    if found:
        names = ", ".join(f"{r.model}:{r.version}" for r in found[:5])
        raise NoReleaseError(f"{name} may mean {names}; name one of them")
    have = ", ".join(f"{r.model}:{r.version}" for r in _known(runs_dir, model)[-5:])
    raise NoReleaseError(
        f"no run, version or bundle {name!r} in {runs_dir}; "
        f"{f'the newest are {have}' if have else 'nothing was packaged there yet'}; "
        "rl-pipeline history lists them"
    )


def known_release(runs_dir: Path, release: Release) -> Release:
    """The release with the version its ledger gave it; as it is where the ledger has it not."""
    state = PromotionLedger(runs_dir, release.model).state()
    version = state.versions.get(release.bundle_sha256, 0)
    return release.model_copy(update={"version": version})


def _known(runs_dir: Path, model: str | None) -> list[Release]:
    wanted = None if model is None else model_name(model)
    return [
        release
        for ledger in ledgers(runs_dir)
        if wanted in (None, ledger.model)
        for release in ledger.state().releases
    ]


def _is_named(release: Release, name: str) -> bool:
    if release.run_id == name or (_SHA.match(name) and release.bundle_sha256.startswith(name)):
        return True
    version = _VERSION.match(name)
    return (
        version is not None
        and int(version["version"]) == release.version
        and version["model"] in (None, release.model, release.profile)
    )


def verify_release(release: Release, runs_dir: Path) -> None:
    """Check every byte of the release's bundle, its signature, and that it is the one recorded.

    Raises:
        ReleaseRefusedError: it is gone, changed, or not signed by a pinned key.
    """
    from deployment.jetson.serve import verify
    from tasks.artifacts import hash_file

    bundle = Path(release.bundle)
    named = os.environ.get(signing.KEY_VARIABLE)
    pin = (Path(named).parent if named else runs_dir / "keys") / signing.PIN_NAME
    try:
        if not pin.is_file():
            raise BundleError(f"there are no pinned keys at {pin}")
        if not bundle.is_dir():
            raise BundleError(f"{bundle} is gone")
        verify(bundle, pin)
        if hash_file(bundle / "manifest.json") != release.bundle_sha256:
            raise BundleError(f"{bundle} holds another bundle than the one recorded")
    except (BundleError, OSError) as error:
        raise ReleaseRefusedError(
            f"{release.name}: {error}. It is not put into service; package it anew (rl-pipeline "
            f"run -c {release.profile} --force package), or choose another one from rl-pipeline "
            "history"
        ) from error


def ready_ledger(runs_dir: Path, profile: str) -> PromotionLedger:
    """The profile's ledger, fit to be appended to: what a crash left half-written is put aside.

    Raises:
        LedgerError: it cannot be relied on; better said before the work than after it.
    """
    ledger = PromotionLedger(runs_dir, model_name(profile))
    ledger.recover()
    ledger.entries()
    return ledger


def follow(context: RunContext, ledger: PromotionLedger) -> bool:
    """Have MLflow's aliases follow the ledger; returns whether they do, or wait for the store."""
    if ledger.path.exists():
        context.tracker.say(follow_ledger(ledger.path))
    return context.tracker.pending == 0


def choose_ledger(runs_dir: Path, profile: str | None) -> PromotionLedger:
    """The ledger of a profile; without one, the only ledger there is.

    Raises:
        NoReleaseError: there is none, or there are several and none was named.
    """
    found = ledgers(runs_dir)
    if profile is not None:
        found = [ledger for ledger in found if ledger.model == model_name(profile)]
    if len(found) == 1:
        return found[0]
    if not found:
        of = f" for {profile}" if profile else ""
        raise NoReleaseError(f"nothing was packaged{of} in {runs_dir} yet: rl-pipeline run")
    names = ", ".join(ledger.model for ledger in found)
    raise NoReleaseError(f"there are ledgers of {names}; name one: --model {found[0].model}")


def config_of(release: Release, runs_dir: Path) -> PipelineConfig:
    """The settings of the run that made a release; the defaults where that run is gone."""
    path = runs_dir / release.run_id / "config.json"
    if not path.is_file():
        return PipelineConfig(profile=release.profile)
    return PipelineConfig.model_validate(_json(path))
