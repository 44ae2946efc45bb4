"""The model a run starts from, whichever way the config names it."""

from collections.abc import Iterable
from pathlib import Path

from transformers import PreTrainedModel
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from configs.schema.model import GgufPackageModel, Model, ScratchModel
from tasks.environments.row import Message
from tasks.models.load import check_vocabulary, load_model, load_tokenizer
from tasks.models.scratch import build_model, demonstration_texts, train_tokenizer


def base_model(
    config: Model, conversations: Iterable[list[Message]], work_dir: Path, *, dtype: str, seed: int
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Model and tokenizer before any training; `conversations` teach a scratch tokenizer.

    Raises:
        VocabularyError: the tokenizer has more tokens than the embedding has rows.
    """
    if isinstance(config, ScratchModel):
        tokenizer = train_tokenizer(demonstration_texts(conversations), config.vocab_size)
        model: PreTrainedModel = build_model(config, tokenizer, seed)
    else:
        path, revision = _location(config, work_dir)
        tokenizer = load_tokenizer(path, revision)
        model = load_model(path, dtype=dtype, revision=revision)
    check_vocabulary(model, tokenizer)
    return model, tokenizer


def _location(config: Model, work_dir: Path) -> tuple[str, str | None]:
    if isinstance(config, GgufPackageModel):
        from tasks.models.gguf_package import materialise

        folder = work_dir / "base"
        materialise(config.package, config.file, folder)
        return str(folder), None
    return config.path, config.revision
