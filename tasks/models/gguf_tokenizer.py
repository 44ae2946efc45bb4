"""Rebuilds a byte-level BPE tokenizer, chat template included, from a GGUF file's metadata."""

from collections.abc import Callable
from typing import TYPE_CHECKING

from tasks.models.gguf_llama import GgufFile, GgufReadError

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from tokenizers.pre_tokenizers import PreTokenizer
    from transformers import PreTrainedTokenizerFast

_NORMAL, _CONTROL, _USER_DEFINED, _UNUSED = 1, 3, 4, 5


def _smollm() -> "PreTokenizer":
    from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence

    return Sequence([Digits(individual_digits=True), ByteLevel(add_prefix_space=False)])


def _gpt2() -> "PreTokenizer":
    from tokenizers.pre_tokenizers import ByteLevel

    return ByteLevel(add_prefix_space=False)


_PRE_TOKENIZERS: dict[str, Callable[[], "PreTokenizer"]] = {"smollm": _smollm, "gpt-2": _gpt2}


def gguf_tokenizer(gguf: GgufFile) -> "PreTrainedTokenizerFast":
    """A tokenizer that gives the ids llama.cpp gives for the same file.

    Text with a byte that the vocabulary lacks becomes the unknown token, so that the renderer can
    refuse it; without one, `tokenizers` would drop the byte silently.

    Raises:
        GgufReadError: not byte-level BPE, a pre-tokenizer not known here, or damaged lists.
    """
    from transformers import PreTrainedTokenizerFast

    tokens: list[str] = gguf.require("tokenizer.ggml.tokens")
    kinds: list[int] = gguf.require("tokenizer.ggml.token_type")
    _check_lists(gguf, tokens, kinds)
    named = {
        f"{role}_token": tokens[gguf.metadata[key]]
        for role, key in _special_keys().items()
        if key in gguf.metadata
    }
    backend = _backend(gguf, tokens, kinds, named)
    specials = [t for t, kind in zip(tokens, kinds, strict=True) if kind == _CONTROL]
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        chat_template=gguf.metadata.get("tokenizer.chat_template"),
        clean_up_tokenization_spaces=False,
        model_max_length=int(gguf.require("llama.context_length")),
        extra_special_tokens=[t for t in specials if t not in named.values()],
        **named,
    )


def _special_keys() -> dict[str, str]:
    return {
        "bos": "tokenizer.ggml.bos_token_id",
        "eos": "tokenizer.ggml.eos_token_id",
        "unk": "tokenizer.ggml.unknown_token_id",
        "pad": "tokenizer.ggml.padding_token_id",
    }


def _check_lists(gguf: GgufFile, tokens: list[str], kinds: list[int]) -> None:
    model = gguf.require("tokenizer.ggml.model")
    if model != "gpt2":
        raise GgufReadError(
            f"{gguf.path.name} has tokenizer.ggml.model={model!r}; only byte-level BPE ('gpt2') "
            "is read"
        )
    if len(kinds) != len(tokens) or len(set(tokens)) != len(tokens):
        raise GgufReadError(
            f"{gguf.path.name}: {len(tokens)} tokens ({len(set(tokens))} distinct) with "
            f"{len(kinds)} token types; the lists must match and tokens be distinct"
        )
    strange = sorted(set(kinds) - {_NORMAL, _CONTROL, _USER_DEFINED, _UNUSED})
    if strange:
        raise GgufReadError(f"{gguf.path.name}: token types {strange} have no place in BPE")
    for key in _special_keys().values():
        if not 0 <= gguf.metadata.get(key, 0) < len(tokens):
            raise GgufReadError(
                f"{gguf.path.name}: {key}={gguf.metadata[key]} is outside {len(tokens)} tokens"
            )


def _backend(
    gguf: GgufFile, tokens: list[str], kinds: list[int], named: dict[str, str]
) -> "Tokenizer":
    from tokenizers import AddedToken, Tokenizer, decoders, models

    pre = gguf.require("tokenizer.ggml.pre")
    if pre not in _PRE_TOKENIZERS:
        raise GgufReadError(
            f"{gguf.path.name} has tokenizer.ggml.pre={pre!r}; known here: "
            f"{', '.join(sorted(_PRE_TOKENIZERS))}"
        )
    vocabulary = {t: i for i, t in enumerate(tokens) if kinds[i] != _UNUSED}
    bpe = models.BPE(
        vocab=vocabulary, merges=_merges(gguf, vocabulary), unk_token=named.get("unk_token")
    )
    backend = Tokenizer(bpe)
    backend.pre_tokenizer = _PRE_TOKENIZERS[pre]()
    backend.decoder = decoders.ByteLevel()
    for kind, special in ((_CONTROL, True), (_USER_DEFINED, False)):
        backend.add_tokens(
            [
                AddedToken(t, special=special, normalized=False)
                for t, k in zip(tokens, kinds, strict=True)
                if k == kind
            ]
        )
    _add_bos_and_eos(backend, gguf, tokens)
    return backend


def _merges(gguf: GgufFile, vocabulary: dict[str, int]) -> list[tuple[str, str]]:
    """The merges in order, each known to join two tokens into a third."""
    merges = []
    for rank, merge in enumerate(gguf.require("tokenizer.ggml.merges")):
        left, _, right = merge.partition(" ")
        if not {left, right, left + right} <= vocabulary.keys():
            raise GgufReadError(
                f"{gguf.path.name}: merge {rank}, {merge!r}, does not join two tokens into a third"
            )
        merges.append((left, right))
    return merges


def _add_bos_and_eos(backend: "Tokenizer", gguf: GgufFile, tokens: list[str]) -> None:
    """What `add_special_tokens=True` puts around a text: only what the file's flags ask for."""
    from tokenizers.processors import TemplateProcessing

    single, specials = ["$A"], {}
    for role, place in (("bos", 0), ("eos", 2)):
        if gguf.metadata.get(f"tokenizer.ggml.add_{role}_token", False):
            token_id = gguf.require(f"tokenizer.ggml.{role}_token_id")
            single.insert(place, tokens[token_id])
            specials[tokens[token_id]] = token_id
    if specials:
        backend.post_processor = TemplateProcessing(
            single=single, special_tokens=list(specials.items())
        )
