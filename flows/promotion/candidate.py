"""What the promotion gate's verdict means for the run."""

import json

from flows.run import Run
from tasks.artifacts import ArtifactRecord
from tasks.artifacts.errors import ArtifactCorruptError
from tasks.events import Event


def judge_promotion(run: Run, evaluation: ArtifactRecord) -> bool:
    """Read the gate; a policy that failed it is packaged as a candidate, and the run says so.

    With `evaluation.gate.stop_on_failure` the evaluation stage itself has stopped the run.

    Raises:
        ArtifactCorruptError: the evaluation left no verdict; unknown never passes.
    """
    path = evaluation.path / "summary.json"
    try:
        gate = json.loads(path.read_bytes())["gate"]
        promoted, reasons = gate["passed"] is True, list(gate["reasons"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ArtifactCorruptError(
            f"{path} holds no gate verdict ({error}); run again with --force evaluation", path
        ) from error
    run.context.facts["promoted"] = promoted
    if not promoted:
        message = f"not promoted, packaged as a candidate: {'; '.join(map(str, reasons))}"
        run.context.tell(Event("warning", "evaluation", message))
    return promoted
