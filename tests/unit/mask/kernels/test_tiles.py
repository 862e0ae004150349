"""Triton kernels of masks without a GPU: their bits under the interpreter, and that they build for real ones."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

from sparseforge_ds.mask.kernels.fisher import (
    SQUARED_FEATURES,
    SQUARED_TOKENS,
    SUMMED_FEATURES,
    TOKENS_AT_ONCE,
)
from sparseforge_ds.mask.kernels.fusing import compiled, has_triton, is_compiled
from sparseforge_ds.mask.kernels.tiles import TILE, MatrixRun, can_tile, cut_into_tiles
from sparseforge_ds.mask.pattern import NM, Block, Pairs, Pattern
from tests.interpreted_triton import run_interpreted

pytest.importorskip("triton", reason="triton is not installed: pip install triton")
PROGRAMS: dict[str, tuple[str, list[str], dict[str, Any]]] = {
    "moments": ("tile", ["*fp32", "*fp32", "*u8", "*i64", "*i64", "*fp64"], {"N": TILE // 4}),
    "add_up": ("tile", ["*fp64", "*i64", "*fp64"], {"ROWS": 64}),
    "update": (
        "tile",
        [*("*fp32", "*u16", "*u8", "*u8", "*fp32", "*fp32", "*u8", "*fp64", "*i64", "*i64", "*fp32")]
        + ["fp64", *["fp32"] * 7],
        {"MIDPOINT": True, "N": TILE // 4},
    ),
    "token_squares": (
        "layer",
        [*("*bf16", "*bf16", "i32", "i32", "*fp32"), *["i32"] * 3],
        {"TOKENS": SQUARED_TOKENS, "FEATURES": SQUARED_FEATURES},
    ),
    "add_weighted_squares": (
        "layer",
        [*("*bf16", "*bf16", "i32", "i32", "*fp32", "*fp32", "*fp64", "*fp64", "fp64"), *["i32"] * 3],
        {"TOKENS": TOKENS_AT_ONCE, "FEATURES": SUMMED_FEATURES},
    ),
}
"""Room, types of the arguments, and constants of each program."""
GPUS = [("cuda", 90, 32), ("hip", "gfx942", 64)]
"""H100 and MI300: backend, architecture, threads of a warp."""


def test_tiles_have_the_readable_functions_bits() -> None:
    run_interpreted("-m", "tests.unit.mask.kernels.interpreted")


@pytest.mark.parametrize("gpu", GPUS, ids=lambda gpu: str(gpu[1]))
def test_programs_build_ahead_of_time(
    gpu: tuple[str, int | str, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))  # so that it is built, and not found
    for name, (room, types, constants) in PROGRAMS.items():
        program = program_of(room, name)
        signature = dict(zip(program.arg_names, [*types, *["constexpr"] * len(constants)], strict=True))
        # Strides and sizes of real layers are multiples of 16 too.
        aligned = {(i,): [["tt.divisibility", 16]] for i, kind in enumerate(types) if kind[0] in "*i"}
        options = {"num_warps": 4, "enable_fp_fusion": False}
        built = compile(ASTSource(program, signature, constants, aligned), target=GPUTarget(*gpu), options=options)
        assert built.asm["cubin" if gpu[0] == "cuda" else "hsaco"][:4] == b"\x7fELF"
        if gpu[0] == "cuda":
            ptx = built.asm["ptx"]
            # Large operands are read 16 bytes at a time, and no multiply-add is contracted.
            assert ("ld.global.v4.b32" in ptx or name == "add_up") and "fma.rn.f32" not in ptx, name


def test_rates_of_64_bits_stay_such() -> None:
    """Scalars go to a device in 32 bits unless their type is given."""
    for name, (room, types, _) in PROGRAMS.items():
        program = program_of(room, name)
        wide = {argument for argument, kind in zip(program.arg_names, types, strict=False) if kind == "fp64"}
        assert wide == {parameter.name for parameter in program.params if parameter.annotation_type == "fp64"}, name


def program_of(room: str, name: str) -> Any:
    return getattr(import_module(f"sparseforge_ds.mask.kernels.{room}_programs"), name)


@pytest.mark.parametrize(
    ("pattern", "device", "expected"),
    [
        (NM(2, 4), "cuda", True),
        (NM(2, 4), "cpu", False),
        (NM(1, 4), "cuda", False),
        (NM(4, 8), "cuda", False),
        (Pairs(2, 4), "cuda", False),
        (Block(4), "cuda", False),
    ],
)
def test_tiles_are_for_2_of_4_on_a_gpu(pattern: Pattern, device: str, expected: bool) -> None:
    assert can_tile(pattern, torch.device(device)) is expected


def test_one_switch_turns_kernels_off() -> None:
    gpu = torch.device("cuda")
    with compiled(False):
        assert not has_triton(gpu) and not is_compiled(gpu) and not can_tile(NM(2, 4), gpu)
    assert has_triton(gpu) and is_compiled(gpu)


def test_tiles_cover_every_element_of_a_run_once() -> None:
    runs = [MatrixRun(2, 40, 16, 2 * TILE + 8), MatrixRun(3, 0, 8192, 8), MatrixRun(5, 0, 9000, 0)]
    rows = cut_into_tiles(runs).tolist()
    assert [run.tiles for run in runs] == [3, 1, 0]
    assert rows == [
        [2, 40, 16, TILE],
        [2, 40 + TILE, 16 + TILE, TILE],
        [2, 40 + 2 * TILE, 16 + 2 * TILE, 8],
        [3, 0, 8192, 8],
    ]
    aligned = [run.is_aligned for run in runs]
    assert aligned == [True, True, True]
    assert not any(MatrixRun(0, *numbers).is_aligned for numbers in ((2, 8, 8), (4, 12, 8), (4, 8, 12)))
