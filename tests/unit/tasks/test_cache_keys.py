"""One changed key reaches exactly the stages it should; the reason is said in words."""

import pytest

from configs.schema import PipelineConfig
from tasks.artifacts import ArtifactRecord
from tasks.artifacts.store import StageFolder
from tasks.cache_keys import StageKey, differences, explain, remember, stage_key, summarise
from tasks.stages import STAGES, StageSpec, external_inputs, masked, slice_values

RECORDS = {name: ArtifactRecord(kind="x", uri=name, sha256=f"hash of {name}") for name in STAGES}


def light(spec: StageSpec) -> StageSpec:
    """The spec with a small code closure: these tests are about settings."""
    return StageSpec(spec.name, spec.inputs, spec.slice, spec.entry, ("tasks.artifacts.record",))


def keys(config: PipelineConfig) -> dict[str, str]:
    """Key of every stage, inputs held fixed."""
    return {name: stage_key(light(spec), config, RECORDS).sha256 for name, spec in STAGES.items()}


@pytest.mark.parametrize(
    ("override", "reached"),
    [
        ({"data.seed": 5}, {"data"}),
        ({"data.source.type": "calculator", "data.source.train_rows": 4096}, {"data"}),
        ({"data.rl_bands": ["easy"]}, {"rl"}),
        ({"sft.steps": 3}, {"sft"}),
        ({"model.type": "scratch", "model.layers": 3}, {"sft", "package"}),
        ({"rl.steps": 20}, {"rl"}),
        ({"rl.optimiser.lr": 0.5}, {"rl"}),
        ({"evaluation.sampling.temperature": 0.5}, {"evaluation"}),
        ({"evaluation.sampling.max_new_tokens": 32}, {"evaluation", "quantize", "package"}),
        ({"quantize.types": ["Q8_0"]}, {"quantize"}),
        ({"package.name": "other"}, {"package"}),
        ({"system_prompt": "Be brief."}, {"sft", "rl", "evaluation", "quantize", "package"}),
        ({"tools": []}, {"rl", "evaluation", "quantize", "package"}),
        ({"cost.usd_per_device_hour": 3.0}, set()),
        ({"supervision.deadline_s": 60.0}, set()),
        ({"tracking.experiment": "elsewhere"}, set()),
    ],
)
def test_a_changed_setting_reaches_exactly_its_stages(override, reached):
    before = keys(PipelineConfig())
    config = PipelineConfig.model_validate(_nest(override))
    after = keys(config)
    assert {name for name in STAGES if before[name] != after[name]} == reached


def _nest(dotted):
    nested = {}
    for key, value in dotted.items():
        *parents, leaf = key.split(".")
        block = nested
        for parent in parents:
            block = block.setdefault(parent, {})
        block[leaf] = value
    return nested


def test_a_changed_input_hash_changes_the_key_and_an_unused_input_does_not():
    spec, config = light(STAGES["evaluation"]), PipelineConfig()
    other = {**RECORDS, "rl": ArtifactRecord(kind="x", uri="rl", sha256="other")}
    unused = {**RECORDS, "package": ArtifactRecord(kind="x", uri="p", sha256="other")}
    assert stage_key(spec, config, other).sha256 != stage_key(spec, config, RECORDS).sha256
    assert stage_key(spec, config, unused).sha256 == stage_key(spec, config, RECORDS).sha256


def test_the_key_follows_the_bytes_of_the_users_file_not_its_time(tmp_path):
    path = tmp_path / "train.jsonl"
    path.write_text("one")
    source = {"type": "file", "train": str(path)}
    config = PipelineConfig.model_validate({"data": {"source": source}})
    first = stage_key(light(STAGES["data"]), config, {})
    path.write_text("one")
    assert stage_key(light(STAGES["data"]), config, {}).sha256 == first.sha256
    path.write_text("two")
    second = stage_key(light(STAGES["data"]), config, {})
    assert differences(first.parts, second.parts) == ["file data.source.train changed"]


def test_a_file_that_is_not_there_reads_missing_not_an_error():
    source = {"type": "file", "train": "nowhere/train.jsonl"}
    config = PipelineConfig.model_validate({"data": {"source": source}})
    assert external_inputs("data", config) == {"data.source.train": "missing"}
    assert external_inputs("rl", config) == {}


def test_a_stage_sees_its_slice_and_defaults_elsewhere():
    changed = {
        "rl": {"steps": 7},
        "sft": {"steps": 9},
        "evaluation": {"sampling": {"max_turns": 5, "seed": 8}},
    }
    seen = masked(PipelineConfig.model_validate(changed), ("rl", "evaluation.sampling.max_turns"))
    assert seen.rl.steps == 7
    assert seen.sft == PipelineConfig().sft
    assert seen.evaluation.sampling.max_turns == 5
    assert seen.evaluation.sampling.seed == PipelineConfig().evaluation.sampling.seed


def test_slice_values_are_leaves_by_dotted_key():
    values = slice_values(PipelineConfig(), ("rl.optimiser", "tools"))
    assert values["rl.optimiser.betas"] == [0.9, 0.95]
    assert values["tools"] == ["calc"]
    assert "rl.steps" not in values


def test_differences_say_what_changed_in_words():
    old = {
        "config": {"rl.steps": 150, "rl.old": 1},
        "inputs": {"sft": "a"},
        "files": {},
        "code": {"tasks/rl/losses.py": "a", "tasks/rl/gone.py": "b"},
        "lock": {"cpu.lock": "a"},
        "versions": {"torch": "2.0"},
    }
    new = {
        "config": {"rl.steps": 20},
        "inputs": {"sft": "b"},
        "files": {},
        "code": {"tasks/rl/losses.py": "z", "tasks/rl/new.py": "c"},
        "lock": {"cpu.lock": "b"},
        "versions": {"torch": "2.1"},
    }
    assert differences(old, new) == [
        "config rl.old 1 -> (unset)",
        "config rl.steps 150 -> 20",
        "input sft changed",
        "code tasks/rl/gone.py removed",
        "code tasks/rl/losses.py changed",
        "code tasks/rl/new.py added",
        "lock cpu.lock changed",
        'torch "2.0" -> "2.1"',
    ]
    assert differences(old, old) == []
    assert differences(old, {"config": old["config"]}) == []


def test_summary_of_many_reasons_counts_the_rest():
    assert summarise(["a", "b"]) == "a; b"
    assert summarise(["a", "b", "c", "d", "e"]) == "a; b; c; and 2 more"


def test_explain_first_run_change_and_lost_output(tmp_path):
    key = StageKey("sft", {"config": {"sft.steps": 1}})
    assert explain(tmp_path, "sft", key.parts) == "first run"
    folder = StageFolder(tmp_path, "sft", key.sha256)
    remember(folder, key, tmp_path, finished=False)
    assert explain(tmp_path, "sft", key.parts) == "first run"
    remember(folder, key, tmp_path, finished=True)
    assert explain(tmp_path, "sft", {"config": {"sft.steps": 2}}) == "config sft.steps 1 -> 2"
    assert explain(tmp_path, "sft", key.parts) == "its last output is gone or was not finished"
    (tmp_path / "sft" / "last.json").write_text("{cut off")
    assert explain(tmp_path, "sft", key.parts) == "first run"
