"""Opens a written GGUF file in llama.cpp and asks whether it is still the same model to talk to."""

import logging
import unicodedata
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np

from quantize.errors import ConversionCheckError
from quantize.vocabulary import Vocabulary
from tasks.sampling.llama_cpp_context import GgufLoadError, LlamaCppContext

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

STRESS_TEXTS = (
    "34*7-52=?",
    "0 00 007 1234567890 12 345 6789 3.14159 -1e-10 1,000,000",
    "x1y22z333 4444th 55555",
    "The quick brown fox, it's can't we'LL I'M they'Ve 'tis",
    "  two  spaces   three\tand\ttabs \t mixed  ",
    "line one\nline two\n\nline four\r\nWindows\r\n\r\n end \n \n  indented\n",
    "\n",
    "\r\n\r",
    " ",
    "    ",
    '{"name": "calc", "arguments": {"expression": "34*7-52"}}',
    "<tool_call>\n{}\n</tool_call><think>\n</think>",
    "def f(x):\n\treturn x**2  # комментарий\n",
    "Grüße aus Zürich, naïve café, Ångström, İstanbul ı ß ẞ ﬁ",
    "e\u0301 a\u0308\u0323 n\u0303o combining \u0915\u094d\u0937\u093f",
    "\u0e01\u0e33\u0e25\u0e31\u0e07 \u0e20\u0e32\u0e29\u0e32",
    "日本語のテキスト、漢字とかな。中文，标点！한국어 문장",
    "مرحبا بالعالم ١٢٣ שלום עולם हिन्दी १२३",
    "😀 👍🏽 👩\u200d💻 🇩🇪 🏳️\u200d🌈",
    "∑∫√≤≥≠∞ π²³½ Ⅷ ① ℝ → ⇒ ×÷",
    "zero\u200bwidth nb\u00a0space em\u2003space \ufeffbom ideographic\u3000space",
    "\u2028line separator\u2029paragraph\u0085next",
    "quotes “curly” ‘single’ «guillemets» … — – ‐",
    "!!!???...,,,;;;:::---___***///\\\\\\|||",
    "https://example.org/a?b=c&d=%20#e user@example.org",
    "$5.00 €9,99 £1 ¥100 50% #1 @you ~/path `code`",
    "A" * 70 + "1" * 33 + " " * 9 + "b",
)
"""Texts that tell the known pre-tokenizers apart: digits, marks, line ends, spaces, scripts."""

CONVERSATION = (
    {"role": "user", "content": "34*7-52=?"},
    {"role": "assistant", "content": "  It is 186.\n"},
    {"role": "user", "content": "Why?\r\n"},
)


def stress_texts(added: Sequence[str], normaliser: Literal["NFC"] | None) -> list[str]:
    """The stress list and every added token alone, between letters, between spaces, doubled.

    Where the tokenizer normalises, the texts come normalised, as llama.cpp needs them.
    """
    texts = list(STRESS_TEXTS)
    for token in added[:64]:
        texts += [token, f"a{token}b", f" {token} ", f"{token}{token}\n1"]
    return [unicodedata.normalize(normaliser, t) if normaliser else t for t in texts]


def check_file(
    gguf: Path,
    tokenizer: "PreTrainedTokenizerBase",
    vocabulary: Vocabulary,
    eos_ids: Sequence[int],
) -> int:
    """Load the file, decode one token, compare token counts, text → ids, BOS, and stop tokens.

    Returns the number of texts compared.

    Raises:
        ConversionCheckError: what differs, with both sides.
    """
    try:
        context = LlamaCppContext(gguf, parallel_sequences=1, n_ctx_per_seq=64)
    except GgufLoadError as error:
        raise ConversionCheckError(f"the converted file does not load: {error}") from error
    with context:
        rows = len(vocabulary.tokens)
        if context.n_vocab != rows:
            raise ConversionCheckError(
                f"{gguf.name} has {context.n_vocab} tokens and the embedding {rows} rows"
            )
        list(context.logits_of([[vocabulary.special_ids["eos"]]], [np.ones(1, bool)]))
        _check_stops(context, vocabulary, eos_ids)
        texts = stress_texts(vocabulary.added, vocabulary.normaliser)
        for text in texts:
            _same_ids(context, text, _hf_ids(tokenizer, text), add_special=False)
        _check_conversation(context, tokenizer, vocabulary)
    return len(texts)


def _hf_ids(tokenizer: "PreTrainedTokenizerBase", text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def _same_ids(context: LlamaCppContext, text: str, expected: list[int], add_special: bool) -> None:
    got = context.tokenize(text, add_special=add_special)
    if got != expected:
        raise ConversionCheckError(
            f"{context.path.name} tokenises {text[:60]!r} as {got[:24]}, the HF tokenizer as "
            f"{expected[:24]}; the model would read other tokens on the device than in training"
        )


def _check_stops(context: LlamaCppContext, vocabulary: Vocabulary, eos_ids: Sequence[int]) -> None:
    if context.eos_id != vocabulary.special_ids["eos"]:
        raise ConversionCheckError(
            f"{context.path.name} ends turns with id {context.eos_id}, the chat template with "
            f"{vocabulary.special_ids['eos']}"
        )
    for token_id in eos_ids:
        if token_id < context.n_vocab and not context.ends_generation(token_id):
            raise ConversionCheckError(
                f"EOS id {token_id} ({context.token_text(token_id)!r}) does not end generation in "
                f"{context.path.name}; name at most three EOS ids in config.json"
            )


def _check_conversation(
    context: LlamaCppContext, tokenizer: "PreTrainedTokenizerBase", vocabulary: Vocabulary
) -> None:
    """The ids of a rendered conversation, as a server makes them (A18).

    The template writes its own BOS, if any, so the file must not add another.
    """
    if vocabulary.chat_template is None:
        texts = unicodedata.normalize("NFC", "plain text 12")
        _same_ids(context, texts, list(tokenizer(texts)["input_ids"]), add_special=True)
        return
    rendered = str(
        tokenizer.apply_chat_template(
            list(CONVERSATION), tokenize=False, add_generation_prompt=True
        )
    )
    _same_ids(context, rendered, _hf_ids(tokenizer, rendered), add_special=True)
