"""Where models differ at the edges: overflow, ties, scaling beyond the context, ends, BOS.

Each is held against transformers by its logits or ids, from the HF folder to the GGUF file.
"""

import json

import numpy as np
import pytest
import torch
from gguf import GGUFReader
from peft import LoraConfig, PeftModel, get_peft_model
from test_vocabulary import BOS_TEMPLATE, LLAMA_SPECIALS, adds_bos, server_ids
from tiny_models import TEMPLATE, hf_logits, kl, make_model, make_tokenizer, save
from transformers import AutoModelForCausalLM

from quantize.convert import convert
from quantize.errors import ParityError
from quantize.measure import activation_peaks, convert_and_compare
from quantize.merge import merge_adapter
from quantize.rollouts import RolloutTokens
from tasks.environments.renderer import PromptRenderer
from tasks.sampling.errors import NonFiniteLogitsError
from tasks.sampling.llama_cpp_context import LlamaCppContext


def llama_logits(path, ids):
    with LlamaCppContext(path, parallel_sequences=1, n_ctx_per_seq=512) as context:
        return next(context.logits_of([ids]))


def tensor_types(path):
    return {t.name: t.tensor_type.name for t in GGUFReader(path).tensors}


# activations beyond float16


def model_with_large_activations(scale=1e4):
    """The same function as before, with inputs of one matrix `scale` times as large."""
    model = make_model("qwen2")
    mlp = model.model.layers[0].mlp
    mlp.up_proj.weight.data *= scale
    mlp.down_proj.weight.data /= scale
    return model


@pytest.fixture
def rollout(ids):
    return RolloutTokens(tuple(ids), (False, *[True] * (len(ids) - 1)))


def test_activations_that_overflow_float16_keep_their_matrix_as_bfloat16(
    tmp_path, tokenizer, ids, rollout
):
    model = model_with_large_activations()
    folder = save(model, tokenizer, tmp_path / "hf")
    first = convert(folder, tmp_path / "F16.gguf")
    assert first.kept_wide == ()
    with pytest.raises(NonFiniteLogitsError):
        llama_logits(first.path, ids)
    again, parity = convert_and_compare(folder, first.path, [rollout], 1)
    assert again.kept_wide == ("blk.0.ffn_down.weight: BF16",)
    assert tensor_types(again.path)["blk.0.ffn_down.weight"] == "BF16"
    assert parity.kld.value < 1e-3
    assert kl(hf_logits(model, ids), llama_logits(again.path, ids)) < 1e-3


def test_activations_within_float16_change_nothing(tmp_path, tokenizer, rollout):
    folder = save(make_model("qwen2"), tokenizer, tmp_path / "hf")
    first = convert(folder, tmp_path / "F16.gguf")
    again, _ = convert_and_compare(folder, tmp_path / "again.gguf", [rollout], 1)
    assert again.sha256 == first.sha256 and again.kept_wide == ()


def test_peaks_are_the_largest_input_of_each_matrix(folders, ids):
    peaks = activation_peaks(folders["qwen2"], [ids, ids[:5]])
    model = AutoModelForCausalLM.from_pretrained(folders["qwen2"], dtype=torch.float32)
    seen = []
    down = model.model.layers[1].mlp.down_proj
    down.register_forward_pre_hook(lambda _m, x: seen.append(float(x[0].abs().max())))
    hf_logits(model, ids)
    assert peaks["blk.1.ffn_down.weight"] == pytest.approx(seen[0], rel=1e-6)
    assert len(peaks) == 2 * 7 + 1 and "output.weight" in peaks


def test_a_model_that_is_broken_in_float32_too_is_named(tmp_path, tokenizer, ids, rollout):
    """Finite weights whose products are not: nothing a wider type could mend."""
    model = make_model("qwen2")
    model.model.layers[1].mlp.up_proj.weight.data *= 1e25
    model.model.layers[1].mlp.gate_proj.weight.data *= 1e25
    folder = save(model, tokenizer, tmp_path / "hf")
    with pytest.raises(ParityError, match=r"before blk.1.ffn_down.weight are not finite"):
        activation_peaks(folder, [ids])
    with pytest.raises(ParityError, match=r"before blk.1.ffn_down.weight"):
        convert_and_compare(folder, tmp_path / "F16.gguf", [rollout], 1)
    assert not (tmp_path / "F16.gguf").exists()


# scaling of positions, beyond the context the model was first trained with

SCALINGS = {
    "linear": ("llama", {"rope_type": "linear", "factor": 4.0}),
    "yarn": (
        "qwen2",
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
    ),
    "yarn, qwen3": (
        "qwen3",
        {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 32},
    ),
    "llama3": (
        "llama",
        {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        },
    ),
}


@pytest.mark.parametrize("schema", ["rope_parameters", "rope_scaling"])
@pytest.mark.parametrize("scaling", SCALINGS)
def test_scaled_positions_beyond_the_original_context(scaling, schema, tmp_path, tokenizer):
    arch, rope = SCALINGS[scaling]
    model = make_model(arch, rope=rope)
    long = np.random.default_rng(3).integers(3, 420, 200).tolist()
    folder = save(model, tokenizer, tmp_path / "hf")
    if schema == "rope_scaling":  # as transformers 4 wrote it
        config = json.loads((folder / "config.json").read_text())
        config["rope_theta"] = config.pop("rope_parameters")["rope_theta"]
        config["rope_scaling"] = rope
        (folder / "config.json").write_text(json.dumps(config))
    path = convert(folder, tmp_path / "F32.gguf", "f32").path
    expected, got = hf_logits(model, long), llama_logits(path, long)
    assert kl(expected[32:], got[32:]) < 1e-10
    # the test can fail: without the scaling those positions are others
    unscaled = hf_logits(make_model(arch), long)
    assert kl(expected[32:], unscaled[32:]) > 1e-4
    names = {t.name for t in GGUFReader(path).tensors}
    assert ("rope_freqs.weight" in names) is (scaling == "llama3")
    keys = {n: f.contents() for n, f in GGUFReader(path).fields.items() if "rope.scaling" in n}
    assert (keys.get(f"{arch}.rope.scaling.type") or "llama3") == rope["rope_type"]


# several ends


def test_ends_named_only_by_the_generation_config_stop_too(tmp_path):
    """The template ends turns with one of them; serving stops on every other as well."""
    tokenizer = make_tokenizer()
    folder = save(make_model("llama", eos_token_id=7), tokenizer, tmp_path / "hf")
    generation = {"eos_token_id": [9, 7, 2]}
    (folder / "generation_config.json").write_text(json.dumps(generation))
    report = convert(folder, tmp_path / "x.gguf")
    assert report.eos_id == 2 == PromptRenderer(tokenizer).end_of_turn_id
    with LlamaCppContext(report.path, parallel_sequences=1, n_ctx_per_seq=32) as context:
        assert context.eos_id == 2
        assert [i for i in range(context.n_vocab) if context.ends_generation(i)] == [2, 7, 9]


# beginnings


@pytest.mark.parametrize(
    ("template", "flag", "leading"),
    [(BOS_TEMPLATE, True, 1), (BOS_TEMPLATE, False, 1), (TEMPLATE, True, 0)],
    ids=["template and flag", "template only", "flag only"],
)
def test_a18_hf_training_and_gguf_ids_are_equal(template, flag, leading, tmp_path):
    tokenizer = make_tokenizer(
        specials=LLAMA_SPECIALS,
        template=template,
        bos_token="<|begin_of_text|>",
        eos_token="<|im_end|>",
        pad_token="<|end_of_text|>",
    )
    if flag:
        tokenizer = adds_bos(tokenizer)
    folder = save(make_model("llama", bos_token_id=0), tokenizer, tmp_path / "hf")
    path = convert(folder, tmp_path / "x.gguf").path
    messages = [{"role": "user", "content": "34*7-52=?"}]
    hf = tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, tokenize=True, return_dict=False
    )
    renderer = PromptRenderer(tokenizer)
    training = list(renderer.prompt_ids(messages))
    assert list(hf) == training == server_ids(path, messages)
    assert training[:2].count(tokenizer.bos_token_id) == leading
    learned, _ = renderer.supervised([*messages, {"role": "assistant", "content": "186"}])
    assert list(learned[: len(training)]) == training


# ties, from the adapter to the file on the device

TIES = {
    "head": ({"target_modules": ["lm_head"]}, False),
    "both": ({"target_modules": ["embed_tokens", "lm_head"]}, False),
    "saved both": (
        {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens", "lm_head"]},
        False,
    ),
    "neither": ({"target_modules": ["q_proj"]}, True),
}


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("case", TIES)
def test_a19_the_gguf_file_is_base_plus_adapter(case, tmp_path, tokenizer, ids):
    """Converters trust the tie flag: a false one would drop the trained head."""
    settings, tied = TIES[case]
    base = save(make_model("qwen3", tie_word_embeddings=True), tokenizer, tmp_path / "base")
    trained = get_peft_model(
        AutoModelForCausalLM.from_pretrained(base), LoraConfig(r=4, lora_alpha=8, **settings)
    ).eval()
    torch.manual_seed(1)
    with torch.no_grad():
        for name, parameter in trained.named_parameters():
            if "lora_" in name or "modules_to_save" in name:
                parameter.add_(torch.randn_like(parameter) * 0.05)
    trained.save_pretrained(tmp_path / "adapter")
    reloaded = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(base), tmp_path / "adapter"
    ).eval()
    expected = hf_logits(reloaded, ids)
    merge_adapter(base, tmp_path / "adapter", tmp_path / "merged")
    path = convert(tmp_path / "merged", tmp_path / "F32.gguf", "f32").path
    assert kl(expected, llama_logits(path, ids)) < 1e-10
    assert ("output.weight" in tensor_types(path)) is not tied


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("tied", [True, False])
def test_a19_three_new_tokens_reach_the_gguf_file(tied, tmp_path, ids):
    tokenizer = make_tokenizer()
    rows = len(tokenizer)
    model = make_model("llama", rows=rows, tie_word_embeddings=tied)
    base = save(model, tokenizer, tmp_path / "base")
    model = AutoModelForCausalLM.from_pretrained(base)
    assert tokenizer.add_tokens(["<a>", "<b>", "<c>"]) == 3
    model.resize_token_embeddings(rows + 3, mean_resizing=False)
    modules = {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens", "lm_head"]}
    trained = get_peft_model(model, LoraConfig(r=4, **modules)).eval()
    torch.manual_seed(1)
    with torch.no_grad():
        for name, parameter in trained.named_parameters():
            if "modules_to_save" in name:
                parameter.add_(torch.randn_like(parameter) * 0.05)
    trained.save_pretrained(tmp_path / "adapter")
    tokenizer.save_pretrained(tmp_path / "adapter")
    text = [*(i % rows for i in ids[:20]), rows, rows + 1, rows + 2]
    merge_adapter(base, tmp_path / "adapter", tmp_path / "merged")
    report = convert(tmp_path / "merged", tmp_path / "F32.gguf", "f32")
    assert report.rows == rows + 3 and report.padded == 0
    assert kl(hf_logits(trained, text), llama_logits(report.path, text)) < 1e-10
    with LlamaCppContext(report.path, parallel_sequences=1, n_ctx_per_seq=32) as context:
        assert context.tokenize("<c>") == [rows + 2]
