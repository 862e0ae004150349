"""The Triton kernel without a GPU: its numbers under the interpreter, and that it builds for real ones."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from sparseforge_ds.extras.packed24 import experts24, linear24
from tests.interpreted_triton import run_interpreted

GPUS = [("cuda", 80, 32), ("cuda", 90, 32), ("cuda", 120, 32), ("hip", "gfx942", 64), ("hip", "gfx1100", 32)]
"""Ampere, Hopper, consumer Blackwell, MI300, RX 7900: backend, architecture, threads of a warp."""
SHARED_MEMORY = 64 * 1024
"""Bytes that a program may take on the smallest of them."""
NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}


def test_numbers_are_right_under_the_interpreter() -> None:
    run_interpreted("-m", "tests.unit.extras.packed24.interpreted")


@pytest.mark.parametrize("gpu", GPUS, ids=lambda gpu: str(gpu[1]))
def test_every_kernel_builds_ahead_of_time(
    gpu: tuple[str, int | str, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("triton", reason="triton is not installed: pip install triton")
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    from sparseforge_ds.extras.packed24 import triton_kernel, triton_programs

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))  # empty, so that it is built
    target = GPUTarget(*gpu)
    prmt = gpu[0] == "cuda"

    def build(kernel: Any, types: dict[str, str], constants: dict[str, Any], tile: Any) -> Any:
        names = types | dict.fromkeys(constants, "constexpr")
        aligned = {(i,): [["tt.divisibility", 16]] for i, type in enumerate(types.values()) if type[0] == "*"}
        options = {"num_warps": tile.num_warps, "num_stages": tile.num_stages}
        built = compile(ASTSource(kernel, names, constants, aligned), target=target, options=options)
        binary = built.asm["cubin" if gpu[0] == "cuda" else "hsaco"]
        assert binary[:4] == b"\x7fELF" and built.metadata.shared <= SHARED_MEMORY
        return built

    # Products, of few and of many rows: all on a GPU of each maker, and each on one of the other three.
    others = [80, 120, "gfx1100"]
    for number, (rows, dtype, experts, word_width, grid, *per_scale) in enumerate(
        (
            (1, torch.bfloat16, False, 4, None),
            (4, torch.float16, False, 4, None),
            (1, torch.bfloat16, True, 4, None),
            (1, torch.bfloat16, False, 0, None),
            (1, torch.float32, False, 4, None),
            (16, torch.bfloat16, False, 4, None),
            (65, torch.bfloat16, False, 4, None),
            (65, torch.bfloat16, True, 1, None),
            (16, torch.float32, False, 4, None),
            (1, torch.bfloat16, False, 4, "int8"),
            (4, torch.float16, True, 4, "fp8_e4m3"),
            (1, torch.float32, False, 0, "int8"),
            (16, torch.bfloat16, False, 4, "fp8_e4m3"),
            (65, torch.float16, True, 1, "int8"),
            (1, torch.bfloat16, False, 4, "int4"),
            (1, torch.bfloat16, True, 4, "int4", 32),
            (4, torch.float16, False, 0, "int4", 8),
            (65, torch.bfloat16, True, 4, "int4", 32),
            (16, torch.float16, False, 4, "int4"),
        )
    ):
        if gpu[1] in others and number % 3 != others.index(gpu[1]):
            continue
        tile = triton_kernel.choose_tile(rows, dtype, 14336, 1024)
        constants = triton_kernel.constants(tile, True, word_width, triton_kernel.ValueGrid(grid, *per_scale), prmt) | {
            "HAS_EXPERTS": experts
        }
        constants |= {} if tile.few else {"HAS_SCALE": grid is not None and not per_scale}
        name = f"*{NAMES[dtype]}"
        types = {"x": name, "values": name if grid is None else "*i8", "positions": "*u8"}
        types |= {"scale": "*i16" if grid == "int4" else "*fp32", "bias": name, "y": name}
        types["y"] = "*fp32" if tile.splits > 1 else name
        types |= {"experts": "*i64", "count": "i32"} if tile.few else {"runs": "*i64"}
        types |= dict.fromkeys(("rows", "outputs", "groups", *(() if tile.few else ("split_groups",))), "i32")
        built = build(triton_programs.few_rows if tile.few else triton_programs.many_rows, types, constants, tile)
        # Values are read by wide loads, one for each load of positions, and sums meet after the loop.
        if prmt and tile.few and word_width and dtype != torch.float32:  # threads exchange nothing before their sums
            text = built.asm["ptx"]
            wide = {None: "v4.b32", "int4": "b32"}.get(grid, "v2.b32")
            assert text.count(f"ld.global.nc.L1::no_allocate.{wide}") == text.count("no_allocate.u16") > 0
            shared = text.find(".shared.")
            assert text.index("ld.global.nc") < text.index("fma.rn.f32") < (shared if shared >= 0 else len(text))
    # Unpacking, and the addition of parts.
    for type in NAMES.values():
        for grid, per_scale in ((None, None), ("fp8_e4m3", None), ("int4", 32)):
            types = {"values": f"*{type}" if grid is None else "*i8", "positions": "*u8"}
            types |= {
                "scale": "*i16" if grid == "int4" else "*fp32",
                "dense": f"*{type}",
                "outputs": "i32",
                "groups": "i32",
            }
            constants = {"EVEN": 4, "GRID": grid, "PER_SCALE": per_scale, "OUTPUTS": 1, "GROUPS": 512}
            build(triton_programs.unpack, types, constants, triton_kernel.UNPACKING)
    types = {"parts": "*fp32", "scale": "*fp32", "bias": "*bf16", "y": "*bf16"}
    types |= dict.fromkeys(("splits", "count", "outputs"), "i32")
    constants = {"HAS_SCALE": True, "HAS_BIAS": True, "SIZE": 512}
    build(triton_programs.add_parts, types, constants, triton_kernel.UNPACKING)


def test_many_rows_go_to_the_tensor_cores() -> None:
    """Choose by the shape alone; no tile is smaller than the matrix instructions."""
    pytest.importorskip("triton", reason="triton is not installed: pip install triton")
    from sparseforge_ds.extras.packed24.triton_kernel import FEW_ROWS, choose_tile

    for dtype in NAMES:
        tiles = {rows: choose_tile(rows, dtype, 4096, 1024) for rows in (*range(1, 18), 64, 65, 512, 4096)}
        assert all(tile.rows >= rows and tile.few for rows, tile in tiles.items() if rows <= FEW_ROWS)
        assert all(
            min(tile.rows, tile.outputs, 4 * tile.groups) >= 16 for rows, tile in tiles.items() if rows > FEW_ROWS
        )


def test_without_triton_the_reference_is_taken_and_says_so_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(linear24, "find_spec", lambda name: None)
    linear24.triton_kernels.cache_clear()
    with caplog.at_level(logging.WARNING):
        assert linear24.triton_kernels() is None and linear24.triton_kernels() is None
    linear24.triton_kernels.cache_clear()
    assert [record.message.split(":")[0] for record in caplog.records] == ["linear24"]
    assert "triton is not installed" in caplog.text and "slower than a dense layer" in caplog.text


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", list(NAMES))
@pytest.mark.parametrize("rows", [1, 3, 4, 5, 64, 128, 300])
@pytest.mark.parametrize("grid", [None, "int8", "fp8_e4m3"])
def test_numbers_are_right_on_a_gpu(rows: int, dtype: torch.dtype, grid: str | None) -> None:
    from sparseforge_ds.packed_format.packing import unpack24
    from tests.unit.extras.packed24.test_linear24 import packed, rounded

    made = packed(130, 172, dtype) if grid is None else rounded(130, 172, grid)
    values, positions, *scale = (tensor.cuda() for tensor in made)
    x = torch.randn(rows, 172, device="cuda").to(dtype)
    bias = torch.randn(130, device="cuda").to(dtype)
    product = linear24.linear24(x, values, positions, bias, *scale).double()
    exact = torch.nn.functional.linear(x.double(), unpack24(values, positions, *scale).double(), bias.double())
    size = exact.abs().amax(0) if scale else torch.ones(130, device="cuda")  # rows of weights have many sizes
    torch.testing.assert_close(
        product / size, exact / size, rtol=2 * torch.finfo(dtype).eps, atol=1e-4 if not scale else 0.01
    )


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [5, 300])
def test_experts_are_right_on_a_gpu(rows: int) -> None:
    from tests.unit.extras.packed24.test_linear24 import packed

    operands = [torch.stack(parts).cuda() for parts in zip(*(packed(130, 172) for _ in range(3)), strict=True)]
    x = torch.randn(rows, 172, device="cuda")
    ends = torch.tensor([2, 2, rows - 1], device="cuda")
    expected = experts24.experts24(x.cpu(), *(part.cpu() for part in operands), ends.cpu())
    torch.testing.assert_close(experts24.experts24(x, *operands, ends).cpu(), expected, rtol=1e-5, atol=1e-4)
