"""Candidate against champion, after quantisation: both shipped files, the same held-out problems.

Each answers as its own bundle serves it: the bundle's default file, its tokenizer, system prompt,
tools and limits, greedily. The difference is paired by problem.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from configs.schema.evaluation import EvaluationSampling
from tasks.artifacts import ArtifactRecord, hash_file, write_json, write_jsonl
from tasks.artifacts.bootstrap import paired_bootstrap
from tasks.artifacts.progress import Reporter
from tasks.environments.row import Row, read_rows
from tasks.evaluation.metrics import accuracy_block, correctness, ordered_bands
from tasks.evaluation.selection import stratified
from tasks.evaluation.types import AnswerRecord, ServedModel

CANDIDATE, CHAMPION = "candidate", "champion"
RESULT = "challenge.json"
Answer = Callable[
    [ServedModel, Sequence[Row], Callable[[int, int], None] | None], list[AnswerRecord]
]


class ChallengeError(ValueError):
    """A side cannot be scored: its bundle or tokenizer is not what it was."""


def served_model(package: ArtifactRecord, policy: Path) -> tuple[ServedModel, dict[str, Any]]:
    """The default model of a bundle as it is served, and what is said of it in the result.

    Raises:
        ChallengeError: manifest, model file or tokenizer are gone or differ from the record.
    """
    bundle = package.path / "bundle"
    try:
        raw_sha256 = hash_file(bundle / "manifest.json")
        manifest = json.loads((bundle / "manifest.json").read_bytes())
        default = manifest["default"]
        entry = manifest["models"][default]
        gguf = bundle / entry["file"]
        gguf_sha256 = hash_file(gguf)
        serving, prompt = manifest["serving"], manifest["prompt"]
        model = ServedModel(
            gguf,
            policy,
            prompt["system_prompt"],
            tuple(serving["tools"]),
            EvaluationSampling(
                temperature=0.0,
                samples=1,
                max_new_tokens=serving["max_new_tokens"],
                max_turns=serving["max_turns"],
            ),
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ChallengeError(f"{bundle} cannot be scored: {error!r}") from error
    if raw_sha256 != package.sha256 or gguf_sha256 != entry["sha256"]:
        changed = "manifest.json" if raw_sha256 != package.sha256 else entry["file"]
        raise ChallengeError(f"{bundle / changed} is not the file that was packaged")
    if not (policy / "tokenizer_config.json").is_file():
        raise ChallengeError(f"{policy} holds no tokenizer; was the run cleaned away?")
    facts = {"bundle_sha256": package.sha256, "quantisation": default, "file_sha256": gguf_sha256}
    return model, facts


def run(
    inputs: Mapping[str, ArtifactRecord],
    out_dir: Path,
    report: Reporter,
    *,
    problems: int,
    resamples: int,
    answer: Answer,
) -> ArtifactRecord:
    """Score both; writes `candidate.jsonl`, `champion.jsonl` and `challenge.json`.

    Args:
        inputs: `data`, `rl`, `package`, and the champion's `champion_rl`, `champion_package`.
        out_dir: the stage's folder.
        report: progress and metrics.
        problems: how many held-out problems, drawn alike for every challenge.
        resamples: of the paired bootstrap.
        answer: `(model, rows, progress)` → one greedy answer to each row, in order.

    Raises:
        ChallengeError: a bundle is not what its record says.
    """
    heldout = inputs["data"].path / "heldout.jsonl"
    rows = stratified(read_rows(heldout), problems)
    sides = {
        CANDIDATE: served_model(inputs["package"], inputs["rl"].path / "policy"),
        CHAMPION: served_model(inputs["champion_package"], inputs["champion_rl"].path / "policy"),
    }
    answers: dict[str, list[AnswerRecord]] = {}
    for number, (side, (model, _)) in enumerate(sides.items()):

        def tell(done: int, total: int, side: str = side, before: int = number) -> None:
            report.progress(before * total + done, 2 * total, f"the {side} answers")

        report.progress(number * len(rows), 2 * len(rows), f"the {side} answers")
        answers[side] = answer(model, rows, tell)
        write_jsonl(out_dir / f"{side}.jsonl", (a.to_json() for a in answers[side]))
    result = compare(answers[CANDIDATE], answers[CHAMPION], resamples=resamples)
    for side, (_, facts) in sides.items():
        result[side] |= facts
    result["heldout_sha256"] = hash_file(heldout)
    write_json(out_dir / RESULT, result)
    report.metrics(0, {f"challenge/{side}_accuracy": result[side]["accuracy"] for side in sides})
    report.metrics(0, {"challenge/delta": result["delta"]["value"]})
    report.progress(2 * len(rows), 2 * len(rows), "done")
    return ArtifactRecord(
        kind="challenge",
        uri=out_dir.as_posix(),
        sha256=hash_file(out_dir / RESULT),
        meta={"delta": result["delta"], "problems": result["problems"]},
    )


def compare(
    candidate: Sequence[AnswerRecord], champion: Sequence[AnswerRecord], *, resamples: int
) -> dict[str, Any]:
    """Accuracy of both, and candidate minus champion paired by problem, with a 95 % interval.

    Raises:
        ChallengeError: they did not answer the same problems in the same order.
    """
    if [a.row_id for a in candidate] != [a.row_id for a in champion]:
        raise ChallengeError("candidate and champion did not answer the same problems")
    delta = paired_bootstrap(
        correctness(candidate), correctness(champion), resamples=resamples, seed=0
    )
    return {
        "problems": len(candidate),
        CANDIDATE: _side(candidate),
        CHAMPION: _side(champion),
        "delta": {"value": delta.value, "ci95": [delta.low, delta.high]},
    }


def _side(answers: Sequence[AnswerRecord]) -> dict[str, Any]:
    bands = ordered_bands(a.band for a in answers)
    by_band = [
        {"band": band, **accuracy_block([a for a in answers if a.band == band])} for band in bands
    ]
    return {**accuracy_block(answers), "by_band": by_band}
