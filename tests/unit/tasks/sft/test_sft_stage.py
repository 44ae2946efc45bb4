"""SFT on a real tiny model: it learns to answer and to stop, and freezes what it learnt."""

import json

import pytest
import torch

from tasks.artifacts import write_jsonl
from tasks.artifacts.progress import Reporter, read_metrics
from tasks.artifacts.record import ArtifactRecord
from tasks.environments.renderer import PromptRenderer
from tasks.environments.row import Demonstration
from tasks.models.errors import NonFiniteStepError
from tasks.models.load import hash_model, load_model, load_tokenizer
from tasks.sft.stage import NoDemonstrationsError, batches, encode, read_demonstrations, run

LORA = {"type": "lora", "r": 8, "alpha": 16, "targets": ["q_proj", "v_proj", "down_proj"]}


@pytest.fixture
def stage(tiny_config, tiny_data, tmp_path):
    """Run the stage: `stage("name", steps=3)` gives record and folder."""

    def build(name: str, data: ArtifactRecord = tiny_data.record, **sft):
        out = tmp_path / name
        return run(tiny_config(sft=sft), {"data": data}, out, Reporter(out)), out

    return build


def losses(out) -> list[float]:
    return [m["values"]["sft/loss"] for m in read_metrics(out / "metrics.jsonl")]


@pytest.mark.parametrize("trainable", [{"type": "full"}, LORA])
def test_loss_falls_and_the_snapshot_has_the_recorded_hash(stage, trainable, tiny_tokenizer):
    record, out = stage("run", steps=40, trainable=trainable)
    fallen = losses(out)
    share = 0.97 if trainable is LORA else 0.9  # a random base leaves adapters little to work with
    assert len(fallen) == 40 and sum(fallen[-5:]) < share * sum(fallen[:5])
    assert record.sha256 == hash_model(out / "snapshot") and record.kind == "model"
    names = load_model(out / "snapshot").state_dict()
    assert not any("lora" in n or "base_layer" in n for n in names)
    assert record.meta["adapter"] == (trainable is LORA)
    assert (record.meta["examples"], record.meta["too_long"], record.meta["steps"]) == (100, 0, 40)
    assert load_tokenizer(out / "snapshot").get_vocab() == tiny_tokenizer.get_vocab()


@pytest.mark.parametrize("trainable", [{"type": "full"}, LORA])
def test_twice_gives_the_same_snapshot_and_another_seed_another(stage, trainable):
    (one, first), (two, second) = (stage(n, steps=6, trainable=trainable) for n in "ab")
    assert one.sha256 == two.sha256 and losses(first) == losses(second)
    other, _ = stage("c", steps=6, trainable=trainable, seed=1)
    assert other.sha256 != one.sha256


def test_no_steps_freeze_the_base_model(stage):
    record, out = stage("run", steps=0)
    assert record.sha256 == hash_model(out / "snapshot")
    assert not (out / "metrics.jsonl").exists()


@pytest.mark.parametrize("steps", [1, 2, 3, 9])
def test_a07_a_run_of_skipped_steps_alone_does_not_complete(stage, monkeypatch, steps):
    from tasks.sft import stage as module

    made = module.base_model

    def broken(*args, **kwargs):
        model, tokenizer = made(*args, **kwargs)
        with torch.no_grad():
            model.model.norm.weight[0] = float("nan")
        return model, tokenizer

    monkeypatch.setattr(module, "base_model", broken)
    with pytest.raises(NonFiniteStepError, match=r"non-finite gradient.*learning rate|sft\.steps"):
        stage("run", steps=steps)


def test_micro_batches_change_nothing(stage):
    whole, cut = (
        stage(name, steps=3, deepspeed={"micro_batch_tokens": budget})[1]
        for name, budget in (("whole", 10**6), ("cut", 64))
    )
    assert losses(cut) == pytest.approx(losses(whole), rel=1e-4)


def test_a08_the_model_learns_to_stop(stage, tiny_data):
    _, out = stage("run", steps=60)
    model = load_model(out / "snapshot")
    renderer = PromptRenderer(load_tokenizer(out / "snapshot"))
    ends = []
    for demonstration in tiny_data.demonstrations[:20]:
        ids, mask = renderer.supervised(demonstration.messages)
        assert ids[-1] == renderer.end_of_turn_id and mask[-1]
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([ids[:-1]])).logits[0, -1]
        ends.append(float(torch.softmax(logits, -1)[renderer.end_of_turn_id]))
    assert sum(ends) / len(ends) > 0.8


def test_a08_every_finished_example_supervises_its_end(tiny_data, tiny_renderer):
    examples, too_long = encode(tiny_data.demonstrations, tiny_renderer, 128)
    end = tiny_renderer.end_of_turn_id
    finished = sum(ids[-1] == end and mask[-1] for ids, mask in examples)
    assert finished == len(examples) == 100 and too_long == 0
    direct = [(i, m) for (i, m), d in zip(examples, tiny_data.demonstrations, strict=True)
              if len(d.messages) == 2]  # fmt: skip
    assert all(sum(m for t, m in zip(i, mask, strict=True) if t == end) == 1 for i, mask in direct)


def test_too_long_demonstrations_are_counted_and_left_out(
    tiny_data, tiny_renderer, stage, tmp_path
):
    lengths = [len(tiny_renderer.supervised(d.messages)[0]) for d in tiny_data.demonstrations]
    limit = sorted(lengths)[69]
    examples, too_long = encode(tiny_data.demonstrations, tiny_renderer, limit)
    assert len(examples) == sum(x <= limit for x in lengths) and too_long == 100 - len(examples) > 0
    assert max(len(ids) for ids, _ in examples) == limit


@pytest.mark.parametrize("limit", [3, 0])
def test_none_that_fits_is_a_named_error(tiny_data, tiny_renderer, limit):
    with pytest.raises(NoDemonstrationsError, match=rf"none of 100 .*max_length={limit}"):
        encode(tiny_data.demonstrations, tiny_renderer, limit)


def test_no_demonstration_at_all_is_a_named_error(tiny_renderer):
    with pytest.raises(NoDemonstrationsError, match="none of 0"):
        encode([], tiny_renderer, 128)


def test_demonstrations_with_line_separators_in_their_text_are_read_whole(tmp_path):
    text = "a\u2028b\u0085c\x0bd"
    talk = [{"role": "user", "content": text}, {"role": "assistant", "content": "7"}]
    one = Demonstration(id="1", row_id="r", messages=talk)
    write_jsonl(tmp_path / "d.jsonl", [json.loads(one.model_dump_json())] * 2)
    assert read_demonstrations(tmp_path / "d.jsonl") == [one, one]


@pytest.mark.parametrize(("count", "size"), [(10, 3), (10, 10), (3, 8), (1, 2)])
def test_batches_show_everything_before_anything_again(count, size):
    order = list(batches(count, size, steps=12, seed=4))
    assert [len(b) for b in order] == [size] * 12
    flat = [i for batch in order for i in batch]
    for start in range(0, len(flat) - count + 1, count):
        assert sorted(flat[start : start + count]) == list(range(count))
    assert order == list(batches(count, size, steps=12, seed=4))
    if count == 10:
        assert order != list(batches(count, size, steps=12, seed=5))
