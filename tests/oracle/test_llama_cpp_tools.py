"""Quantising, importance matrix and KL against llama.cpp's own programs, on the same tokens."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "unit" / "quantize"))
sys.path.insert(0, str(Path(__file__).parents[1] / "bench"))

from llama_tools import mean_kld, read_base_ids, write_base
from tiny_models import make_model, make_tokenizer, save

from quantize.convert import convert
from quantize.divergence import against
from quantize.imatrix import collect, read_imatrix, write_imatrix
from quantize.parity import summarise
from quantize.quantise import quantise
from quantize.rollouts import RolloutTokens
from tasks.sampling.llama_cpp_context import LlamaCppContext

TOOLS = os.environ.get("LLAMA_CPP_TOOLS", "")
pytestmark = [
    pytest.mark.oracle,
    pytest.mark.skipif(not TOOLS, reason="LLAMA_CPP_TOOLS is not set; run `make oracle`"),
]
N_CTX = 64
PLAIN = ["-t", "1", "-tb", "1", "-fa", "off", "-ctk", "f32", "-ctv", "f32"]
TEXT = "34*7-52=? The answer is 186. Grüße aus Zürich, naïve café, def f(x):\n\treturn x\n" * 40


def run(folder: Path, tool: str, *arguments: str | Path) -> str:
    command = [str(Path(TOOLS) / tool), *map(str, arguments)]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    return done.stdout + done.stderr


@pytest.fixture(scope="module", params=["qwen3", "llama"])
def made(request, tmp_path_factory):
    """Folder with `model/`, `F16.gguf` and `imatrix.gguf`."""
    root = tmp_path_factory.mktemp(request.param)
    folder = save(make_model(request.param), make_tokenizer(), root / "model")
    convert(folder, root / "F16.gguf")
    rng = np.random.default_rng(0)
    rollouts = [rng.integers(3, 390, 40).tolist() for _ in range(8)]
    write_imatrix(collect(folder, rollouts), root / "imatrix.gguf", "policy rollouts")
    return root


@pytest.mark.parametrize("quant_type", ["Q8_0", "Q5_K_M", "Q4_K_M", "IQ2_M"])
def test_quantised_files_are_the_same_to_the_byte(quant_type, made):
    ours = quantise(made / "F16.gguf", made / "ours.gguf", quant_type, made / "imatrix.gguf").path
    run(
        made, "llama-quantize", "--imatrix", "imatrix.gguf", "F16.gguf", "theirs.gguf", quant_type,
        "1",
    )  # fmt: skip
    assert ours.read_bytes() == (made / "theirs.gguf").read_bytes()


def test_without_a_matrix_too(made):
    ours = quantise(made / "F16.gguf", made / "ours.gguf", "Q4_K_M").path
    run(made, "llama-quantize", "F16.gguf", "theirs.gguf", "Q4_K_M", "1")
    assert ours.read_bytes() == (made / "theirs.gguf").read_bytes()


def test_the_importance_matrix_of_the_same_chunks(made):
    (made / "text").write_text(TEXT, encoding="utf-8")
    run(
        made, "llama-imatrix", *PLAIN, "-m", "F16.gguf", "-f", "text", "-c", N_CTX, "-o",
        "theirs.imatrix.gguf", "--parse-special",
    )  # fmt: skip
    with LlamaCppContext(made / "F16.gguf", parallel_sequences=1, n_ctx_per_seq=N_CTX) as context:
        ids = context.tokenize(TEXT)
    theirs = read_imatrix(made / "theirs.imatrix.gguf")
    assert len(ids) // N_CTX - 1 <= theirs.rollouts <= len(ids) // N_CTX  # it wants a next token
    stretches = [ids[i * N_CTX : (i + 1) * N_CTX] for i in range(theirs.rollouts)]
    ours = collect(made / "model", stretches).means()
    assert set(theirs.means) == set(ours)
    for name, means in ours.items():  # float16 weights on their side
        np.testing.assert_allclose(theirs.means[name], means, rtol=5e-3, atol=1e-5, err_msg=name)


def test_kl_on_the_same_ids_special_tokens_among_them(made):
    """Text would not do: llama-perplexity takes special tokens in it for characters."""
    rng = np.random.default_rng(1)
    chunks = rng.integers(0, 396, (12, N_CTX))
    chunks[:, ::7] = 1  # <|im_start|>
    quantised = quantise(made / "F16.gguf", made / "q.gguf", "IQ2_M", made / "imatrix.gguf").path
    with LlamaCppContext(made / "F16.gguf", parallel_sequences=4, n_ctx_per_seq=N_CTX) as context:
        write_base(made / "base", chunks, context.logits_of([c.tolist() for c in chunks]))
    np.testing.assert_array_equal(read_base_ids(made / "base"), chunks)
    said = run(
        made, "llama-perplexity", *PLAIN, "-m", "q.gguf", "-c", N_CTX, "--kl-divergence",
        "--kl-divergence-base", "base",
    )  # fmt: skip
    scored = tuple(t > N_CTX // 2 for t in range(N_CTX))
    rollouts = [RolloutTokens(tuple(c.tolist()), scored) for c in chunks]
    ours = summarise(against(made / "F16.gguf", {"q": quantised}, rollouts, 1)["q"])
    assert ours.kld.value > 0.01
    assert mean_kld(said) == pytest.approx(ours.kld.value, rel=1e-3)
