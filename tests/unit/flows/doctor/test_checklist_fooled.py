"""Attempts to fool the pre-flight table: each must be seen, and say what to do."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from configs.load import load_config
from configs.schema import PipelineConfig
from flows.doctor.checklist import check_profile, final_temperature, run_checklist
from flows.doctor.checklist_prompts import MadeWith, changed_files, earlier_settings
from flows.doctor.checklist_run import golden_conversation
from flows.doctor.findings import Finding
from tasks.artifacts import ArtifactRecord, hash_tensors
from tasks.artifacts.store import StageFolder
from tasks.models.scratch import demonstration_texts, train_tokenizer
from tasks.rewards.verdict import Outcome, Verdict


def config_with(**overrides: object) -> PipelineConfig:
    path = Path(__file__).parents[1] / "defaults.yaml"
    return load_config(path, {key.replace("__", "."): value for key, value in overrides.items()})


def row(
    name: str, config: PipelineConfig, records: dict | None = None, made_with: tuple = ()
) -> Finding:
    found = next(f for f in run_checklist(config, records or {}, made_with) if f.name == name)
    assert found.remedy or found.status == "pass", "every finding says what to do"
    return found


class Run:
    """An SFT and an RL output in a store, as a run leaves them."""

    def __init__(self, folder: Path) -> None:
        self.runs = folder / "runs"
        texts = demonstration_texts([golden_conversation(["calc"])])
        self.tokenizer = train_tokenizer(texts, 288)
        self.records = {
            "sft": self._stage("sft", "snapshot", {}),
            "rl": self._stage("rl", "policy", {}),
        }
        meta = {"reference_sha256": self.records["sft"].sha256}
        self.records["rl"] = self.records["rl"].model_copy(update={"meta": meta})

    def _stage(self, stage: str, name: str, meta: dict) -> ArtifactRecord:
        folder = StageFolder(self.runs / "store", stage, "k" * 16)
        model = folder.path / name
        model.mkdir(parents=True)
        tensors = {"w": torch.arange(4.0)}
        save_file(tensors, str(model / "model.safetensors"))
        (model / "config.json").write_text('{"rope_theta": 10000.0}')
        self.tokenizer.save_pretrained(model)
        uri, sha256 = folder.path.as_posix(), hash_tensors(tensors)
        record = ArtifactRecord(kind="model", uri=uri, sha256=sha256, meta=meta)
        folder.finish(record, wall_s=1.0)
        return record

    def model(self, stage: str) -> Path:
        return self.records[stage].path / {"sft": "snapshot", "rl": "policy"}[stage]

    def remark(self, stage: str) -> None:
        """Mark the output as it is now, as if the stage had left it so."""
        StageFolder(self.runs / "store", stage, "k" * 16).finish(self.records[stage], wall_s=1.0)


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path)


FORMAT, REFERENCE = "prompt format same as SFT", "reference identical to SFT model"
SETTINGS = "system prompt and tools same as SFT"


def test_nothing_changed_passes(run: Run) -> None:
    assert row(FORMAT, config_with(), run.records).status == "pass"
    assert row(REFERENCE, config_with(), run.records).status == "pass"
    assert changed_files(run.records["sft"], "snapshot") == []


def template_of(run: Run, stage: str) -> Path:
    return run.model(stage) / "chat_template.jinja"


def test_a_template_changed_after_sft_is_seen_even_where_both_are_changed_alike(run: Run) -> None:
    for stage in ("sft", "rl"):
        template = template_of(run, stage)
        template.write_text("Answer in French. " + template.read_text())
    finding = row(FORMAT, config_with(), run.records)
    assert finding.status == "fail" and "snapshot/chat_template.jinja" in finding.looked_at


def test_a_template_that_rl_wrote_otherwise_is_seen_where_the_golden_text_does_not_show_it(
    run: Run,
) -> None:
    template = template_of(run, "rl")
    template.write_text(template.read_text() + "{# a branch nobody takes here #}")
    run.remark("rl")
    finding = row(FORMAT, config_with(), run.records)
    assert finding.status == "fail" and "different chat templates" in finding.looked_at


def test_a_model_config_changed_under_the_same_weights_is_seen(run: Run) -> None:
    (run.model("sft") / "config.json").write_text('{"rope_theta": 99.0}')
    finding = row(REFERENCE, config_with(), run.records)
    assert finding.status == "fail" and "snapshot/config.json" in finding.looked_at


def test_a_file_put_beside_the_weights_is_seen(run: Run) -> None:
    (run.model("sft") / "generation_config.json").write_text("{}")
    assert row(REFERENCE, config_with(), run.records).status == "fail"


def test_a_forged_list_of_files_is_seen(run: Run) -> None:
    mark = run.records["sft"].path / ".stage" / "finished.json"
    body = json.loads(mark.read_bytes())
    body["files"] = {}
    mark.write_text(json.dumps(body))
    assert row(REFERENCE, config_with(), run.records).status == "fail"


def data_record(tmp_path: Path, demonstrations: list[dict], train: list[dict], **meta: object):
    folder = tmp_path / "data"
    folder.mkdir(exist_ok=True)
    for name, lines in (("demonstrations", demonstrations), ("train", train)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(x) + "\n" for x in lines))
    record = ArtifactRecord(kind="dataset", uri=folder.as_posix(), sha256="0" * 64, meta=meta)
    return {"data": record}


def shown(*roles: tuple[str, str]) -> dict:
    return {"messages": [{"role": role, "content": text} for role, text in roles]}


def test_a_system_prompt_of_its_own_in_sft_is_seen(tmp_path: Path) -> None:
    theirs = [shown(("user", "1+1")), shown(("system", "Be brief."), ("user", "1+1"))]
    finding = row(SETTINGS, config_with(), data_record(tmp_path, theirs, []))
    assert finding.status == "fail" and '1 demonstrations say "Be brief."' in finding.looked_at
    same = data_record(tmp_path, theirs, [])
    assert row(SETTINGS, config_with(system_prompt="Be brief."), same).status == "pass"


def test_rows_whose_own_system_message_is_dropped_are_counted(tmp_path: Path) -> None:
    rows = [{"meta": {"system": "Be brief."}}, {"meta": {}}, {"meta": None}]
    finding = row(SETTINGS, config_with(), data_record(tmp_path, [shown(("user", "x"))], rows))
    assert finding.status == "warn" and "1 training rows" in finding.looked_at


@pytest.mark.parametrize(
    ("where", "status"), [("newest run", "warn"), ("champion micro v1", "fail")]
)
def test_a_snapshot_trained_with_another_prompt_or_tools_is_seen(where: str, status: str) -> None:
    plain = config_with().model_dump(mode="json")
    same = MadeWith(where, plain)
    assert row(SETTINGS, config_with(), {}, (same,)).status == "pass"
    for key, value in (("system_prompt", "Other."), ("tools", [])):
        finding = row(SETTINGS, config_with(), {}, (MadeWith(where, {**plain, key: value}),))
        assert finding.status == status and f"{key}=" in finding.looked_at


def test_the_settings_are_those_of_the_newest_run_and_of_the_champion(tmp_path: Path) -> None:
    from tasks.tracking.promotion_ledger import PromotionLedger, Release

    for run_id in ("old", "new"):
        (tmp_path / run_id).mkdir()
        body = {"profile": "p", "system_prompt": run_id}
        (tmp_path / run_id / "config.json").write_text(json.dumps(body))
    config = config_with(nightly__start_from="champion")
    assert [m.where for m in earlier_settings(config, tmp_path, "new")] == ["newest run"]
    release = Release(
        model=config.profile,
        profile=config.profile,
        run_id="old",
        bundle_sha256="a" * 64,
        bundle="b",
    )
    PromotionLedger(tmp_path, config.profile).append("promote", release, reason="first")
    found = earlier_settings(config, tmp_path, "new")
    assert [m.settings["system_prompt"] for m in found] == ["new", "old"]
    assert earlier_settings(config_with(), tmp_path, "gone") == ()


@pytest.mark.parametrize("name", ["sampling temperature", "evaluation settings"])
def test_an_evaluation_temperature_that_training_never_ends_at_is_seen(name: str) -> None:
    assert row(name, config_with(evaluation__sampling__temperature=0.0)).status == "warn"
    # 1.2 → 0.8 over 1000 steps has come to 1.16 after 100: not the 0.8 evaluation would use
    anneal = {"start": 1.2, "end": 0.8, "over_steps": 1000}
    config = config_with(
        rl__sampling__temperature=anneal, rl__steps=100, evaluation__sampling__temperature=0.8
    )
    assert final_temperature(config) == pytest.approx(1.16)
    assert row(name, config).status == "warn"
    done = config_with(
        rl__sampling__temperature={**anneal, "over_steps": 50},
        rl__steps=100,
        evaluation__sampling__temperature=0.8,
    )
    assert row(name, done).status == "pass"


@pytest.mark.parametrize(
    "fooled",
    [
        lambda kind, gold, reply, **k: Verdict(Outcome.CORRECT),  # everything is right
        lambda kind, gold, reply, **k: Verdict(Outcome.WRONG),  # nothing is
    ],
    ids=["always right", "always wrong"],
)
def test_a_verifier_that_does_not_look_is_seen(fooled, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tasks.rewards.verifiers.verify", fooled)
    finding = row("reward edge cases", config_with())
    assert finding.status == "fail" and "fix tasks/rewards" in finding.remedy


@pytest.mark.parametrize("empty", [r"\boxed{}", " \n", "<think>7</think>"])
def test_a_verifier_that_scores_an_empty_answer_is_seen(
    empty: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tasks.rewards import verifiers

    real = verifiers.verify

    def lenient(kind: str, gold: str, reply: str, **more: bool) -> Verdict:
        return Verdict(Outcome.CORRECT) if reply == empty else real(kind, gold, reply, **more)

    monkeypatch.setattr(verifiers, "verify", lenient)
    finding = row("reward edge cases", config_with())
    assert finding.status == "fail" and repr(empty) in finding.looked_at


def test_a_verifier_that_scores_what_was_cut_off_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    from tasks.rewards import verifiers

    real = verifiers.verify
    monkeypatch.setattr(verifiers, "verify", lambda k, g, r, **more: real(k, g, r))
    finding = row("reward edge cases", config_with())
    assert finding.status == "fail" and "cut off scores" in finding.looked_at


def test_the_answer_kind_that_data_prep_found_is_the_one_probed(tmp_path: Path) -> None:
    records = data_record(tmp_path, [], [], answer_kind="text")
    assert "of kind text" in row("reward edge cases", config_with(), records).looked_at


@pytest.mark.parametrize(
    ("key", "value", "name", "status", "part"),
    [
        ("rl__optimiser__lr", 1e-9, "RL learning rate", "fail", "stay where it is"),
        ("rl__trainable__targets", ["q_proj", "v_proj", "query"], "LoRA", "warn", "query"),
        ("rl__loss__clip_low", 0.001, "KL and clipping", "warn", "throws nearly every step"),
        ("rl__kl__adaptive", {"max_coefficient": 1e-5, "min_coefficient": 1e-6},
         "KL and clipping", "warn", "holds nothing"),
        ("rl__kl__adaptive", {"target_start": 0.05, "target_end": 0.1},
         "KL and clipping", "warn", "widens"),
        ("quantize__gates", {"Q4_K_M": {"accuracy_ci_low": -1.0}},
         "quantisation format", "warn", "quantize.gates.Q4_K_M.accuracy_ci_low"),
    ],
)  # fmt: skip
def test_settings_that_only_look_set_are_seen(
    key: str, value: object, name: str, status: str, part: str
) -> None:
    finding = row(name, config_with(**{key: value}))
    assert finding.status == status, finding
    assert part in finding.remedy


def test_the_command_looks_at_the_newest_run_of_the_profile(run: Run) -> None:
    config = config_with()
    home = run.runs / "20260101-a"
    home.mkdir()
    (home / "config.json").write_text(json.dumps(config.model_dump(mode="json")))
    records = {name: record.model_dump() for name, record in run.records.items()}
    (home / "records.json").write_text(json.dumps(records))
    found = {f.name: f for f in check_profile(config, run.runs)}
    assert found[REFERENCE].status == "pass" and found[SETTINGS].status == "pass"
    shutil.rmtree(run.model("sft"))
    assert {f.name: f for f in check_profile(config, run.runs)}[REFERENCE].status == "fail"
