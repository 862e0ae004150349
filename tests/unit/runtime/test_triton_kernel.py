"""The Triton kernel without a GPU: its numbers under the interpreter, and that it builds for real ones."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from sparseforge_ds.runtime import experts24, linear24
from tests.distributed import PATIENCE, ROOT

GPUS = [("cuda", 80, 32), ("cuda", 90, 32), ("cuda", 120, 32), ("hip", "gfx942", 64), ("hip", "gfx1100", 32)]
"""Ampere, Hopper, consumer Blackwell, MI300, RX 7900: backend, architecture, threads of a warp."""
SHARED_MEMORY = 64 * 1024
"""Bytes that a program may take on the smallest of them."""
NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}


def test_numbers_under_the_interpreter() -> None:
    pytest.importorskip("triton", reason="triton is not installed: pip install triton")
    done = subprocess.run(
        [sys.executable, "-m", "tests.unit.runtime.interpreted"],
        cwd=ROOT,
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.parametrize("gpu", GPUS, ids=lambda gpu: str(gpu[1]))
def test_it_builds_ahead_of_time(
    gpu: tuple[str, int | str, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("triton", reason="triton is not installed: pip install triton")
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    from sparseforge_ds.runtime import triton_kernel

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))  # so that it is built, and not found
    for rows, dtype, experts in (
        (1, torch.bfloat16, False),
        (1, torch.bfloat16, True),
        (65, torch.bfloat16, False),
        (65, torch.bfloat16, True),
        (16, torch.float32, False),
    ):
        tile = triton_kernel.choose_tile(rows, dtype)
        few = rows <= triton_kernel.FEW_ROWS
        constants = triton_kernel.constants(tile, has_bias=True) | {"HAS_EXPERTS": experts}
        names = dict.fromkeys(("x", "values", "positions", "bias", "y"), f"*{NAMES[dtype]}") | {"positions": "*u8"}
        names |= {"experts": "*i64", "count": "i32"} if few else {"runs": "*i64"}
        names |= dict.fromkeys(("rows", "outputs", "groups"), "i32") | dict.fromkeys(constants, "constexpr")
        kernel = triton_kernel._few_rows if few else triton_kernel._many_rows
        aligned = {(i,): [["tt.divisibility", 16]] for i in range(5)}
        options = {"num_warps": tile.num_warps, "num_stages": tile.num_stages}
        built = compile(ASTSource(kernel, names, constants, aligned), target=GPUTarget(*gpu), options=options)
        binary = built.asm["cubin" if gpu[0] == "cuda" else "hsaco"]
        assert binary[:4] == b"\x7fELF" and built.metadata.shared <= SHARED_MEMORY


def test_many_rows_go_to_the_tensor_cores() -> None:
    """What chooses is the shape alone, and no tile is smaller than the matrix instructions."""
    pytest.importorskip("triton", reason="triton is not installed: pip install triton")
    from sparseforge_ds.runtime.triton_kernel import FEW_ROWS, choose_tile

    for dtype in NAMES:
        tiles = {rows: choose_tile(rows, dtype) for rows in (*range(1, 18), 64, 65, 512, 4096)}
        assert all(tile.rows >= rows for rows, tile in tiles.items() if rows <= FEW_ROWS)
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
@pytest.mark.parametrize("rows", [1, 4, 5, 64, 300])
def test_numbers_on_a_gpu(rows: int, dtype: torch.dtype) -> None:
    from sparseforge_ds.mask.packing import unpack24
    from tests.unit.runtime.test_linear24 import packed

    values, positions = (tensor.cuda() for tensor in packed(130, 172, dtype))
    x, bias = torch.randn(rows, 172, device="cuda").to(dtype), torch.randn(130, device="cuda").to(dtype)
    found = linear24.linear24(x, values, positions, bias).double()
    exact = torch.nn.functional.linear(x.double(), unpack24(values, positions).double(), bias.double())
    torch.testing.assert_close(found, exact, rtol=2 * torch.finfo(dtype).eps, atol=1e-4)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [5, 300])
def test_experts_on_a_gpu(rows: int) -> None:
    from tests.unit.runtime.test_linear24 import packed

    held = [torch.stack(parts).cuda() for parts in zip(*(packed(130, 172) for _ in range(3)), strict=True)]
    x, ends = torch.randn(rows, 172, device="cuda"), torch.tensor([2, 2, rows - 1], device="cuda")
    expected = experts24.experts24(x.cpu(), *(part.cpu() for part in held), ends.cpu())
    torch.testing.assert_close(experts24.experts24(x, *held, ends).cpu(), expected, rtol=1e-5, atol=1e-4)
