"""The stage on real tiny models: files, refusals, the same result twice."""

import json
import shutil

import pytest

from configs.schema import PipelineConfig
from configs.schema.evaluation import EvaluationConfig, EvaluationSampling, PromotionGate
from configs.schema.model import ScratchModel
from tasks.artifacts import ArtifactRecord, hash_file, write_jsonl
from tasks.artifacts.errors import ArtifactCorruptError
from tasks.artifacts.progress import Reporter, read_metrics
from tasks.environments.row import Demonstration, Row
from tasks.evaluation.selection import HeldoutEmptyError, HeldoutOverlapError
from tasks.evaluation.stage import PromotionRefusedError, PromptMismatchError, run
from tasks.models.load import save_model
from tasks.models.scratch import build_model, train_tokenizer

TINY = ScratchModel(hidden_size=32, layers=1, heads=2, kv_heads=1, ffn_size=32, max_length=64)
EVALUATION = EvaluationConfig(
    sampling=EvaluationSampling(samples=2, max_new_tokens=4, max_turns=2),
    max_problems=5,
    bootstrap_resamples=100,
)
CONFIG = PipelineConfig(evaluation=EVALUATION)


def row(name, prompt, band="easy"):
    return Row(id=name, prompt=prompt, answer="5", band=band)


@pytest.fixture
def store(tmp_path, tokenizer):
    """Records of data, sft and rl, the policy one being the snapshot's twin with other weights."""
    data = tmp_path / "data"
    heldout = [row(f"h{i}", f"{i}+5=?", "hard" if i % 2 else "easy") for i in range(8)]
    train = [row(f"t{i}", f"{i}*5=?") for i in range(4)]
    shown = [
        Demonstration(
            id="d0",
            row_id="t0",
            messages=[
                {"role": "user", "content": "0*5=?"},
                {"role": "assistant", "content": "0"},
            ],
        )
    ]
    write_jsonl(data / "heldout.jsonl", (r.model_dump() for r in heldout))
    write_jsonl(data / "train.jsonl", (r.model_dump() for r in train))
    write_jsonl(data / "demonstrations.jsonl", (d.model_dump() for d in shown))
    records = {"data": ArtifactRecord(kind="dataset", uri=str(data), sha256="0")}
    for stage, name, seed in (("sft", "snapshot", 1), ("rl", "policy", 2)):
        model = build_model(TINY, tokenizer, seed)
        sha = save_model(model, tokenizer, tmp_path / stage / name)
        records[stage] = ArtifactRecord(kind="model", uri=str(tmp_path / stage), sha256=sha)
    return records


def evaluated(config, records, out):
    record = run(config, records, out, Reporter(out))
    return record, json.loads((out / "summary.json").read_text())


def test_writes_answers_and_summary(store, tmp_path):
    out = tmp_path / "out"
    record, summary = evaluated(CONFIG, store, out)
    assert (record.kind, record.sha256) == ("evaluation", hash_file(out / "summary.json"))
    assert summary["heldout_sha256"] == hash_file(store["data"].path / "heldout.jsonl")
    assert summary["sampling"] == EVALUATION.sampling.model_dump()
    for name in ("snapshot", "policy"):
        lines = [json.loads(x) for x in (out / f"{name}.jsonl").read_text().splitlines()]
        assert len(lines) == 10  # 5 problems × 2 samples
        assert {line["row_id"] for line in lines} == {f"h{i}" for i in range(5)}
    assert summary["delta"]["n"] == summary["rl"]["n"] == 5
    assert [b["band"] for b in summary["sft"]["by_band"]] == ["easy", "hard"]
    assert summary["delta"]["value"] == summary["rl"]["accuracy"] - summary["sft"]["accuracy"]
    (metrics,) = read_metrics(out / "metrics.jsonl")
    assert metrics["values"]["rl_accuracy"] == summary["rl"]["accuracy"]
    assert json.loads((out / "progress.json").read_text())["done"] == 20


def test_twice_gives_the_same_hash(store, tmp_path):
    first, _ = evaluated(CONFIG, store, tmp_path / "one")
    second, _ = evaluated(CONFIG, store, tmp_path / "two")
    assert first.sha256 == second.sha256
    assert hash_file(tmp_path / "one/policy.jsonl") == hash_file(tmp_path / "two/policy.jsonl")


def test_same_weights_meet_the_same_draws(store, tmp_path):
    twin = store["sft"].path / "policy"
    shutil.copytree(store["sft"].path / "snapshot", twin)
    records = {**store, "rl": store["sft"]}
    out = tmp_path / "out"
    _, summary = evaluated(CONFIG, records, out)
    assert (out / "snapshot.jsonl").read_bytes() == (out / "policy.jsonl").read_bytes()
    assert summary["delta"]["value"] == 0.0
    assert summary["delta"]["ci95"] == [0.0, 0.0]
    assert not summary["gate"]["passed"]  # no difference is no improvement


def test_training_accuracy_comes_from_rl_metrics(store, tmp_path):
    reporter = Reporter(store["rl"].path)
    for step, accuracy in enumerate((0.1, 0.9), start=1):
        reporter.metrics(step, {"accuracy": accuracy})
    _, summary = evaluated(CONFIG, store, tmp_path / "out")
    gap = next(s for s in summary["drift"] if s["name"].startswith("training"))
    assert gap["value"] == pytest.approx(0.5 - summary["rl"]["accuracy"])


def test_failed_gate_stops_only_where_asked_and_keeps_the_answers(store, tmp_path):
    gate = PromotionGate(min_delta_ci_low=1.0, stop_on_failure=True)
    config = CONFIG.model_copy(update={"evaluation": EVALUATION.model_copy(update={"gate": gate})})
    out = tmp_path / "out"
    with pytest.raises(PromotionRefusedError, match="lower end of the accuracy difference"):
        evaluated(config, store, out)
    assert (out / "policy.jsonl").exists()
    assert json.loads((out / "summary.json").read_text())["gate"]["passed"] is False


def test_leak_into_training_is_refused(store, tmp_path):
    train = store["data"].path / "train.jsonl"
    train.write_text(train.read_text() + row("t9", " 3 + 5 = ? ").model_dump_json() + "\n")
    evaluated(CONFIG, store, tmp_path / "fine")  # "3+5=?" and "3 + 5 = ?" differ in words
    train.write_text(train.read_text() + row("t10", " 3+5=？ ").model_dump_json() + "\n")
    with pytest.raises(HeldoutOverlapError, match="'h3' has the prompt of training row 't10'"):
        evaluated(CONFIG, store, tmp_path / "out")
    assert not (tmp_path / "out" / "summary.json").exists()


def test_changed_weights_are_refused(store, tmp_path):
    broken = {**store, "rl": store["rl"].model_copy(update={"sha256": "f" * 64})}
    with pytest.raises(ArtifactCorruptError, match="its record says ffffffffffff"):
        evaluated(CONFIG, broken, tmp_path / "out")


def test_a18_another_tokenizer_is_refused(store, tmp_path):
    train_tokenizer(["something else 12+34"] * 5, 300).save_pretrained(store["rl"].path / "policy")
    with pytest.raises(PromptMismatchError, match="row 'h0'"):
        evaluated(CONFIG, store, tmp_path / "out")


def test_a18_a_template_that_adds_bos_on_one_side_is_refused(store, tmp_path):
    path = store["rl"].path / "policy" / "chat_template.jinja"
    path.write_text("<|im_start|>" + path.read_text())
    with pytest.raises(PromptMismatchError, match="row 'h0'"):
        evaluated(CONFIG, store, tmp_path / "out")


@pytest.mark.parametrize(
    ("adds", "renders", "leading"), [(True, True, 1), (False, True, 1), (True, False, 0)]
)
def test_a18_evaluation_prompts_have_the_templates_bos_and_no_second(
    engine_that_says, adds, renders, leading
):
    """The rendered text carries what the template gives; the tokenizer's own flag adds nothing."""
    from tokenizers.processors import TemplateProcessing

    from tasks.environments.renderer import PromptRenderer
    from tasks.evaluation.answers import answer_problems

    bos = "<|pad|>"
    copy = train_tokenizer(["12+30=?"] * 4, 300)
    copy.bos_token = bos
    copy.chat_template = ("{{ bos_token }}" if renders else "") + copy.chat_template
    if adds:
        copy.backend_tokenizer.post_processor = TemplateProcessing(
            single=f"{bos} $A", special_tokens=[(bos, copy.bos_token_id)]
        )
    renderer = PromptRenderer(copy)
    engine = engine_that_says("5", renderer=renderer)
    answer_problems(engine, [row("r", "12+30=?")], renderer, {}, EVALUATION.sampling)
    ids = engine.requests[0].prompt_ids
    messages = [{"role": "user", "content": "12+30=?"}]
    theirs = copy.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
    assert list(ids) == list(theirs)
    assert ids.count(copy.bos_token_id) == leading
    assert (ids[0] == copy.bos_token_id) is bool(leading)


def test_damaged_line_is_named(store, tmp_path):
    heldout = store["data"].path / "heldout.jsonl"
    heldout.write_text(heldout.read_text() + '{"id": "x"}\n')
    with pytest.raises(ArtifactCorruptError, match=r"heldout\.jsonl, line 9: not a Row"):
        evaluated(CONFIG, store, tmp_path / "out")


def test_no_heldout_rows_is_a_clear_error(store, tmp_path):
    (store["data"].path / "heldout.jsonl").write_text("")
    with pytest.raises(HeldoutEmptyError):
        evaluated(CONFIG, store, tmp_path / "out")
