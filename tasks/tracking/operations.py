"""What is said to MLflow, as plain JSON operations, and the one place that says it.

An operation names runs by our own local names (`run`, `rl`, …), so that one that could not be said
now can be written down and said later (`tasks.tracking.pending`).
"""

import logging
import re
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from mlflow import MlflowClient

Operation = dict[str, Any]
RunStatus = Literal["FINISHED", "FAILED", "KILLED"]

EXPERIMENT_TAGS = {"mlflow.experimentKind": "custom_model_development"}
"""Has MLflow's pages show runs and their figures, not chat traces."""
PROXIED = "mlflow-artifacts:"
"""Scheme of an artefact address that only a server resolves."""
METRICS_PER_BATCH = 1000  # MLflow's own limit for one request
_DIGEST_CHARS = 36  # width of the digest column
_VALUE_CHARS = 5000  # MLflow refuses longer tag and parameter values
_FORBIDDEN = re.compile(r"[^\w\-./: ]")  # characters MLflow refuses in a name
logger = logging.getLogger(__name__)


def now_ms() -> int:
    """Wall-clock, milliseconds."""
    return int(time.time() * 1000)


def create_run(run: str, name: str, parent: str | None, tags: Mapping[str, str]) -> Operation:
    """Open a run, nested under `parent` where one is given."""
    body = {"run": run, "name": name, "parent": parent, "tags": dict(tags)}
    return {"op": "create_run", "start_ms": now_ms(), **body}


def log_params(run: str, params: Mapping[str, str]) -> Operation:
    """Parameters of a run."""
    clean = {_FORBIDDEN.sub("_", name): value[:_VALUE_CHARS] for name, value in params.items()}
    return {"op": "params", "run": run, "params": clean}


def log_metrics(run: str, lines: list[dict[str, Any]]) -> Operation:
    """Metric lines `{"step", "time_s", "values"}`; an unknown value (None) is left out."""
    metrics = [
        [_FORBIDDEN.sub("_", name), value, int(line["time_s"] * 1000), line["step"]]
        for line in lines
        for name, value in line["values"].items()
        if value is not None
    ]
    return {"op": "metrics", "run": run, "metrics": metrics}


def log_figures(run: str, values: Mapping[str, float]) -> Operation:
    """Figures of a whole run, one value each."""
    line = {"step": 0, "time_s": time.time(), "values": dict(values)}
    return log_metrics(run, [line])


def set_tags(run: str, tags: Mapping[str, str]) -> Operation:
    """Tags of a run."""
    return {"op": "tags", "run": run, "tags": dict(tags)}


def log_file(run: str, path: Path, folder: str | None) -> Operation:
    """Upload a file."""
    return {"op": "file", "run": run, "path": str(path.resolve()), "folder": folder}


def log_dataset(run: str, name: str, sha256: str, uri: str, context: str) -> Operation:
    """A dataset input under our own content hash."""
    body = {"run": run, "name": name, "sha256": sha256, "uri": uri, "context": context}
    return {"op": "dataset", **body}


def log_model(
    run: str, name: str, sha256: str, uri: str, direction: Literal["input", "output"]
) -> Operation:
    """A LoggedModel, found by its content hash or made, as input or output of a run."""
    body = {"run": run, "name": name, "sha256": sha256, "uri": uri, "direction": direction}
    return {"op": "model", **body}


def end_run(run: str, status: RunStatus) -> Operation:
    """Close a run."""
    return {"op": "end_run", "run": run, "status": status, "end_ms": now_ms()}


def follow_ledger(ledger_path: Path) -> Operation:
    """Bring the registered model and its aliases in line with a promotion ledger, as it then is."""
    return {"op": "registry", "ledger": str(ledger_path.resolve())}


class Speaker:
    """Says operations to one MLflow store; keeps which local name is which MLflow run."""

    def __init__(
        self, uri: str, experiment: str, artifacts: str | None, ids: Mapping[str, str] | None = None
    ) -> None:
        self.uri = uri
        self.experiment = experiment
        self.ids: dict[str, str] = dict(ids or {})
        self._artifacts = artifacts
        self._client: MlflowClient | None = None
        self._experiment_id: str | None = None

    @property
    def client(self) -> "MlflowClient":
        """The client, made at first use (importing MLflow takes seconds)."""
        if self._client is None:
            from mlflow import MlflowClient

            self._client = MlflowClient(tracking_uri=self.uri)
        return self._client

    @property
    def experiment_id(self) -> str:
        """The experiment, made where it is missing."""
        if self._experiment_id is None:
            found = self.client.get_experiment_by_name(self.experiment)
            self._experiment_id = (
                found.experiment_id
                if found is not None
                else self.client.create_experiment(
                    self.experiment, artifact_location=self._artifacts, tags=EXPERIMENT_TAGS
                )
            )
        return self._experiment_id

    def say(self, operation: Operation) -> None:
        """Carry one operation out."""
        getattr(self, f"_say_{operation['op']}")(operation)

    def _say_create_run(self, op: Operation) -> None:
        tags = dict(op["tags"])
        if op["parent"] is not None:
            tags["mlflow.parentRunId"] = self.ids[op["parent"]]
        run = self.client.create_run(
            self.experiment_id, start_time=op["start_ms"], tags=_clip(tags), run_name=op["name"]
        )
        self.ids[op["run"]] = run.info.run_id

    def _say_params(self, op: Operation) -> None:
        from mlflow.entities import Param

        items = [Param(k, v) for k, v in sorted(op["params"].items())]
        for start in range(0, len(items), 100):
            self.client.log_batch(self.ids[op["run"]], params=items[start : start + 100])

    def _say_metrics(self, op: Operation) -> None:
        from mlflow.entities import Metric

        items = [Metric(k, v, t, s) for k, v, t, s in op["metrics"]]
        for start in range(0, len(items), METRICS_PER_BATCH):
            chunk = items[start : start + METRICS_PER_BATCH]
            self.client.log_batch(self.ids[op["run"]], metrics=chunk)

    def _say_tags(self, op: Operation) -> None:
        from mlflow.entities import RunTag

        items = [RunTag(k, v) for k, v in sorted(_clip(op["tags"]).items())]
        self.client.log_batch(self.ids[op["run"]], tags=items)

    def _say_file(self, op: Operation) -> None:
        if not Path(op["path"]).is_file():
            logger.warning("%s is gone and is not uploaded to MLflow", op["path"])
            return
        run_id = self.ids[op["run"]]
        local = self._local_artifacts(run_id)
        if local is None:
            self.client.log_artifact(run_id, op["path"], op["folder"])
            return
        from mlflow.store.artifact.local_artifact_repo import LocalArtifactRepository

        LocalArtifactRepository(local).log_artifact(op["path"], op["folder"])

    def _local_artifacts(self, run_id: str) -> str | None:
        """Where a run's files lie that a server hands out, and now none runs: in our own folder."""
        if self._artifacts is None:
            return None
        uri = str(self.client.get_run(run_id).info.artifact_uri)
        if not uri.startswith(PROXIED):
            return None
        return f"{self._artifacts}/{uri.removeprefix(PROXIED).lstrip('/')}"

    def _say_dataset(self, op: Operation) -> None:
        from mlflow.entities import Dataset, DatasetInput, InputTag

        dataset = Dataset(
            name=op["name"],
            digest=op["sha256"][:_DIGEST_CHARS],
            source_type="local",
            source=op["uri"],
        )
        tags = [InputTag("mlflow.data.context", op["context"]), InputTag("sha256", op["sha256"])]
        self.client.log_inputs(self.ids[op["run"]], datasets=[DatasetInput(dataset, tags)])

    def _say_model(self, op: Operation) -> None:
        from mlflow.entities import LoggedModelInput, LoggedModelOutput

        run_id = self.ids[op["run"]]
        model_id = self._model_id(op, run_id)
        if op["direction"] == "input":
            self.client.log_inputs(run_id, models=[LoggedModelInput(model_id=model_id)])
        else:
            self.client.log_outputs(run_id, models=[LoggedModelOutput(model_id=model_id, step=0)])

    def _model_id(self, op: Operation, run_id: str) -> str:
        """The model with this content hash in the experiment; a reused stage makes no second."""
        found = self.client.search_logged_models(
            [self.experiment_id], filter_string=f"tags.sha256 = '{op['sha256']}'", max_results=1
        )
        if found:
            return str(found[0].model_id)
        model = self.client.create_logged_model(
            self.experiment_id,
            name=op["name"],
            source_run_id=run_id,
            tags={"sha256": op["sha256"], "uri": op["uri"]},
        )
        self.client.finalize_logged_model(model.model_id, "READY")
        return str(model.model_id)

    def _say_registry(self, op: Operation) -> None:
        from tasks.tracking.promotion_ledger import LedgerError, PromotionLedger
        from tasks.tracking.registry import ForeignRegistryError, follow_ledger

        path = Path(op["ledger"])
        try:
            follow_ledger(self.client, PromotionLedger(path.parent.parent, path.stem))
        except (ForeignRegistryError, LedgerError) as error:
            logger.warning("%s", error)  # the store took it; what is wrong lies elsewhere

    def _say_end_run(self, op: Operation) -> None:
        self.client.set_terminated(self.ids[op["run"]], op["status"], op["end_ms"])


def _clip(tags: Mapping[str, str]) -> dict[str, str]:
    return {name: value[:_VALUE_CHARS] for name, value in tags.items()}
