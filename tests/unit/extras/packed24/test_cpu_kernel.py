"""The C++ kernel on every path that this processor has, against fp64, and what is said where it cannot be built."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from sparseforge_ds.extras.packed24.cpu_kernel import load_cpu_kernel
from sparseforge_ds.extras.packed24.linear24 import linear24
from sparseforge_ds.packed_format.packed_values import GRIDS, PAIRS, SCALE_DTYPES, unpaired
from sparseforge_ds.packed_format.packing import pack24, unpack24
from tests.conftest import ROOT
from tests.unit.extras.packed24.test_linear24 import rounded

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]


def packed(outputs: int, inputs: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    weight = torch.randn(outputs, inputs)
    weight.view(outputs, -1, 4).scatter_(-1, torch.rand(outputs, inputs // 4, 4).argsort(-1)[..., :2], 0.0)
    return pack24(weight.to(dtype), -1)


def exact(
    x: Tensor, values: Tensor, positions: Tensor, bias: Tensor | None, scale: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return the product y64 in fp64, and a bound of |y - y64|.

    It is eps(dtype) |y64| + inputs eps(fp32) sum |x| |w|: one rounding of the result, sums in fp32. Sums of 8-bit
    values may be rounded before they are scaled, which adds eps(dtype) |y64 - bias|. int4 may be scaled and rounded to
    16 bits before, which adds eps(dtype) sum |x| |w|.
    """
    if scale is not None and values.dtype == PAIRS:
        weight = unpack24(values, positions, scale, torch.float64)
    else:
        weight = unpack24(values.double() if scale is None else values.float().double(), positions)
        weight = weight if scale is None else weight * scale.double()
    shift = torch.zeros(len(values), dtype=torch.float64) if bias is None else bias.double()
    expected = x.double() @ weight.T + shift
    size = x.double().abs() @ weight.T.abs() + shift.abs()
    sums = torch.finfo(torch.float64 if x.dtype == torch.float64 else torch.float32).eps
    info = torch.finfo(x.dtype)
    bound = info.eps * expected.abs() + x.shape[-1] * sums * size + info.tiny
    if scale is not None:
        bound += info.eps * (size if values.dtype == PAIRS and info.bits == 16 else (expected - shift).abs())
    return expected, bound


def within_bound(product: Tensor, x: Tensor, *operands: Tensor | None) -> bool:
    expected, bound = exact(x, *operands)
    return bool(((product.double() - expected).abs() <= bound).all())


@pytest.fixture(scope="module", params=["", "avx512", "avx2", "portable"], ids=lambda path: path or "best")
def path(request: pytest.FixtureRequest) -> str:
    """Select a path of the kernel; bf16 may have one that fp32 has not."""
    assert load_cpu_kernel()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SPARSEFORGE_CPU_KERNEL", request.param)
        for dtype in (torch.float32, torch.bfloat16):
            try:
                linear24(torch.zeros(1, 4, dtype=dtype), *packed(1, 4, dtype))
            except ValueError:
                pytest.skip(f"this processor has no {request.param}")
        yield request.param


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    rows=st.integers(1, 17),
    outputs=st.integers(1, 37),
    groups=st.integers(1, 70),
    dtype=st.sampled_from(DTYPES),
    with_bias=st.booleans(),
    layout=st.sampled_from(["plain", "transposed", "strided", "three axes"]),
    grid=st.sampled_from([None, *GRIDS, "int4"]),
    scale_group=st.sampled_from([None, 16, 32, 48, 64, 96]),
    seed=st.integers(0, 99),
)
def test_products_are_within_the_stated_bound_of_fp64(
    path: str,
    rows: int,
    outputs: int,
    groups: int,
    dtype: torch.dtype,
    with_bias: bool,
    layout: str,
    grid: str | None,
    scale_group: int | None,
    seed: int,
) -> None:
    torch.manual_seed(seed)
    inputs = 4 * groups if scale_group is None or grid != "int4" else 2 * scale_group * (1 + groups % 6)
    packed_weight = packed(outputs, inputs, dtype) if grid is None else rounded(outputs, inputs, grid, scale_group)
    values, positions, *scale = packed_weight
    x = torch.randn(rows, inputs).to(dtype)
    # The layouts of x that the operator has to take.
    x = {
        "plain": x,
        "transposed": x.t().contiguous().t(),
        "strided": torch.stack((x, x), -1).flatten(-2)[:, ::2],
        "three axes": x.expand(2, rows, inputs),
    }[layout]
    bias = torch.randn(outputs).to(dtype) if with_bias else None
    product = linear24(x, values, positions, bias, *scale)
    assert product.dtype == dtype and product.is_contiguous() and product.shape == (*x.shape[:-1], outputs)
    assert within_bound(product, x, values, positions, bias, *scale)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("grid", GRIDS)
def test_every_code_is_its_value(path: str, dtype: torch.dtype, grid: str) -> None:
    """Place each code many times in a row, for both ways; small ones of fp8 also where torch flushes to zero."""
    codes = torch.arange(256, dtype=torch.uint8)
    sound = {"int8": codes != 0x80, "fp8_e4m3": codes & 0x7F != 0x7F, "int4": (codes & 15 != 8) & (codes >> 4 != 8)}
    codes = codes[sound[grid]]
    stored = len(codes) // 4 * 4
    values = torch.stack([codes.roll(shift)[:stored] for shift in range(0, len(codes), 29)]).view(GRIDS[grid])
    expected = unpaired(values, -1).float().T
    kept = len(expected)
    positions = torch.full((1, kept // 4), 0x44, dtype=torch.uint8)  # the first two of each group
    x = unpack24(torch.eye(kept), positions.expand(kept, -1).contiguous()).to(dtype)
    scale = torch.ones(len(values), 1, dtype=SCALE_DTYPES[values.dtype])
    operands = (values, positions.expand(len(values), -1), None, scale)
    for flush in (False, True):
        torch.set_flush_denormal(flush)
        try:
            products = [linear24(x, *operands), torch.cat([linear24(row[None], *operands) for row in x[::5]])]
        finally:
            torch.set_flush_denormal(False)
        assert torch.equal(products[0].float(), expected)
        assert torch.equal(products[1].float(), expected[::5])


@functools.cache
def many_rows(dtype: torch.dtype) -> tuple[Tensor, list[tuple[Tensor | None, ...]], list[tuple[Tensor, Tensor]]]:
    """Return x, three forms of weights, and their products in fp64 with bounds, which all paths share."""
    torch.manual_seed(0)
    values, positions = packed(300, 14336, dtype)
    x = torch.randn(75, 14336).to(dtype)
    bias = torch.randn(300).to(dtype)
    codes = (rounded(300, 14336, "int8"), rounded(300, 14336, "int4", 64))
    weights = [(values, positions, bias), *((values, offsets, bias, scale) for values, offsets, scale in codes)]
    return x, weights, [exact(x, *operands) for operands in weights]


@pytest.mark.parametrize("dtype", DTYPES[:3])
def test_many_rows_are_right_by_several_tiles_and_threads(path: str, dtype: torch.dtype) -> None:
    """Multiply by tiles of 64 or 256 outputs of 14336 inputs; up to 24 or 73 rows of x go without one."""
    x, weights, references = many_rows(dtype)
    threads = torch.get_num_threads()
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            for rows in (1, 19, 73, 75):
                for operands, (expected, bound) in zip(weights, references, strict=True):
                    product = linear24(x[:rows], *operands)
                    assert ((product.double() - expected[:rows]).abs() <= bound[:rows]).all()
    finally:
        torch.set_num_threads(threads)


@pytest.fixture
def in_8_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ask for rows of x in 8 bits; skip where the processor has no instruction for them, which one line says."""
    assert load_cpu_kernel()
    monkeypatch.setenv("SPARSEFORGE_CPU_ACTIVATIONS", "int8")
    try:
        linear24(torch.zeros(4, 4), *rounded_operands(1, 4))
    except ValueError as error:
        assert "it needs a processor with AVX512-VNNI, and the kernel for AVX-512; leave it out" in str(error)
        pytest.skip("this processor has no AVX512-VNNI")


def rounded_operands(
    outputs: int, inputs: int, bias: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    codes, positions, scale = rounded(outputs, inputs, "int8")
    return codes, positions, bias, scale


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_rows_in_8_bits_are_multiplied_exactly(in_8_bits: None, dtype: torch.dtype) -> None:
    """Nothing but the rows is rounded, each to the nearest of 127 steps up to its largest number."""
    torch.manual_seed(0)
    info = torch.finfo(dtype)
    for rows, outputs, inputs, threads in ((4, 1, 4, 1), (5, 7, 132, 1), (13, 37, 500, 2), (150, 70, 4096, 2)):
        x = torch.randn(rows, inputs).to(dtype)
        bias = torch.randn(outputs).to(dtype)
        x[1] = 0
        codes, positions, _, scale = operands = rounded_operands(outputs, inputs, bias)
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        try:
            product = linear24(x, *operands)
        finally:
            torch.set_num_threads(before)
        step = (x.float().abs().amax(1, keepdim=True) / 127).clamp(min=torch.finfo(torch.float32).tiny)
        on_grid = (x.float() * (1 / step)).round().double()
        exact = on_grid @ unpack24(codes.float(), positions).double().T * step.double() * scale.double().T
        bound = info.eps * (exact + bias.double()).abs() + 1e-6 * (exact.abs() + bias.double().abs()) + info.tiny
        assert ((product.double() - exact - bias.double()).abs() <= bound).all()
        assert (on_grid.abs() <= 127).all() and torch.equal(product[1], bias)


def test_where_rows_in_8_bits_change_nothing(in_8_bits: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fewer than four rows, where nothing is gained, and values that are no int8."""
    operands = rounded_operands(9, 192)
    few = torch.randn(3, 192)
    many = torch.randn(5, 192)
    pairs, positions, scale = rounded(9, 192, "int4", 16)

    def products() -> list[Tensor]:
        return [
            linear24(few, *operands),
            linear24(many, pairs, positions, None, scale),
            linear24(many.half(), *operands),
        ]

    rounds = products()
    exact = linear24(many, *operands)
    monkeypatch.delenv("SPARSEFORGE_CPU_ACTIVATIONS")
    assert all(torch.equal(*pair) for pair in zip(rounds, products(), strict=True))
    assert not torch.equal(exact, linear24(many, *operands))


def test_rows_in_8_bits_that_are_not_finite(in_8_bits: None) -> None:
    operands = rounded_operands(9, 132)
    x = torch.randn(7, 132)
    expected = linear24(x, *operands)
    for row, number in enumerate((float("nan"), float("inf"), float("-inf"))):
        x[row, 40 * row] = number
    product = linear24(x, *operands)
    assert not product[:3].isfinite().any() and torch.equal(product[3:], expected[3:])


def test_rows_in_other_bits_and_on_other_paths_are_refused(in_8_bits: None, monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(5, 132)
    operands = rounded_operands(9, 132)
    monkeypatch.setenv("SPARSEFORGE_CPU_KERNEL", "avx2")
    with pytest.raises(ValueError, match="SPARSEFORGE_CPU_ACTIVATIONS=int8: it needs .* the kernel for AVX-512; leave"):
        linear24(x, *operands)


def test_a_wrong_word_for_inputs_is_refused_by_every_product(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also by one whose inputs would not be rounded."""
    assert load_cpu_kernel()
    monkeypatch.setenv("SPARSEFORGE_CPU_ACTIVATIONS", "int4")
    rounded_weight = rounded_operands(9, 132)
    exact_weight = packed(9, 132, torch.float32)
    for x, operands in ((torch.ones(3, 132), rounded_weight), (torch.ones(5, 132), exact_weight)):
        with pytest.raises(ValueError, match="SPARSEFORGE_CPU_ACTIVATIONS=int4: give int8, or leave it out"):
            linear24(x, *operands)


def test_no_rows_and_a_path_that_does_not_exist(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    values, positions = packed(6, 8, torch.float32)
    assert linear24(torch.zeros(0, 8), values, positions).shape == (0, 6)
    monkeypatch.setenv("SPARSEFORGE_CPU_KERNEL", "fast")
    with pytest.raises(ValueError, match="SPARSEFORGE_CPU_KERNEL=fast: give portable, avx2 or avx512"):
        linear24(torch.zeros(1, 8), values, positions)


def test_compiling_is_said_and_without_a_compiler_the_reference_works(tmp_path: Path) -> None:
    code = (
        "import torch\n"
        "from sparseforge_ds.packed_format.packing import pack24, unpack24\n"
        "from sparseforge_ds.extras.packed24.linear24 import linear24\n"
        "weight = torch.randn(6, 8); weight.view(-1, 4)[:, :2] = 0\n"
        "packed, x = pack24(weight, -1), torch.randn(3, 8)\n"
        "for _ in range(3):\n"
        "    torch.testing.assert_close(linear24(x, *packed), x @ weight.T)\n"
    )
    environment = os.environ | {"TORCH_EXTENSIONS_DIR": str(tmp_path), "CXX": str(tmp_path / "no_compiler")}
    process = subprocess.run(
        [sys.executable, "-c", code], env=environment, cwd=ROOT, capture_output=True, text=True, check=True
    )
    messages = [line for line in process.stderr.splitlines() if line.startswith("linear24:")]
    assert len(messages) == 2 and f"compiling the CPU kernel, once on this machine, in {tmp_path}" in messages[0], (
        process.stderr
    )
    assert "could not be built (" in messages[1] and "Install a C++ compiler" in messages[1], process.stderr
