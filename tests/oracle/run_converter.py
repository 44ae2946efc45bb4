"""Runs llama.cpp's converter on one folder: SOURCE MODEL OUT TYPE PRE.

Its list of pre-tokenizers is keyed by a hash of token ids, which no newly trained vocabulary can
match, so the name is given here. The tokenizer is read as tokenizer.json says, where AutoTokenizer
would put Qwen2's own class in its place. And the folders hold no SentencePiece file, which it would
need a library to find out. Everything else is its own.
"""

import runpy
import sys

source, model, out, out_type, pre = sys.argv[1:]
sys.path[:0] = [source, f"{source}/gguf-py"]

import transformers  # noqa: E402
from conversion.base import TextModel  # noqa: E402


def no_sentencepiece(self: TextModel) -> None:
    """What the converter meets where there is no tokenizer.model."""
    raise FileNotFoundError(self.dir_model / "tokenizer.model")


transformers.AutoTokenizer = transformers.PreTrainedTokenizerFast
TextModel.get_vocab_base_pre = lambda self, tokenizer: pre
TextModel._create_vocab_sentencepiece = no_sentencepiece
sys.argv = ["convert_hf_to_gguf.py", model, "--outfile", out, "--outtype", out_type]
runpy.run_path(f"{source}/convert_hf_to_gguf.py", run_name="__main__")
