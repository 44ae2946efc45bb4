"""A byte-level BPE tokenizer as GGUF keys.

llama.cpp knows pre-tokenizers by name only, so the name is chosen by how the tokenizer splits text,
never by the model's name; a wrong one would load, and tokenise some texts differently.
"""

import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from quantize.architecture import ModelShape
from quantize.errors import UnsupportedTokenizerError, VocabularySizeError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

NORMAL, CONTROL, USER_DEFINED, UNUSED = 1, 3, 4, 5
"""GGUF token types."""

_TAIL = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_QWEN2 = _WORDS + r"\p{N}" + _TAIL
_LLAMA3 = _WORDS + r"\p{N}{1,3}" + _TAIL
_QWEN35 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}|"
    r" ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
PRE_TOKENIZERS: dict[tuple[tuple[str, ...], bool], str] = {
    (("bytes+words",), False): "gpt-2",
    (("digits", "bytes+words"), False): "smollm",
    ((f"split {_QWEN2}", "bytes"), False): "qwen2",
    ((f"split {_QWEN35}", "bytes"), False): "qwen35",
    ((f"split {_LLAMA3}", "bytes"), False): "smaug-bpe",
    ((f"split {_LLAMA3}", "bytes"), True): "llama-bpe",
}
"""(steps of the pre-tokenizer, whether a word that is itself a token skips merges) → name."""


@dataclass(frozen=True)
class Vocabulary:
    """What a GGUF file says about its tokenizer; `tokens` has one entry per embedding row."""

    tokens: tuple[str, ...]
    types: tuple[int, ...]
    merges: tuple[str, ...]
    """`left right`, in order of rank."""
    pre: str
    special_ids: dict[str, int]
    """bos, eos, eot, eom, pad, unk → id, those that exist."""
    add_bos: bool
    chat_template: str | None
    added: tuple[str, ...]
    """Texts of the added tokens, for the check on the written file."""
    normaliser: Literal["NFC"] | None
    """`NFC`, or None: llama.cpp does not normalise, so text must come normalised."""


def load_tokenizer(model_dir: Path) -> "PreTrainedTokenizerBase":
    """The tokenizer in an HF folder, never asked of a hub.

    Raises:
        UnsupportedTokenizerError: there is no tokenizer.json to convert.
    """
    from tasks.models.load import load_tokenizer as load_as_trained

    if not (model_dir / "tokenizer.json").is_file():
        raise UnsupportedTokenizerError(
            f"{model_dir} holds no tokenizer.json; SentencePiece and slow tokenizers cannot be "
            "converted; save the tokenizer with save_pretrained of a fast one"
        )
    return load_as_trained(model_dir)


def read_vocabulary(
    tokenizer: "PreTrainedTokenizerBase", rows: int, shape: ModelShape
) -> Vocabulary:
    """The tokenizer as it really splits text, fitted to `rows` embedding rows.

    Raises:
        UnsupportedTokenizerError: not a byte-level BPE that llama.cpp knows.
        VocabularySizeError: a token has no embedding row.
    """
    spec = json.loads(tokenizer.backend_tokenizer.to_str())
    pre = pre_tokenizer_name(spec)
    added = {token["id"]: token for token in spec.get("added_tokens", [])}
    texts = {i: text for text, i in spec["model"]["vocab"].items()}
    texts |= {i: token["content"] for i, token in added.items()}
    _require_rows(texts, set(added), rows)
    taken = set(texts.values())
    tokens, types = [], []
    for i in range(rows):
        if i in added:
            types.append(CONTROL if _is_control(added[i]) else USER_DEFINED)
        else:
            types.append(NORMAL if i in texts else UNUSED)
        tokens.append(texts[i] if i in texts else _padding(i, taken))
    template = chat_template(tokenizer)
    return Vocabulary(
        tokens=tuple(tokens),
        types=tuple(types),
        merges=merge_lines(spec["model"]["merges"]),
        pre=pre,
        special_ids=_special_ids(tokenizer, shape, rows),
        add_bos=template is None and _adds_bos(tokenizer),
        chat_template=template,
        added=tuple(token["content"] for token in added.values()),
        normaliser=_normaliser(spec),
    )


def _require_rows(texts: dict[int, str], added: set[int], rows: int) -> None:
    beyond = sorted(i for i in texts if i >= rows)
    if not beyond:
        return
    shown = ", ".join(
        f"{texts[i]!r} (id {i}{', added' if i in added else ''})" for i in beyond[:16]
    )
    raise VocabularySizeError(
        f"the tokenizer has {max(texts) + 1} tokens and the embedding {rows} rows; without a row: "
        f"{shown}{' …' if len(beyond) > 16 else ''}. Resize the embedding and train it, or remove "
        "these tokens from the tokenizer; editing config.json alone makes a broken file"
    )


def _padding(i: int, taken: set[str]) -> str:
    """A name for an embedding row without a token, unlike any token's text."""
    name = f"[PAD{i}]"
    while name in taken:
        name = f"[{name}]"
    return name


def _is_control(token: dict[str, Any]) -> bool:
    """Special tokens, and those that look so, are never shown as text."""
    text = token["content"]
    return bool(token["special"]) or (text.startswith("<|") and text.endswith("|>"))


def merge_lines(merges: Sequence[str] | Sequence[Sequence[str]]) -> tuple[str, ...]:
    """Merges as `left right`, from pairs or from lines; a space inside a part becomes Ġ.

    Raises:
        UnsupportedTokenizerError: there are none, or one is malformed.
    """
    if not merges:
        raise UnsupportedTokenizerError(
            "the tokenizer has no merges; llama.cpp does not load such a file; train a BPE with at "
            "least one merge"
        )
    lines = []
    for merge in merges:
        parts = merge.split(" ") if isinstance(merge, str) else list(merge)
        if len(parts) != 2 or not all(parts):
            raise UnsupportedTokenizerError(f"merge {merge!r} is not a pair of two parts")
        lines.append(" ".join(part.replace(" ", "Ġ") for part in parts))
    return tuple(lines)


def pre_tokenizer_name(spec: dict[str, Any]) -> str:
    """llama.cpp's name for how a tokenizer.json splits text.

    Raises:
        UnsupportedTokenizerError: it has none; lists what is known.
    """
    model = spec["model"]
    if model.get("type") != "BPE" or model.get("byte_fallback"):
        raise UnsupportedTokenizerError(
            f"tokenizer model {model.get('type')!r} with byte_fallback="
            f"{model.get('byte_fallback')} cannot be converted; only byte-level BPE can"
        )
    outer = spec.get("pre_tokenizer") or {}
    parts = outer.get("pretokenizers", [outer]) if outer else []
    steps = tuple(_step(part) for part in parts)
    ignores_merges = bool(model.get("ignore_merges"))
    name = PRE_TOKENIZERS.get((steps, ignores_merges))
    if name is None:
        known = "; ".join(f"{n}: {' + '.join(s)}" for (s, _), n in PRE_TOKENIZERS.items())
        raise UnsupportedTokenizerError(
            f"the pre-tokenizer {' + '.join(steps) or 'none'} (ignore_merges={ignores_merges}) is "
            f"none that llama.cpp knows; known: {known}"
        )
    return name


def _step(part: dict[str, Any]) -> str:
    """One step of a pre-tokenizer, in a form that two equal steps share."""
    kind = part.get("type")
    if kind == "ByteLevel" and not part.get("add_prefix_space"):
        return "bytes+words" if part.get("use_regex", True) else "bytes"
    if kind == "Digits" and part.get("individual_digits"):
        return "digits"
    plain = part.get("behavior") == "Isolated" and not part.get("invert")
    if kind == "Split" and plain and "Regex" in part.get("pattern", {}):
        return f"split {part['pattern']['Regex']}"
    return json.dumps(part, sort_keys=True)


def _normaliser(spec: dict[str, Any]) -> Literal["NFC"] | None:
    normaliser = spec.get("normalizer")
    if not normaliser:
        return None
    steps = [s.get("type") for s in normaliser.get("normalizers", [normaliser])]
    if steps == ["NFC"]:
        return "NFC"
    if not steps:
        return None
    raise UnsupportedTokenizerError(
        f"the tokenizer normalises with {steps}; llama.cpp does not, so text would become other "
        "tokens; only NFC (which most text already is) is accepted"
    )


def chat_template(tokenizer: "PreTrainedTokenizerBase") -> str | None:
    """The default chat template."""
    template: Any = tokenizer.chat_template
    if isinstance(template, dict):
        template = template.get("default")
    return template or None


def end_of_turn_id(tokenizer: "PreTrainedTokenizerBase") -> int | None:
    """The special token the chat template writes after an assistant's message, else EOS."""
    template = chat_template(tokenizer)
    if template is None:
        return tokenizer.eos_token_id
    marker = "assistant-said-this"
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "hello"}, {"role": "assistant", "content": marker}],
        tokenize=False,
    )
    after = str(text).rpartition(marker)[2]
    specials = set(tokenizer.all_special_ids) | set(tokenizer.added_tokens_decoder)
    for token_id in tokenizer(after, add_special_tokens=False)["input_ids"]:
        if token_id in specials:
            return int(token_id)
    return tokenizer.eos_token_id


def _special_ids(
    tokenizer: "PreTrainedTokenizerBase", shape: ModelShape, rows: int
) -> dict[str, int]:
    """Ids by role. EOS is what ends a turn; further EOS ids follow as eot and eom.

    A missing bos or eos key would become id 11 in llama.cpp. A model without BOS gets its EOS
    there: it is never added (`add_bos` is false), and it is a control token, not a letter.
    """
    turn_end = end_of_turn_id(tokenizer)
    ends = [turn_end, tokenizer.eos_token_id, *shape.eos_ids]
    ends = [i for i in dict.fromkeys(ends) if i is not None and i < rows]
    if not ends:
        raise UnsupportedTokenizerError(
            "neither the chat template, the tokenizer nor config.json names an end-of-sequence "
            "token; generation would never stop; set eos_token"
        )
    if len(ends) > 3:
        logger.warning("only the first three of the EOS ids %s are written", ends)
    bos = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else shape.bos_id
    found = {
        "bos": ends[0] if bos is None or not bos < rows else bos,
        "pad": tokenizer.pad_token_id,
        "unk": tokenizer.unk_token_id,
        **dict(zip(("eos", "eot", "eom"), ends, strict=False)),
    }
    return {role: int(i) for role, i in found.items() if i is not None}


def _adds_bos(tokenizer: "PreTrainedTokenizerBase") -> bool:
    """Whether plain text gets a BOS in front."""
    ids = tokenizer("a")["input_ids"]
    return tokenizer.bos_token_id is not None and bool(ids) and ids[0] == tokenizer.bos_token_id
