"""Approval by a person: the flow suspends, its process ends, and a resume finds all stages done.

The ledger decides. `rl-pipeline approve` writes there first and then resumes the flow; a form
filled in Prefect's own page reaches the ledger through the resumed flow.
"""

import json
import logging
import re
from collections.abc import Mapping
from html import escape
from pathlib import Path
from typing import Any

from prefect.artifacts import create_markdown_artifact
from prefect.flow_runs import suspend_flow_run
from prefect.input import RunInput
from prefect.runtime import deployment as prefect_deployment
from prefect.runtime import flow_run

from configs.schema import PipelineConfig
from deployment.service_files import runs_folder
from flows.promotion.acts import settle_waiting
from flows.promotion.news import deploy_if_asked, spread
from flows.promotion.transcripts import transcripts_of
from flows.run import Run
from flows.summary import SUMMARY_NAME
from tasks.artifacts import write_json
from tasks.events import Event
from tasks.tracking.promotion_ledger import Entry, PromotionLedger, model_name, this_actor

ARTIFACT_KEY = "approval-transcripts"
logger = logging.getLogger(__name__)


class Approval(RunInput):
    """The form in Prefect's page; a resume without it is no approval."""

    approve: bool = False
    reason: str = ""


def settle_promotion(run: Run) -> None:
    """After the run has closed: start the deployment, or wait for a person who must decide.

    Raises:
        Pause: the flow suspends here; see `answered_approval` for how it goes on.
    """
    said = run.context.promotion
    if said is None:
        return
    context = run.context
    ledger = PromotionLedger(context.runs_dir, said["model"])
    if said["outcome"] == "waiting" and prefect_deployment.get_id() is not None:
        _show_transcripts(said, context.run_dir)
        _ask(said, context.config)
    champion = ledger.champion()
    if said["outcome"] == "promoted" and champion is not None:
        started = deploy_if_asked(champion, context.config, context.runs_dir)
        if started is not None:
            context.tell(Event("note", "promotion", started))


def answered_approval(config: PipelineConfig) -> dict[str, Any] | None:
    """Where this flow run was suspended for approval: write the answer, return its run's summary.

    None for every other flow run. Nothing is run again: all that was left to do was to ask.
    """
    flow_run_id = flow_run.get_id()
    if prefect_deployment.get_id() is None or flow_run_id is None:
        return None
    runs_dir = runs_folder()
    ledger = PromotionLedger(runs_dir, model_name(config.profile))
    asked = [e for e in ledger.entries() if e.evidence.get("flow_run_id") == str(flow_run_id)]
    if not asked:
        return None
    entry = asked[-1]
    path = runs_dir / entry.release.run_id / SUMMARY_NAME
    summary: dict[str, Any] = json.loads(path.read_bytes())
    said = summary["promotion"]
    latest = ledger.state().latest[entry.release.bundle_sha256]
    if latest.action == "candidate":
        answer = _ask(said, config)
        latest = _settle(ledger, entry, answer, config)
    promoted = latest.action != "reject"
    outcome = "promoted" if promoted else "candidate"
    said |= {"outcome": outcome, "reason": latest.reason, "sequence": latest.sequence}
    write_json(path, summary)
    return summary


def _ask(said: Mapping[str, Any], config: PipelineConfig) -> Approval:
    """Suspend this flow run until somebody answers; after the resume, the answer."""
    name = f"{said['model']}:{said['version']}"
    form = Approval.with_initial_data(
        description=f"**{escape(name)}** waits for approval. {escape(str(said['reason']))}\n\n"
        f"Look at the transcripts first: artifact `{ARTIFACT_KEY}`, or "
        f"`rl-pipeline approve {escape(name)}` in a terminal."
    )
    return suspend_flow_run(
        wait_for_input=form,
        key=f"approve-{said['bundle_sha256'][:16]}",
        timeout=max(1, int(config.promotion.approval_timeout_s)),
    )


def _settle(
    ledger: PromotionLedger, entry: Entry, answer: Approval, config: PipelineConfig
) -> Entry:
    """Write what a person answered in Prefect's page, and let it be known."""
    verdict = "approved" if answer.approve else "not approved"
    written = settle_waiting(
        ledger,
        entry.release.bundle_sha256,
        approve=answer.approve,
        reason=answer.reason.strip() or f"{verdict} in Prefect's page",
        actor=f"{this_actor()} (Prefect)",
    )
    runs_dir = ledger.path.parent.parent
    for note in spread(written, ledger, config):
        logger.warning("%s", note)
    if written.action == "approve":
        started = deploy_if_asked(written.release, config, runs_dir)
        if started is not None:
            logger.info("%s", started)
    return written


def _show_transcripts(said: Mapping[str, Any], run_dir: Path) -> None:
    """Leave the transcripts in Prefect's page."""
    name = f"{said['model']}:{said['version']}"
    text = approval_markdown(name, said, transcripts_of(run_dir))
    create_markdown_artifact(markdown=text, key=ARTIFACT_KEY, description=f"{name}: approve?")


def approval_markdown(name: str, said: Mapping[str, Any], shown: list[dict[str, Any]]) -> str:
    """The transcripts as Markdown in which nothing a model said is markup."""
    lines = [f"# {escape(name)}", "", escape(str(said["reason"])), ""]
    if not shown:
        lines.append("No transcripts were left by the run.")
    for pair in shown:
        lines += [
            f"## {escape(pair['kind'])}",
            fenced(pair["prompt"]),
            f"Gold: {fenced(pair['gold'])}",
        ]
        for side in pair["sides"]:
            lines.append(f"**{escape(side['name'])}** ({escape(side['outcome'])})")
            lines += [fenced(f"{m['role']}: {m['content']}") for m in side["messages"]]
    return "\n\n".join(lines)


def fenced(text: str) -> str:
    """A code block no text can leave: its fence is longer than any run of backticks inside."""
    longest = max((len(found) for found in re.findall(r"`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}text\n{text}\n{fence}"
