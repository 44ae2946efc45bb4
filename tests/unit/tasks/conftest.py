"""The tiny run's ingredients, for every test of the tasks."""

from tests.tiny_run import (
    tiny_config,
    tiny_data,
    tiny_model,
    tiny_renderer,
    tiny_snapshot,
    tiny_tokenizer,
)

__all__ = [
    "tiny_config",
    "tiny_data",
    "tiny_model",
    "tiny_renderer",
    "tiny_snapshot",
    "tiny_tokenizer",
]
