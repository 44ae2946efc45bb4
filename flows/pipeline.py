"""The pipeline: prompts to a signed, quantised bundle.

Every stage is a Prefect task whose output is kept by content: reused where nothing it depends on
changed, run in a supervised process of its own where something did.
"""

from typing import Any

from prefect import State, flow

from configs.load import load_config
from flows.launch import run_pipeline
from flows.nightly.run import end_state, skipped_state, taken_in
from flows.nightly.start import starting_point
from flows.parameters import Profile, Stage
from flows.promotion.approval import answered_approval, settle_promotion
from flows.promotion.candidate import judge_promotion
from flows.promotion.decide import decide_promotion
from flows.quarantine.decisions import released_rows
from flows.run import open_run
from flows.run_ends import NightSkippedError
from tasks.evaluate_heldout import evaluate_heldout
from tasks.package_edge import package_edge
from tasks.prepare_data import prepare_data
from tasks.quantize_model import quantize_model
from tasks.train_rl import train_rl
from tasks.train_sft import train_sft

__all__ = ["rl_pipeline", "run_pipeline"]


@flow(name="rl-pipeline", persist_result=False, validate_parameters=True)
def rl_pipeline(
    profile: Profile = "calculator",
    overrides: dict[str, Any] | None = None,
    force: list[Stage] | None = None,
    stop_after: Stage | None = None,
    nightly: bool = False,
) -> dict[str, Any] | State[Any]:
    """Run the pipeline and return its summary.

    A night that does not start ends as Skipped, a state of type Cancelled.

    Args:
        profile: name of a profile, or path of a config file.
        overrides: values by dotted key, such as `{"rl.steps": 20}`.
        force: stages to run although their output could be reused.
        stop_after: the last stage to run.
        nightly: be the night of the schedule: take in new prompts, start from where the profile's
            `nightly` block says, and train only where there is something new.
    """
    config = load_config(profile, overrides or {})
    if (answered := answered_approval(config)) is not None:
        return answered
    try:
        with open_run(config, force=force or (), stop_after=stop_after, nightly=nightly) as run:
            data = run.stage(
                "data", prepare_data, **taken_in(run), **released_rows(run.context.runs_dir)
            )
            sft = run.stage("sft", train_sft, data=data, **starting_point(run, data))
            rl = run.stage("rl", train_rl, data=data, sft=sft)
            evaluation = run.stage("evaluation", evaluate_heldout, data=data, sft=sft, rl=rl)
            judge_promotion(run, evaluation)
            quantize = run.stage("quantize", quantize_model, data=data, sft=sft, rl=rl)
            run.stage(
                "package",
                package_edge,
                data=data,
                sft=sft,
                rl=rl,
                evaluation=evaluation,
                quantize=quantize,
            )
            decide_promotion(run)
    except NightSkippedError as skipped:
        return skipped_state(skipped)
    settle_promotion(run)
    return end_state(run)
