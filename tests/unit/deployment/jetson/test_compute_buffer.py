"""The replayed allocation against the buffers llama.cpp itself reports."""

import pytest
from random_gguf import SHAPES, shape, write_gguf

from deployment.jetson.compute_buffer import (
    Arena,
    Step,
    cells_per_slot,
    compute_bytes,
    replay,
)
from deployment.jetson.file_size import measured_file
from deployment.jetson.measurement import reported_buffers
from deployment.jetson.memory_plan import Serving, plan_memory
from deployment.jetson.model_shape import known_shape, read_shape

TOLERANCE = 0.05
ROUNDING = 0.005 * 2**20 + 1
"""llama.cpp's log has two decimals of a MiB."""
SERVINGS = (
    Serving(512, gpu=False),
    Serving(100, gpu=False),
    Serving(1024, slots=3, ubatch=512, gpu=False),
    Serving(2048, slots=4, ubatch=128, flash_attention=True, gpu=False),
    Serving(700, slots=2, ubatch=256, kv_type="Q8_0", flash_attention=True, gpu=False),
)


@pytest.mark.parametrize("name", sorted(SHAPES))
def test_plan_is_what_llama_cpp_reports(name, tmp_path):
    """KV, compute and output buffer, five ways of serving; flash attention, slots, 8-bit cache."""
    path = write_gguf(tmp_path / "F16.gguf", shape(name))
    of, file = read_shape(path), measured_file(path)
    for serving in SERVINGS:
        if serving.kv_type == "Q8_0" and of.key_length % 32:
            continue  # llama.cpp has no such cache for heads that 32 does not divide
        planned, reported = (
            plan_memory(of, file, serving).as_json(),
            reported_buffers(path, serving),
        )
        for key, size in reported.items():
            assert planned[key] == pytest.approx(size, rel=TOLERANCE, abs=ROUNDING), (key, serving)


def test_vocabulary_heavy_output_buffer_is_not_lost_in_rounding(tmp_path):
    path = write_gguf(tmp_path / "x.gguf", shape("qwen2 tied, nearly all vocabulary"))
    serving = Serving(2048, slots=8, flash_attention=True, gpu=False)
    reported = reported_buffers(path, serving)["output_bytes"]
    assert reported == pytest.approx(12000 * 4 * 8, rel=0.014)


def test_published_compute_buffer_of_qwen3_1_7b():
    """300.75 MiB on the GPU and 12 MiB on the host, 4096 tokens, 512 rows, flash attention."""
    found = compute_bytes(known_shape("qwen3-1.7b"), 4096, ubatch=512, flash=True) / 2**20
    assert found == pytest.approx(300.75 + 12.0, rel=0.05)


def test_128_rows_instead_of_512_free_225_mib():
    of = known_shape("qwen3-1.7b")
    freed = compute_bytes(of, 4096, ubatch=512) - compute_bytes(of, 4096, ubatch=128)
    assert freed / 2**20 == pytest.approx(225, rel=0.05)


def test_arena_takes_the_best_hole_and_joins_neighbours():
    arena = Arena()
    a, b, c, d = (arena.take(size) for size in (64, 32, 96, 32))
    assert (a, b, c, d, arena.peak) == (0, 64, 96, 192, 224)
    arena.give(a, 64)
    arena.give(c, 96)
    assert arena.take(60) == 0  # rounded up to 64: the exact hole, not the larger one
    arena.give(0, 64)
    arena.give(b, 32)  # joins both of its neighbours: 192 bytes
    assert arena.take(192) == 0
    assert arena.peak == 224


def test_replay_overwrites_only_what_nobody_else_reads():
    steps = [
        Step("a", 32, ("in",)),
        Step("b", 32, ("a",), overwrites=True),  # in the place of a
        Step("c", 32, ("b",), overwrites=True),  # b is read again: a new place
        Step("d", 32, ("c", "b")),
    ]
    assert replay({"in": 32}, steps[:2]) == 64
    assert replay({"in": 32}, steps) == 96  # `in` is free by then, and d needs a third place


@pytest.mark.parametrize(
    ("context", "slots", "cells"),
    [(1, 1, 256), (256, 1, 256), (257, 1, 512), (700, 2, 512), (4096, 4, 1024), (1024, 3, 512)],
)
def test_cells(context, slots, cells):
    assert cells_per_slot(context, slots) == cells
