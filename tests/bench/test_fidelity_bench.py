"""Fidelity of quantisation against llama.cpp's own tools and against other importance matrices.

Both sides of every comparison run here, in turn, on one thread and on the same tokens or tensors.
"""

import sys
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from fidelity_models import RECIPES, Agent, make_agent, relabelled
from llama_tools import (
    best,
    find_tools,
    mean_kld,
    read_base_ids,
    scored_positions,
    timed,
    write_base,
)

from configs.schema.model import ScratchModel
from configs.schema.quantize import QuantizeConfig
from quantize.convert import convert
from quantize.divergence import against
from quantize.generic_text import generic_text
from quantize.imatrix import ImportanceMatrix, write_imatrix
from quantize.imatrix_compare import generic_matrix, own_matrix
from quantize.moments import collect_moments
from quantize.parity import SequenceParity, kl_difference, summarise
from quantize.quantise import quantise
from quantize.row_choice import quantise_by_rows
from tasks.artifacts import hash_file
from tasks.models.load import save_model
from tasks.models.scratch import build_model, train_tokenizer
from tasks.sampling.llama_cpp_context import LlamaCppContext
from tests.figures.record import record

pytestmark = pytest.mark.timeout(3600)

ROLLOUTS = 320
"""For the matrix, and as many others held out."""
ORDERS = 3
"""Orders of the hidden units over which a sequence's KL is averaged."""
N_CTX, ROUNDS = 256, 2
SETTINGS = ["-c", str(N_CTX), "-t", "1", "-tb", "1", "-fa", "off", "-ctk", "f32", "-ctv", "f32"]
"""One thread; attention and cache as this project compares, so that only rounding differs."""
ONCE = [sys.executable, str(Path(__file__).with_name("fidelity_once.py"))]
HERE = Path.cwd()


@pytest.fixture(scope="module")
def tools() -> Path:
    return find_tools()


@pytest.fixture(scope="module")
def agent_of(tmp_path_factory):
    """Agents by name, made when first asked for."""

    @cache
    def make(name: str) -> Agent:
        return make_agent(name, tmp_path_factory.mktemp("agent"), rollouts=ROLLOUTS)

    return make


def quantised(f16: Path, quant_type: str, matrix: ImportanceMatrix | None, name: str) -> Path:
    """One file, which must really hold the types it is named after."""
    path = f16.with_name(f"{quant_type}-{name}.gguf")
    imatrix = None
    if matrix is not None:
        imatrix = f16.with_name(f"{name}.imatrix.gguf")
        write_imatrix(matrix, imatrix, name)
    report = quantise(f16, path, quant_type, imatrix)
    assert not report.fallbacks, "rows divisible by 256"
    return path


def scored(agent: Agent, quant_type: str, other: str, folder: Path) -> dict[str, list]:
    """KL to F16 on held-out rollouts with the own matrix, as the stage uses it (rows chosen) and
    plain, and with another or none.

    Each sequence's figure is its mean over some orders of the network's hidden units, so that the
    matrix is judged and not the luck of one rounding.
    """
    tokens = sum(len(r.token_ids) for r in agent.matrix)
    sums: dict[str, list[list[SequenceParity]]] = {"own": [], "plain": [], other: []}
    for order in range(ORDERS):
        model = relabelled(agent.folder, folder / f"order-{order}", seed=order)
        f16 = convert(model, folder / f"order-{order}" / "F16.gguf").path
        own = own_matrix(model, agent.matrix, QuantizeConfig().imatrix_weights)
        text = generic_matrix(model, tokens, N_CTX)[0] if other == "text" else None
        files = {
            "plain": quantised(f16, quant_type, own, "plain"),
            other: quantised(f16, quant_type, text, other),
            "own": f16.with_name(f"{quant_type}-own.gguf"),
        }
        moments = collect_moments(model, [r.token_ids for r in agent.matrix])
        imatrix = f16.with_name("plain.imatrix.gguf")
        quantise_by_rows(f16, files["own"], quant_type, imatrix, moments)
        for name, sequences in against(f16, files, agent.heldout, 1).items():
            sums[name].append(sequences)
    return {name: list(map(mean_of, *orders)) for name, orders in sums.items()}


def mean_of(*orders: SequenceParity) -> SequenceParity:
    """One sequence's figures, the mean over orders."""
    return SequenceParity(
        orders[0].tokens,
        *(float(np.mean(column)) for column in list(zip(*orders, strict=True))[1:]),
    )


def compared(
    figure: str, by_model: dict[str, dict[str, list[SequenceParity]]], against: str
) -> None:
    """Record own over other; the worst of the models is the figure."""
    details, ratios, met = {}, [], True
    for name, scores in by_model.items():
        own, other = scores["own"], scores[against]
        difference = kl_difference(own, other)
        here, there = summarise(own).kld, summarise(other).kld
        ratios.append(here.value / there.value)
        met = met and difference.high < 0
        details[name] = {
            "own": here.value,
            "other": there.value,
            "own_without_row_choice": summarise(scores["plain"]).kld.value,
            "difference": difference.value,
            "ci95": [difference.low, difference.high],
            "sequences": len(own),
            "tokens": sum(s.tokens for s in own),
            "orders": ORDERS,
        }
    said = "; ".join(
        f"{name} {d['own']:.3g} ({d['own_without_row_choice']:.3g} without choosing rows) against "
        f"{d['other']:.3g} nats, difference {d['ci95'][0]:+.1e} to "
        f"{d['ci95'][1]:+.1e}"
        for name, d in details.items()
    )
    print(f"\n{figure}: {said}")
    record(figure, value=max(ratios), met=met, seeds=[0], details=details, note=said)


@pytest.mark.bench
@pytest.mark.figure("imatrix_on_policy_iq2_m")
def test_own_rollouts_against_generic_text(agent_of, tmp_path):
    found = {}
    for name in RECIPES:
        found[name] = scored(agent_of(name), "IQ2_M", "text", tmp_path / name)
    compared("imatrix_on_policy_iq2_m", found, "text")


@pytest.mark.bench
@pytest.mark.figure("imatrix_on_policy_q4_k_m")
def test_own_rollouts_against_no_matrix(agent_of, tmp_path):
    found = {}
    for name in RECIPES:
        found[name] = scored(agent_of(name), "Q4_K_M", "none", tmp_path / name)
    compared("imatrix_on_policy_q4_k_m", found, "none")


TEXT_CHARACTERS = 60_000
"""Of generic text, without special tokens, which llama.cpp's tool would take for characters."""


@pytest.mark.bench
@pytest.mark.figure("parity_over_llama_perplexity")
def test_parity_over_llama_perplexity(tools, tmp_path):
    agent = make_agent("word problems", tmp_path / "agent", rollouts=96, steps=40)
    own = own_matrix(agent.folder, agent.matrix, "all")
    gguf = quantised(agent.f16, "IQ2_M", own, "own")
    text, base, ids = (tmp_path / name for name in ("text", "base", "ids.npy"))
    text.write_text(generic_text()[:TEXT_CHARACTERS], encoding="utf-8")
    perplexity = [tools / "llama-perplexity", *SETTINGS]
    ours, theirs = [], []
    for _ in range(ROUNDS):
        _, first = timed(
            [*perplexity, "-m", agent.f16, "-f", text, "--kl-divergence-base", base], tmp_path
        )
        said, second = timed(
            [*perplexity, "-m", gguf, "--kl-divergence", "--kl-divergence-base", base],
            tmp_path,
        )
        theirs.append((first, second))
        np.save(ids, read_base_ids(base))  # the very tokens they used
        printed, took = timed([*ONCE, "parity", agent.f16, gguf, ids], HERE)
        ours.append(took)
    mine, reference = float(printed), mean_kld(said)
    best_ours = best(ours)
    best_theirs = [best([pair[i] for pair in theirs]) for i in (0, 1)]
    ratio = best_ours.wall_s / sum(t.wall_s for t in best_theirs)
    cpu = best_ours.cpu_s / sum(t.cpu_s for t in best_theirs)
    apart = abs(mine / reference - 1)
    rollouts = kl_of_rollouts(perplexity, agent, gguf, tmp_path)
    record(
        "parity_over_llama_perplexity",
        value=ratio,
        met=ratio <= 1.2 and apart <= 0.02 and rollouts["apart"] <= 0.02,
        note=f"KL {mine:.6f} against {reference:.6f} ({100 * apart:.2f} % apart), CPU time "
        f"{cpu:.2f} ×, {read_base_ids(base).size} tokens, one thread, both models, whole processes",
        details={"cpu_ratio": cpu, "ours_s": best_ours.wall_s, "rollouts": rollouts},
    )
    print(f"\nparity: {ratio:.2f} × the time ({cpu:.2f} × CPU), KL {mine} and {reference}")
    assert apart <= 0.02 and rollouts["apart"] <= 0.02


def kl_of_rollouts(perplexity: list, agent: Agent, gguf: Path, folder: Path) -> dict[str, float]:
    """Rollouts with their special tokens: llama.cpp's tool is given ids through its logits file."""
    flat = [token for rollout in agent.heldout for token in rollout.token_ids]
    chunks = np.array(flat[: len(flat) // N_CTX * N_CTX][: 40 * N_CTX]).reshape(-1, N_CTX)
    base, ids = folder / "rollouts.base", folder / "rollouts.npy"
    with LlamaCppContext(agent.f16, parallel_sequences=8, n_ctx_per_seq=N_CTX) as context:
        write_base(base, chunks, context.logits_of([c.tolist() for c in chunks]))
    np.testing.assert_array_equal(read_base_ids(base), chunks)
    assert scored_positions(N_CTX) == slice(128, 255)
    said, _ = timed(
        [*perplexity, "-m", gguf, "--kl-divergence", "--kl-divergence-base", base], folder
    )
    np.save(ids, chunks)
    mine, _ = timed([*ONCE, "parity", agent.f16, gguf, ids], HERE)
    ours, theirs = float(mine), mean_kld(said)
    return {"ours": ours, "theirs": theirs, "apart": abs(ours / theirs - 1)}


def large_model(folder: Path) -> tuple[Path, Path]:
    """An untrained model of 38 M parameters and a matrix of made-up sums: only work is measured."""
    tokenizer = train_tokenizer(["12+34*5-6=?"], 512)
    shape = ScratchModel(
        hidden_size=1024, ffn_size=3072, layers=3, heads=16, kv_heads=8, vocab_size=512
    )
    model = build_model(shape, tokenizer, seed=0)
    save_model(model, tokenizer, folder / "model")
    f16 = convert(folder / "model", folder / "F16.gguf").path
    rng = np.random.default_rng(0)
    sums = {}
    for block in range(3):
        for name, columns in {
            "attn_q": 1024, "attn_k": 1024, "attn_v": 1024, "attn_output": 1024,
            "ffn_gate": 1024, "ffn_up": 1024, "ffn_down": 3072,
        }.items():  # fmt: skip
            sums[f"blk.{block}.{name}.weight"] = rng.gamma(0.5, size=columns) * 1000
    matrix = ImportanceMatrix(sums, dict.fromkeys(sums, 1000), 4)
    write_imatrix(matrix, folder / "imatrix.gguf", "made up")
    return f16, folder / "imatrix.gguf"


@pytest.mark.bench
@pytest.mark.figure("quantise_over_llama_quantize")
def test_quantise_over_llama_quantize(tools, tmp_path):
    f16, imatrix = large_model(tmp_path)
    ratios, details = {}, {}
    for quant_type in ("Q4_K_M", "IQ2_M"):
        ours, theirs = [], []
        for _ in range(2):
            command = [tools / "llama-quantize", "--imatrix", imatrix.name, f16.name]
            theirs.append(timed([*command, "theirs.gguf", quant_type, "1"], tmp_path)[1])
            arguments = ["quantise", f16, tmp_path / "ours.gguf", quant_type, imatrix]
            ours.append(timed([*ONCE, *arguments], HERE)[1])
        same = hash_file(tmp_path / "ours.gguf") == hash_file(tmp_path / "theirs.gguf")
        a, b = best(ours), best(theirs)
        ratios[quant_type] = a.wall_s / b.wall_s
        details[quant_type] = {
            "same_bytes": same,
            "wall_ratio": a.wall_s / b.wall_s,
            "cpu_ratio": a.cpu_s / b.cpu_s,
            "ours_s": a.wall_s,
            "theirs_s": b.wall_s,
        }
        print(f"\nquantise {quant_type}: {details[quant_type]}")
    every_same = all(d["same_bytes"] for d in details.values())
    record(
        "quantise_over_llama_quantize",
        value=max(ratios.values()),
        met=every_same and max(ratios.values()) <= 1.2,
        note="; ".join(
            f"{t} {d['wall_ratio']:.2f} × ({d['cpu_ratio']:.2f} × CPU), bytes "
            f"{'the same' if d['same_bytes'] else 'differ'}"
            for t, d in details.items()
        )
        + "; one thread, whole processes, ours also hashes and describes the file",
        details=details,
    )
    assert every_same
