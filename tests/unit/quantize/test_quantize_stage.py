"""The whole stage on a tiny model: files, parity.json, verdicts, and what stops it."""

import json
from pathlib import Path

import numpy as np
import pytest
from gguf import GGUFReader
from tiny_models import make_model, make_tokenizer, save

import quantize.stage as stage
from configs.schema.quantize import QuantGate, QuantizeConfig, RepairConfig
from quantize.errors import ParityGateError, RolloutsError, VocabularySizeError
from quantize.rollouts import RolloutTokens
from quantize.side_by_side import Played
from tasks.artifacts.content_hash import hash_file, hash_json
from tasks.artifacts.progress import Reporter
from tasks.artifacts.record import ArtifactRecord
from tasks.sampling.llama_cpp_engine import LlamaCppEngine

KEYS = {
    "size_bytes",
    "bits_per_weight",
    "tensor_types",
    "kld_mean",
    "top1",
    "ppl_ratio",
    "accuracy",
    "accuracy_delta_ci95",
    "ships",
    "why",
}
TYPES = ("Q8_0", "Q4_K_M")


def write_rollouts(folder: Path, splits=("imatrix", "parity"), each=12) -> None:
    rng = np.random.default_rng(1)
    lines = []
    for split in splits:
        for _ in range(each):
            ids = rng.integers(3, 390, int(rng.integers(8, 30))).tolist()
            mask = [i >= 4 for i in range(len(ids))]
            lines.append(json.dumps({"token_ids": ids, "action_mask": mask, "split": split}))
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "rollouts.jsonl").write_text("\n".join(lines) + "\n")


@pytest.fixture
def inputs(tmp_path, tokenizer):
    save(make_model("qwen3", tie_word_embeddings=True), tokenizer, tmp_path / "rl/policy")
    save(make_model("qwen3", seed=7), tokenizer, tmp_path / "sft/snapshot")
    write_rollouts(tmp_path / "rl")
    return {
        name: ArtifactRecord(kind="model", uri=str(tmp_path / name), sha256="0" * 64)
        for name in ("rl", "sft")
    }


def config(**changes):
    gate = QuantGate(accuracy_ci_low=-1, max_kld=100, min_top1=0)
    settings = {
        "types": TYPES,
        "gates": dict.fromkeys(TYPES, gate),
        "accuracy_problems": 40,
        "max_f16_kld": 1e-4,
        "min_f16_top1": 0.95,
    }
    return QuantizeConfig(**settings | changes)


def answers(gguf: Path, n: int) -> np.ndarray:
    """Whether the next token after a fixed prompt is even: it depends on the file."""
    prompts = [[3 + i, 40 + i, 9] for i in range(n)]
    with LlamaCppEngine(gguf, n_ctx_per_seq=32, parallel_sequences=8) as engine:
        return np.array([row[-1].argmax() % 2 == 0 for row in engine.logits(prompts)], float)


def run(inputs, out_dir, settings=None, answer=answers):
    return stage.run(
        settings or config(), inputs, out_dir, Reporter(out_dir), answer_greedily=answer
    )


def test_everything_is_made_measured_and_hashed(inputs, tmp_path):
    out = tmp_path / "out"
    record = run(inputs, out)
    summary = json.loads((out / "parity.json").read_text())
    assert set(summary["quant"]) == {"F16", *TYPES}
    for name, facts in summary["quant"].items():
        assert set(facts) >= KEYS
        assert facts["size_bytes"] == (out / f"{name}.gguf").stat().st_size
        assert facts["sha256"] == hash_file(out / f"{name}.gguf")
    f16, q8, q4 = (summary["quant"][n] for n in ("F16", *TYPES))
    assert 0 < f16["kld_mean"] < 1e-5 < q8["kld_mean"] < q4["kld_mean"]
    assert f16["bits_per_weight"] > q8["bits_per_weight"] > q4["bits_per_weight"]
    assert f16["tensor_types"] == {"F16": 15} and q8["tensor_types"] == {"Q8_0": 15}
    assert f16["accuracy"] == answers(out / "F16.gguf", 40).mean()
    assert q4["accuracy"] == answers(out / "Q4_K_M.gguf", 40).mean()
    delta = q4["accuracy"] - f16["accuracy"]
    assert q4["accuracy_delta"] == pytest.approx(delta)
    assert q4["accuracy_delta_ci95"][0] <= delta <= q4["accuracy_delta_ci95"][1]
    assert f16["accuracy_delta_ci95"] == [0.0, 0.0]
    assert summary["snapshot_accuracy"] is not None
    assert summary["attribution"].startswith("RL ")
    assert summary["parity_tokens"] > 100
    assert record.kind == "quantisations"
    assert record.meta["ships"] == {"F16": True, "Q8_0": True, "Q4_K_M": True}
    assert record.sha256 == hash_json({f: hash_file(out / f) for f in record.meta["files"]})
    assert sorted(p.name for p in out.iterdir()) == [
        "F16.gguf",
        "Q4_K_M.gguf",
        "Q8_0.gguf",
        "imatrix.gguf",
        "parity.json",
        "progress.json",
    ]
    progress = json.loads((out / "progress.json").read_text())
    assert progress["done"] == progress["total"]


def test_twice_the_same_record(inputs, tmp_path):
    first = run(inputs, tmp_path / "a")
    again = run(inputs, tmp_path / "a")  # over its own output, as after a kill
    other = run(inputs, tmp_path / "b")
    assert first.sha256 == again.sha256 == other.sha256


def test_a_gate_rejects_and_the_file_stays(inputs, tmp_path):
    gates = {
        "Q8_0": QuantGate(accuracy_ci_low=-1, max_kld=100, min_top1=0),
        "Q4_K_M": QuantGate(accuracy_ci_low=-1, max_kld=1e-9, min_top1=0),
    }
    off = RepairConfig(enabled=False)
    record = run(inputs, tmp_path / "out", config(gates=gates, repair=off))
    assert record.meta["ships"] == {"F16": True, "Q8_0": True, "Q4_K_M": False}
    facts = json.loads((tmp_path / "out/parity.json").read_text())["quant"]["Q4_K_M"]
    assert facts["ships"] is False and facts["why"].startswith("rejected: mean KL")
    assert (tmp_path / "out/Q4_K_M.gguf").exists()


def strict(max_kld, **repair):
    gates = {
        "Q8_0": QuantGate(accuracy_ci_low=-1, max_kld=100, min_top1=0),
        "Q4_K_M": QuantGate(accuracy_ci_low=-1, max_kld=max_kld, min_top1=0),
    }
    return config(gates=gates, repair=RepairConfig(rollouts=6, **repair))


def test_a_rejected_quantisation_is_repaired_and_named_truthfully(inputs, tmp_path):
    run(inputs, tmp_path / "first", config())
    first = json.loads((tmp_path / "first/parity.json").read_text())["quant"]
    gate = 0.6 * first["Q4_K_M"]["kld_mean"]

    record = run(inputs, tmp_path / "out", strict(gate))
    quant = json.loads((tmp_path / "out/parity.json").read_text())["quant"]
    (name,) = set(quant) - {"F16", *TYPES}
    fixed = quant[name]
    assert name == f"Q4_K_M+{len(fixed['repaired']['tensors'])}"
    assert fixed["file"] == f"{name}.gguf" and fixed["repaired"]["of"] == "Q4_K_M"
    assert fixed["ships"] and fixed["kld_mean"] <= gate
    assert first["Q4_K_M"]["size_bytes"] < fixed["size_bytes"] < first["Q8_0"]["size_bytes"]
    assert record.meta["ships"] == {"F16": True, "Q8_0": True, "Q4_K_M": False, name: True}
    assert f"{name}.gguf" in record.meta["files"]
    rejected = quant["Q4_K_M"]
    assert rejected["repair"]["by"] == name and rejected["why"].endswith(f"repaired as {name}")
    # what the file says is what was written down about it
    reader = GGUFReader(tmp_path / "out" / fixed["file"])
    types = {t.name: t.tensor_type.name for t in reader.tensors}
    before = {t.name: t.tensor_type.name for t in GGUFReader(tmp_path / "out/Q4_K_M.gguf").tensors}
    changed = {n: {"from": before[n], "to": k} for n, k in types.items() if before[n] != k}
    assert changed == fixed["repaired"]["tensors"]
    assert reader.get_field("quantize.name").contents() == name
    assert not [p for p in (tmp_path / "out").iterdir() if p.name.startswith(".")]


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"max_tensors": 1}, "at most 1 tensors raised"),
        ({"time_limit_s": 1e-9}, "time limit"),
    ],
)
def test_what_cannot_be_repaired_does_not_ship_and_says_so(settings, said, inputs, tmp_path):
    record = run(inputs, tmp_path / "out", strict(1e-9, **settings))
    assert record.meta["ships"] == {"F16": True, "Q8_0": True, "Q4_K_M": False}
    facts = json.loads((tmp_path / "out/parity.json").read_text())["quant"]["Q4_K_M"]
    assert facts["repair"]["by"] is None and said in facts["repair"]["why"]
    assert "not repaired" in facts["why"]
    assert not [p for p in (tmp_path / "out").iterdir() if p.name.startswith(".")]


def test_accuracy_is_paired_by_problem(inputs, tmp_path):
    """Q8_0 loses ten of forty problems, Q4_K_M none: the verdicts follow."""

    def answer(gguf, n):
        right = np.ones(n)
        if gguf.name == "Q8_0.gguf":
            right[:10] = 0
        return right

    gate = QuantGate(accuracy_ci_low=-0.05, max_kld=100, min_top1=0)
    run(inputs, tmp_path / "out", config(gates=dict.fromkeys(TYPES, gate)), answer)
    summary = json.loads((tmp_path / "out/parity.json").read_text())
    q8 = summary["quant"]["Q8_0"]
    assert q8["accuracy"] == 0.75 and q8["accuracy_delta"] == -0.25
    assert not q8["ships"] and "-25.00" in q8["why"]
    assert summary["quant"]["Q4_K_M"]["ships"]
    assert "the loss with Q8_0 comes from quantisation" in summary["attribution"]


def test_without_a_snapshot_the_sentence_says_so(inputs, tmp_path):
    run({"rl": inputs["rl"]}, tmp_path / "out")
    summary = json.loads((tmp_path / "out/parity.json").read_text())
    assert summary["snapshot_accuracy"] is None and summary["rl_accuracy_delta"] is None
    assert "was not measured" in summary["attribution"]


def test_an_f16_file_that_is_not_the_model_stops_everything(inputs, tmp_path):
    with pytest.raises(ParityGateError, match="max_f16_kld=1e-12"):
        run(inputs, tmp_path / "out", config(max_f16_kld=1e-12))
    assert not (tmp_path / "out/Q8_0.gguf").exists()


@pytest.mark.parametrize("scores", [np.array([0.5, 1.0]), np.array([np.nan]), np.array([])])
def test_answers_must_be_zero_or_one(scores, inputs, tmp_path):
    with pytest.raises(RolloutsError, match=r"F16.gguf"):
        run(inputs, tmp_path / "out", answer=lambda gguf, n: scores)


def test_no_parity_rollouts_is_an_error(inputs, tmp_path):
    write_rollouts(inputs["rl"].path, splits=("imatrix",))
    with pytest.raises(RolloutsError, match="'parity'"):
        run(inputs, tmp_path / "out")


def test_a17_stops_before_anything_is_written(inputs, tmp_path):
    tokenizer = make_tokenizer()
    tokenizer.add_tokens([f"<t{i}>" for i in range(60)])
    tokenizer.save_pretrained(inputs["rl"].path / "policy")
    with pytest.raises(VocabularySizeError, match="<t59>"):
        run(inputs, tmp_path / "out")
    assert not list((tmp_path / "out").glob("*.gguf"))


def said(gguf: Path, places) -> list[Played]:
    """The answers of `answers`, with everything that was said: one greedy token."""
    right = answers(gguf, max(places) + 1)
    prompts = [(3 + i, 40 + i, 9) for i in places]
    with LlamaCppEngine(gguf, n_ctx_per_seq=32, parallel_sequences=8) as engine:
        tokens = [int(row[-1].argmax()) for row in engine.logits(prompts)]
    return [
        Played(
            row_id=str(place),
            band="easy",
            gold="even",
            correct=bool(right[place]),
            outcome="correct" if right[place] else "wrong",
            extracted=None,
            messages=({"role": "assistant", "content": str(token)},),
            tokens=RolloutTokens((*prompt, token), (False, False, False, True)),
        )
        for place, prompt, token in zip(places, prompts, tokens, strict=True)
    ]


def test_answers_side_by_side_and_the_comparison_of_matrices_are_written(inputs, tmp_path):
    settings = config(imatrix_compare=True, side_by_side_problems=10, types=("Q4_K_M",))
    record = stage.run(
        settings,
        inputs,
        tmp_path / "out",
        Reporter(tmp_path / "out"),
        answer_greedily=answers,
        play=said,
    )
    side = json.loads((tmp_path / "out" / "side_by_side.json").read_text())
    parity = json.loads((tmp_path / "out" / "parity.json").read_text())
    assert side["problems"] == 10 and list(side["files"]) == ["Q4_K_M"]
    assert side["attribution"] == parity["attribution"]
    flips = side["files"]["Q4_K_M"]["examples"]
    changed = answers(tmp_path / "out/F16.gguf", 40) != answers(tmp_path / "out/Q4_K_M.gguf", 40)
    shown = {int(e["row_id"]) for e in flips if e["kind"] != "other words"}
    assert shown and shown <= set(np.flatnonzero(changed))
    assert parity["imatrix"]["weights"] == settings.imatrix_weights
    rows = parity["imatrix"]["comparison"]["rows"]
    assert [r["matrix"] for r in rows] == ["own rollouts", "generic text", "none"]
    own = parity["quant"]["Q4_K_M"]["kld_mean"]
    assert rows[0]["kl"]["value"] == pytest.approx(own)
    assert "side_by_side.json" not in record.meta["files"]  # it is for people, not for stages
