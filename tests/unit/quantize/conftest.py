"""Tiny models shared by this folder's tests."""

from pathlib import Path

import numpy as np
import pytest
from tiny_models import CLASSES, make_model, make_tokenizer, save
from transformers import PreTrainedTokenizerFast


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    return make_tokenizer()


@pytest.fixture(scope="session")
def ids() -> list[int]:
    return np.random.default_rng(0).integers(0, 420, 60).tolist()


@pytest.fixture(scope="session")
def folders(tmp_path_factory, tokenizer) -> dict[str, Path]:
    """One saved model of each architecture."""
    root = tmp_path_factory.mktemp("models")
    return {arch: save(make_model(arch), tokenizer, root / arch) for arch in CLASSES}


@pytest.fixture(scope="session")
def gguf(folders, tmp_path_factory) -> Path:
    """The Qwen3 model as F16."""
    from quantize.convert import convert

    return convert(folders["qwen3"], tmp_path_factory.mktemp("gguf") / "F16.gguf").path
