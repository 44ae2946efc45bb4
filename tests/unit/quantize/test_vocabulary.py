"""The tokenizer on the device gives the ids of the tokenizer in training."""

import json
import shutil

import pytest
from gguf import GGUFReader
from tiny_models import TEMPLATE, make_model, make_tokenizer, qwen2_split, save
from tokenizers import Regex, normalizers, pre_tokenizers

from quantize import conversion_check, vocabulary
from quantize.convert import convert
from quantize.errors import ConversionCheckError, UnsupportedTokenizerError
from quantize.vocabulary import end_of_turn_id, merge_lines, pre_tokenizer_name
from tasks.sampling.llama_cpp_context import LlamaCppContext

BOS_TEMPLATE = "{{ bos_token }}" + TEMPLATE
LLAMA_SPECIALS = ("<|begin_of_text|>", "<|im_start|>", "<|im_end|>", "<|end_of_text|>")


def split(pattern):
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


PRE = {
    "gpt-2": pre_tokenizers.ByteLevel(add_prefix_space=False),
    "qwen2": qwen2_split(),
    "qwen35": split(vocabulary._QWEN35),
    "smaug-bpe": split(vocabulary._LLAMA3),
    "smollm": pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    ),
}


def fields(path):
    return {name: field.contents() for name, field in GGUFReader(path).fields.items()}


@pytest.mark.parametrize("name", PRE)
def test_each_pre_tokenizer_is_found_by_its_shape_and_gives_the_same_ids(name, tmp_path):
    tokenizer = make_tokenizer(pre=PRE[name], size=600)
    folder = save(make_model("qwen3", rows=640), tokenizer, tmp_path / "hf")
    report = convert(folder, tmp_path / "x.gguf")
    assert report.pre_tokenizer == name
    assert report.texts_checked == len(conversion_check.STRESS_TEXTS) + 4 * 4


def test_the_wrong_pre_tokenizer_is_noticed(tmp_path, monkeypatch):
    steps = (f"split {vocabulary._QWEN2}", "bytes")
    monkeypatch.setitem(vocabulary.PRE_TOKENIZERS, (steps, False), "gpt-2")
    folder = save(make_model("qwen3"), make_tokenizer(), tmp_path / "hf")
    with pytest.raises(ConversionCheckError, match=r"tokenises .* the HF tokenizer as"):
        convert(folder, tmp_path / "x.gguf")
    assert not (tmp_path / "x.gguf").exists()


def test_token_types_that_make_specials_text_are_noticed(tmp_path, monkeypatch):
    monkeypatch.setattr(vocabulary, "CONTROL", vocabulary.NORMAL)
    folder = save(make_model("qwen3"), make_tokenizer(), tmp_path / "hf")
    with pytest.raises(ConversionCheckError, match=r"im_start|pad"):
        convert(folder, tmp_path / "x.gguf")


def spec(pre, **model):
    return {"model": {"type": "BPE", **model}, "pre_tokenizer": pre}


def test_ignore_merges_tells_llama_bpe():
    steps = json.loads(PRE["smaug-bpe"].__getstate__())
    assert pre_tokenizer_name(spec(steps, ignore_merges=True)) == "llama-bpe"
    assert pre_tokenizer_name(spec(steps, ignore_merges=False)) == "smaug-bpe"


@pytest.mark.parametrize(
    "unknown",
    [
        spec(None),
        spec({"type": "Whitespace"}),
        spec({"type": "ByteLevel", "add_prefix_space": True, "use_regex": True}),
        spec({"type": "Digits", "individual_digits": False}),
        spec({"type": "Sequence", "pretokenizers": []}),
        spec({"type": "ByteLevel"}, ignore_merges=True),
    ],
)
def test_an_unknown_shape_lists_the_known_ones(unknown):
    with pytest.raises(UnsupportedTokenizerError, match=r"known: .*gpt-2.*smollm.*qwen2"):
        pre_tokenizer_name(unknown)


@pytest.mark.parametrize("model", [{"type": "Unigram"}, {"type": "BPE", "byte_fallback": True}])
def test_sentencepiece_is_refused(model):
    with pytest.raises(UnsupportedTokenizerError, match="only byte-level BPE"):
        pre_tokenizer_name({"model": model, "pre_tokenizer": None})


def test_merges_as_pairs_and_as_lines():
    assert merge_lines([["Ġ", "a"], ["b", "c"]]) == ("Ġ a", "b c")
    assert merge_lines(["Ġ a", "b c"]) == ("Ġ a", "b c")
    assert merge_lines([["a b", "c"]]) == ("aĠb c",)


@pytest.mark.parametrize("bad", [[], ["abc"], ["a b c"], [["a"]], ["a "]])
def test_malformed_merges_are_refused(bad):
    with pytest.raises(UnsupportedTokenizerError):
        merge_lines(bad)


def test_a_tokenizer_file_with_merges_as_lines_gives_the_same_file(folders, tmp_path):
    folder = shutil.copytree(folders["qwen3"], tmp_path / "hf")
    path = folder / "tokenizer.json"
    content = json.loads(path.read_text())
    assert isinstance(content["model"]["merges"][0], list)
    content["model"]["merges"] = [" ".join(pair) for pair in content["model"]["merges"]]
    path.write_text(json.dumps(content))
    first = convert(folders["qwen3"], tmp_path / "a.gguf")
    assert convert(folder, tmp_path / "b.gguf").sha256 == first.sha256


@pytest.mark.parametrize("arch", ["qwen2", "qwen3", "llama"])
def test_the_tokenizer_is_the_files_not_the_model_types(arch, tmp_path):
    """A full vocabulary with a pre-tokenizer of its own, in a folder that says qwen2."""
    tokenizer = make_tokenizer(pre=PRE["smollm"])
    folder = save(make_model(arch, rows=len(tokenizer)), tokenizer, tmp_path / "hf")
    report = convert(folder, tmp_path / "x.gguf")
    assert (report.pre_tokenizer, report.normaliser, report.padded) == ("smollm", None, 0)
    keys = fields(report.path)
    assert "<|endoftext|>" not in keys["tokenizer.ggml.tokens"]
    assert "tokenizer.ggml.unknown_token_id" not in keys


def test_no_tokenizer_file(folders, tmp_path):
    folder = shutil.copytree(folders["qwen3"], tmp_path / "hf")
    (folder / "tokenizer.json").unlink()
    with pytest.raises(UnsupportedTokenizerError, match=r"no tokenizer.json"):
        convert(folder, tmp_path / "x.gguf")


def test_nfc_is_said_and_anything_else_refused(tmp_path):
    tokenizer = make_tokenizer()
    tokenizer.backend_tokenizer.normalizer = normalizers.NFC()
    folder = save(make_model("qwen3"), tokenizer, tmp_path / "hf")
    assert convert(folder, tmp_path / "x.gguf").normaliser == "NFC"
    tokenizer.backend_tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.save_pretrained(folder)
    with pytest.raises(UnsupportedTokenizerError, match="Lowercase"):
        convert(folder, tmp_path / "x.gguf")


def test_eos_is_what_the_template_ends_turns_with(tmp_path):
    tokenizer = make_tokenizer(
        specials=("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
        eos_token="<|endoftext|>",
        pad_token="<|endoftext|>",
    )
    assert end_of_turn_id(tokenizer) == 2 != tokenizer.eos_token_id
    model = make_model("qwen3", eos_token_id=[0, 2])
    report = convert(save(model, tokenizer, tmp_path / "hf"), tmp_path / "x.gguf")
    keys = fields(report.path)
    assert keys["tokenizer.ggml.eos_token_id"] == report.eos_id == 2
    assert keys["tokenizer.ggml.eot_token_id"] == 0
    with LlamaCppContext(report.path, parallel_sequences=1, n_ctx_per_seq=32) as context:
        assert context.ends_generation(0) and context.ends_generation(2)
        assert not context.ends_generation(1)


def test_without_a_template_eos_is_the_tokenizers():
    assert end_of_turn_id(make_tokenizer(template=None)) == 2


def test_a_template_without_end_marks_falls_back_to_eos():
    template = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    assert end_of_turn_id(make_tokenizer(template=template)) == 2


def test_no_end_at_all_is_refused(tmp_path):
    tokenizer = make_tokenizer(template=None, pad_token="<|pad|>")
    folder = save(make_model("qwen3", eos_token_id=None), tokenizer, tmp_path / "hf")
    with pytest.raises(UnsupportedTokenizerError, match="never stop"):
        convert(folder, tmp_path / "x.gguf")


def test_several_eos_ids_all_end_generation(tmp_path):
    model = make_model("qwen3", eos_token_id=[2, 7, 9])
    report = convert(save(model, make_tokenizer(), tmp_path / "hf"), tmp_path / "x.gguf")
    with LlamaCppContext(report.path, parallel_sequences=1, n_ctx_per_seq=32) as context:
        assert all(context.ends_generation(i) for i in (2, 7, 9))


def test_more_eos_ids_than_the_file_can_name_is_an_error(tmp_path):
    model = make_model("qwen3", eos_token_id=[2, 7, 9, 11])
    folder = save(model, make_tokenizer(), tmp_path / "hf")
    with pytest.raises(ConversionCheckError, match="EOS id 11"):
        convert(folder, tmp_path / "x.gguf")


def server_ids(path, messages):
    """Ids as llama.cpp's own chat path makes them: the embedded template, then tokenise."""
    from llama_cpp.llama_chat_format import Jinja2ChatFormatter

    keys = fields(path)
    tokens = keys["tokenizer.ggml.tokens"]
    formatter = Jinja2ChatFormatter(
        template=keys["tokenizer.chat_template"],
        eos_token=tokens[keys["tokenizer.ggml.eos_token_id"]],
        bos_token=tokens[keys["tokenizer.ggml.bos_token_id"]],
    )
    prompt = formatter(messages=messages).prompt
    with LlamaCppContext(path, parallel_sequences=1, n_ctx_per_seq=64) as context:
        return context.tokenize(prompt, add_special=True)


def adds_bos(tokenizer):
    """Make plain text start with BOS, as Llama 3's tokenizer does."""
    from tokenizers import processors

    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{tokenizer.bos_token} $A",
        special_tokens=[(tokenizer.bos_token, tokenizer.bos_token_id)],
    )
    return tokenizer


@pytest.mark.parametrize("flag", [True, False], ids=["tokenizer adds BOS", "it does not"])
@pytest.mark.parametrize(
    ("template", "leading"), [(BOS_TEMPLATE, 1), (TEMPLATE, 0)], ids=["renders BOS", "none"]
)
def test_a18_leading_bos_count_is_the_templates(template, leading, flag, tmp_path):
    tokenizer = make_tokenizer(
        specials=LLAMA_SPECIALS,
        template=template,
        bos_token="<|begin_of_text|>",
        eos_token="<|im_end|>",
        pad_token="<|end_of_text|>",
    )
    if flag:
        tokenizer = adds_bos(tokenizer)
        assert tokenizer("a")["input_ids"][0] == tokenizer.bos_token_id
    folder = save(make_model("llama", bos_token_id=0), tokenizer, tmp_path / "hf")
    path = convert(folder, tmp_path / "x.gguf").path
    messages = [{"role": "user", "content": "34*7-52=?"}]
    expected = tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, tokenize=True, return_dict=False
    )
    got = server_ids(path, messages)
    assert got == list(expected)
    assert got[:2].count(tokenizer.bos_token_id) == leading


@pytest.mark.parametrize("flag", [True, False])
def test_a18_without_a_template_plain_text_decides(flag, tmp_path):
    tokenizer = make_tokenizer(
        specials=LLAMA_SPECIALS,
        template=None,
        bos_token="<|begin_of_text|>",
        eos_token="<|end_of_text|>",
    )
    if flag:
        tokenizer = adds_bos(tokenizer)
    folder = save(make_model("llama", bos_token_id=0, eos_token_id=3), tokenizer, tmp_path / "hf")
    path = convert(folder, tmp_path / "x.gguf").path
    assert fields(path)["tokenizer.ggml.add_bos_token"] is flag
    with LlamaCppContext(path, parallel_sequences=1, n_ctx_per_seq=64) as context:
        ids = context.tokenize("12 apples", add_special=True)
    assert ids == tokenizer("12 apples")["input_ids"]
