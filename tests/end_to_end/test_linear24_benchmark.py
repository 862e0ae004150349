"""benchmarks/linear24.py on the CPU, at shapes that only show which kernels are measured."""

from __future__ import annotations

import pytest
import torch

from benchmarks import linear24
from sparseforge_ds.packed_format.packing import pack24

ONE = ["--rows", "1", "--repeats", "1", "--dtypes", "float32"]


def test_the_careful_dense_kernel_is_beside_shapes_that_it_knows(capsys: pytest.CaptureFixture[str]) -> None:
    linear24.main(["--shapes", "16x64", "12x64", "16x96", *ONE])
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(",")[0] for line in lines] == [
        f"float32 {shape}" for shape in ("16 x 64", "12 x 64", "16 x 96")
    ]
    assert all("torch" in line and "packed" in line for line in lines)
    is_there = linear24.has_careful_dense(torch.float32, 16, 64)  # this processor has AVX-512
    assert ["careful dense" in line for line in lines] == [is_there, False, False]


def test_the_careful_dense_kernel_refuses_what_it_would_read_beyond() -> None:
    torch.manual_seed(0)
    for dtype in (torch.float32, torch.bfloat16):
        if not linear24.has_careful_dense(dtype, 24, 192):
            pytest.skip(f"this processor has no AVX-512 for {dtype}")
        weight = torch.randn(24, 192).to(dtype)
        x = torch.randn(192).to(dtype)
        product = linear24.load_careful_dense()
        torch.testing.assert_close(product(x, weight), weight.float() @ x.float(), atol=1e-3, rtol=1e-4)
        for wrong in (weight[:20], weight[:, :160].contiguous()):
            with pytest.raises(RuntimeError, match="outputs must be a multiple of 8, inputs of 64"):
                product(x[: wrong.shape[1]], wrong)
    with pytest.raises(RuntimeError, match="must be bfloat16 or float32, both the same"):
        product(x.half(), weight.half())


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--round_inputs"], "--round_inputs: rounds the inputs of int8 values; give --values int8 too"),
        (["--round_inputs", "--values", "int4:64"], "--round_inputs: rounds the inputs of int8 values"),
        (["--staged"], "--staged: --device cpu does not read it; leave it out"),
        (["--device", "cuda", "--values", "int8"], "--values: --device cuda does not read it; leave it out"),
        (["--device", "cuda", "--round_inputs"], "--round_inputs: --device cuda does not read it"),
        (["--device", "cuda", "--threads", "2"], "--threads: --device cuda does not read it"),
    ],
)
def test_flags_that_nothing_reads_are_refused(
    flags: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        linear24.main(flags)
    assert message in capsys.readouterr().err


def test_inputs_are_rounded_beside_int8_values(capsys: pytest.CaptureFixture[str]) -> None:
    linear24.main(["--shapes", "16x64", "--values", "int8", "--round_inputs", *ONE])
    assert "int8, inputs too" in capsys.readouterr().out


def test_weights_in_turn_leave_the_cache() -> None:
    tiles = pytest.importorskip("benchmarks.tiles", reason="triton is not installed", exc_type=ImportError)
    for shape in ((1024, 64), (64, 256), (8, 4)):
        packed_bytes = sum(part.nbytes for part in pack24(torch.zeros(shape, dtype=torch.bfloat16), -1))
        for cache_bytes in (1, 6 * packed_bytes // 2, 6 * packed_bytes // 2 + 1, 100_000):
            count = tiles.weights_in_turn(*shape, torch.bfloat16, cache_bytes)
            assert count >= 6 and count * packed_bytes >= 2 * cache_bytes
            assert count == 6 or (count - 1) * packed_bytes < 2 * cache_bytes  # no more than it takes
