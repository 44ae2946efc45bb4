"""A whole synthetic run on disk, for tests of the report. TEST DATA: no model was trained."""

import math
import random
from pathlib import Path

from tasks.artifacts import hash_bytes, write_json, write_jsonl

HOSTILE = (
    '<script>alert("x")</script><img src=x onerror=alert(1)> & "quotes" \'single\' '
    "\x1b[31mred\x1b[0m \x00 \u202egnirts\u202c \u200bhidden \ud800 </pre></details>{{ 7*7 }}"
)
STAGES = ("data", "sft", "rl", "evaluation", "quantize", "package")
KINDS = dict(
    zip(STAGES, ("dataset", "model", "model", "evaluation", "quantisations", "bundle"), strict=True)
)


def sha(name: str) -> str:
    """A hash that looks like one."""
    return hash_bytes(name.encode())


def make_run(root: Path, *, steps: int = 120, hostile: str = HOSTILE) -> Path:
    """Write stage folders under `root` and return the run's folder."""
    rng = random.Random(0)
    run_dir = root / "runs" / "20260101-test-data"
    folders = {stage: root / "runs" / "store" / stage / sha(stage)[:16] for stage in STAGES}
    for folder in folders.values():
        folder.mkdir(parents=True)
    _data(folders["data"])
    _sft(folders["sft"], rng)
    _rl(folders["rl"], steps, rng)
    _evaluation(folders["evaluation"], hostile, rng)
    write_json(folders["quantize"] / "parity.json", _parity())
    records = {
        stage: {
            "kind": KINDS[stage],
            "uri": folder.relative_to(root).as_posix(),
            "sha256": sha(stage),
            "meta": {},
        }
        for stage, folder in folders.items()
    }
    write_json(run_dir / "records.json", records)
    write_json(
        run_dir / "config.json",
        {"profile": "test-data", "data": {"source": {"type": "calculator"}}},
    )
    write_json(run_dir / "summary.json", _summary())
    return run_dir


def _data(folder: Path) -> None:
    write_json(folder / "summary.json", {"train_rows": 8192, "heldout_rows": 2048, "leaks": 3})
    write_json(
        folder / "gate.json",
        {
            "passed": True,
            "reasons": [],
            "verdicts": [
                {
                    "suite": suite,
                    "passed": True,
                    "checks": [
                        {"code": "row_count", "column": None, "passed": True, "observed": count},
                        {"code": "not_null", "column": "prompt", "passed": True, "observed": None},
                    ],
                }
                for suite, count in (("train", 8192), ("heldout", 2048))
            ],
        },
    )
    reasons = ["bad_gold: not one number: 'Anya'", "duplicate: same as q7", "duplicate: as q9"]
    write_jsonl(
        folder / "quarantine.jsonl",
        (
            {"row_id": f"q{i}", "line": 7 + i, "reason": reason, "row": {}, "split": "train"}
            for i, reason in enumerate(reasons)
        ),
    )


def _metrics(folder: Path, rows: list[dict]) -> None:
    write_jsonl(
        folder / "metrics.jsonl",
        ({"step": i + 1, "time_s": 1.0 * i, "values": row} for i, row in enumerate(rows)),
    )


def _sft(folder: Path, rng: random.Random) -> None:
    rows = []
    for step in range(300):
        loss = 0.35 + 3.2 * math.exp(-step / 45) + rng.gauss(0, 0.03)
        lr = 1e-3 * min(1, (step + 1) / 20) * (1 - 0.9 * step / 300)
        rows.append({"sft/loss": loss, "sft/grad_norm": 0.5 + rng.random() / 3, "sft/lr": lr})
    _metrics(folder, rows)


def _rl(folder: Path, steps: int, rng: random.Random) -> None:
    rows = []
    for step in range(steps):
        grown = 1 / (1 + math.exp(-(step - steps / 3) / (steps / 9)))
        age = min(2, step)
        rows.append(
            {
                "reward_mean": 0.25 + 0.66 * grown + rng.gauss(0, 0.035),
                "accuracy": 0.22 + 0.68 * grown + rng.gauss(0, 0.035),
                "kl_k1_mean": 0.07 * grown + rng.gauss(0, 0.004),
                "kl_k3_mean": 0.08 * grown + abs(rng.gauss(0, 0.003)),
                "kl_coefficient": 0.001 * 1.02 ** (step // 3),
                "entropy_mean": 0.62 - 0.35 * grown + rng.gauss(0, 0.012),
                "clip_fraction": max(0, 0.004 + 0.01 * grown + rng.gauss(0, 0.002)),
                "ess_share": 0.985 - 0.03 * rng.random(),
                "kept_token_share": 0.99 - 0.02 * rng.random(),
                "effective_share": 0.62 - 0.3 * grown + rng.gauss(0, 0.03),
                "weight_max": 1.1 + 0.8 * rng.random(),
                "staleness_mean": age * (0.4 + 0.2 * rng.random()),
                "staleness_max": float(age),
                "grad_norm": None if step == 40 else 0.2 + 0.1 * rng.random(),
                "some_other_metric": float(step),
            }
        )
    _metrics(folder, rows)
    write_json(
        folder / "summary.json",
        {
            "overlap_share": 0.71,
            "sync_proofs": 120,
            "ledger": {"wall_s": 170.0, "slots": 2, "miss_share": 0.0015, "balanced": True},
        },
    )
    write_json(
        folder / "ledger.json",
        {
            "earlier_wall_s": 170.0,
            "effective_samples": 6100.0,
            "samples": {"trained": 15360, "dropped": 128, "filtered": 0},
            "seconds": {
                "generator": {"rollout": 120.0, "grade": 3.0, "startup": 14.0, "idle": 33.0},
                "learner": {
                    "train": 118.0,
                    "sync": 7.0,
                    "checkpoint": 6.0,
                    "startup": 15.0,
                    "idle": 23.5,
                },
            },
            "usd_per_device_hour": 0.05,
        },
    )


def _line(row: int, sample: int, outcome: str, text: str, tools: bool, truncated: bool) -> dict:
    prompt = f"{11 + row}*{3 + row % 7}-{row}=?"
    messages = [{"role": "user", "content": prompt}]
    if tools:
        call = '<tool_call>{"name": "calc", "arguments": {"expression": "%s"}}</tool_call>'
        messages.append({"role": "assistant", "content": call % prompt[:-2]})
        messages.append({"role": "tool", "content": text})
    messages.append({"role": "assistant", "content": text})
    return {
        "row_id": f"h{row:04d}",
        "sample": sample,
        "band": ("easy", "medium", "hard")[row % 3],
        "seed": row * 7 + sample,
        "outcome": outcome,
        "gold": str((11 + row) * (3 + row % 7) - row),
        "extracted": text if outcome in ("correct", "wrong") else None,
        "normalised": None,
        "reason": "cut off at the token limit" if truncated else "",
        "tokens": 24 + row % 9,
        "turns": 2 if tools else 1,
        "truncated": truncated,
        "tool_calls": int(tools),
        "tool_errors": 0,
        "messages": messages,
    }


def _evaluation(folder: Path, hostile: str, rng: random.Random) -> None:
    before, after = [], []
    for row in range(60):
        for sample in range(4):
            gold = str((11 + row) * (3 + row % 7) - row)
            right = rng.random() < 0.25
            before.append(
                _line(
                    row,
                    sample,
                    "correct" if right else "wrong",
                    gold if right else "41",
                    False,
                    False,
                )
            )
            right = rng.random() < 0.85
            after.append(
                _line(
                    row,
                    sample,
                    "correct" if right else "no_answer",
                    gold if right else "4",
                    True,
                    not right,
                )
            )
    for line in (before[0], after[0]):  # what a hostile model would say
        line["messages"][-1]["content"] = hostile
        line["extracted"], line["reason"] = hostile, hostile
    after[0]["messages"][0]["content"] = hostile
    before[4]["messages"][-1]["content"] = "very long " * 5000
    # bytes by hand: a lone surrogate cannot be written as UTF-8, but JSON can escape it
    for name, lines in (("snapshot", before), ("policy", after)):
        text = "".join(_ascii_json(line) + "\n" for line in lines)
        (folder / f"{name}.jsonl").write_text(text)
    write_json(folder / "summary.json", _heldout())


def _ascii_json(line: dict) -> str:
    import json

    return json.dumps(line, ensure_ascii=True)


def _side(accuracy: tuple[float, float, float], n: int = 512, **over: object) -> dict:
    mean = sum(accuracy) / 3
    bands = [
        {
            "band": band,
            "accuracy": a,
            "n": n // 3,
            "ci95": [a - 0.05, a + 0.05],
            "answers": 4 * n // 3,
        }
        for band, a in zip(("easy", "medium", "hard"), accuracy, strict=True)
    ]
    answers = 4 * n
    return {
        "accuracy": mean,
        "ci95": [mean - 0.03, mean + 0.03],
        "n": n,
        "answers": answers,
        "by_band": bands,
        "outcomes": {
            "correct": round(mean * answers),
            "wrong": answers - round(mean * answers) - 14,
            "no_answer": 12,
            "unscored": 2,
        },
        "format_share": 0.99,
        "stability": 0.42,
        "lengths": {"mean": 14.2, "p50": 9.0, "p90": 31.0, "p99": 38.4, "max": 64.0},
        "truncated_share": 0.004,
        "tool_use_share": 0.24,
        "tool_error_share": 0.06,
        "turns_mean": 1.2,
        **over,
    }


def _heldout() -> dict:
    return {
        "sft": _side((0.41, 0.22, 0.09), tool_error_share=None),
        "rl": _side((0.97, 0.88, 0.79), stability=0.83, tool_use_share=0.985),
        "delta": {"value": 0.64, "ci95": [0.612, 0.667], "n": 512},
        "gate": {
            "passed": True,
            "reasons": [],
            "checks": [
                {
                    "name": "lower end of the accuracy difference",
                    "value": 0.612,
                    "limit": 0.0,
                    "passed": True,
                },
                {
                    "name": "share of truncated answers",
                    "value": 0.004,
                    "limit": 0.2,
                    "passed": True,
                },
            ],
        },
        "drift": [
            {
                "name": "answer length, times longer or shorter",
                "value": 2.31,
                "limit": 2.0,
                "passed": False,
            },
            {
                "name": "answers that can be read, share lost",
                "value": 0.0,
                "limit": 0.05,
                "passed": True,
            },
            {
                "name": "training accuracy above held-out",
                "value": None,
                "limit": 0.15,
                "passed": False,
            },
        ],
        "sampling": {
            "temperature": 1.0,
            "max_new_tokens": 64,
            "max_turns": 2,
            "samples": 4,
            "seed": 1,
        },
        "heldout_sha256": sha("heldout"),
    }


def _quant(name: str, size: int, bits: float, kld: float, top1: float, ships: bool = True) -> dict:
    return {
        "size_bytes": size,
        "bits_per_weight": bits,
        "kld_mean": kld,
        "top1": top1,
        "ppl_ratio": 1 + kld,
        "accuracy": 0.871 - kld,
        "accuracy_delta_ci95": None if name == "F16" else [-kld - 0.006, -kld + 0.008],
        "ships": ships,
        "why": "" if ships else "lower end of the accuracy difference is −7.1 points, limit −5.0",
    }


def _summary() -> dict:
    return {
        "run_id": "20260101-test-data",
        "profile": "test-data",
        "git_sha": sha("git")[:40],
        "machine": {"gflops_f32": 151.2, "cores": 2},
        "wall_s": 512.4,
        "stages": {
            stage: {
                "status": "completed",
                "cached": stage == "data",
                "wall_s": wall,
                "output_sha256": sha(stage),
            }
            for stage, wall in zip(STAGES, (4.1, 102.0, 191.0, 58.0, 131.0, 9.5), strict=True)
        },
        "heldout": _heldout(),
        "rl": {
            "steps": 120,
            "samples": 15360,
            "effective_samples": 6100.0,
            "staleness_limit": 2,
            "max_staleness_seen": 2,
            "resumes": 0,
        },
        "quant": {
            "F16": _quant("F16", 2_520_000, 16.0, 2e-7, 1.0),
            "Q8_0": _quant("Q8_0", 1_390_000, 8.51, 0.0004, 0.998),
            "Q4_K_M": _quant("Q4_K_M", 890_000, 5.2, 0.011, 0.981),
            "IQ2_M": _quant("IQ2_M", 560_000, 2.93, 0.071, 0.93, ships=False),
        },
        "bundle": {"path": "runs/store/package/x/bundle", "sha256": sha("package"), "signed": True},
        "mlflow": {"tracking_uri": "sqlite:///runs/mlflow.db", "run_id": sha("mlflow")[:32]},
        "cost": {
            "usd": 0.0071,
            "usd_per_effective_sample": 1.16e-6,
            "device_s": 339.5,
            "seconds_by_use": {"rollout": 119.0, "train": 118.0, "dropped": 1.0, "idle": 101.5},
            "dropped_share": 0.008,
        },
    }


def _parity() -> dict:
    types = {
        "F16": {"F16": 15},
        "Q8_0": {"Q8_0": 15},
        "Q4_K_M": {"Q4_K": 12, "Q6_K": 3},
        "IQ2_M": {"IQ2_S": 11, "IQ3_S": 3, "Q5_K": 1},
    }
    return {
        "attribution": "TEST DATA: what was lost between RL and the device is quantisation's.",
        "quant": {name: {"tensor_types": counts} for name, counts in types.items()},
    }
