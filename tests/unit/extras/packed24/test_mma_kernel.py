"""The kernel for sparse tensor cores: its numbers without a GPU, by an emulation of the instruction; its tilings; which
products are its own."""

from __future__ import annotations

import ctypes
import logging
import shutil
import subprocess
import uuid
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from sparseforge_ds.extras.packed24 import cuda_driver, mma_kernel
from sparseforge_ds.extras.packed24.mma_kernel import (
    MOST_ROWS,
    ProductPlan,
    Stored,
    Tiling,
    choose_tiling,
    mma24,
    ranked,
    read_source,
)
from sparseforge_ds.extras.packed24.staged_tiling import STAGED_ROWS, StagedTiling
from sparseforge_ds.packed_format.packed_values import GRIDS
from tests.distributed import PATIENCE
from tests.unit.extras.packed24.test_cpu_kernel import packed, within_bound
from tests.unit.extras.packed24.test_linear24 import rounded

CASES = [
    (Tiling(1, 8, 1, 1, 2, 2, 3), 5, 130, 1024, 3, None),
    (Tiling(1, 8, 1, 2, 3, 3, 2), 8, 67, 1088, 2, None),
    (Tiling(2, 8, 1, 2, 1, 1, 3), 13, 130, 448, 2, None),
    (Tiling(1, 2, 1, 1, 2, 4, 1), 1, 40, 64, 1, None),
    (Tiling(4, 8, 2, 1, 2, 1, 2), 27, 48, 1088, 1, None),
    (Tiling(3, 8, 2, 4, 1, 2, 3), 17, 130, 1088, 2, None),
    (Tiling(1, 2, 1, 1, 3, 2, 1), 2, 50, 1024, 2, None),
    (Tiling(1, 4, 2, 1, 2, 2, 1), 4, 50, 1088, 1, None),
    (Tiling(1, 8, 1, 1, 2, 2, 3), 5, 130, 1024, 3, "int8"),
    (Tiling(3, 8, 2, 4, 1, 2, 3), 17, 131, 1088, 2, "int8"),
    (Tiling(1, 2, 1, 1, 2, 4, 1), 1, 40, 64, 1, "fp8_e4m3"),
    (Tiling(1, 4, 2, 1, 2, 2, 1), 4, 50, 1088, 1, "fp8_e4m3"),
    (Tiling(1, 8, 1, 1, 2, 2, 3), 5, 131, 1024, 3, "int4"),
    (Tiling(3, 8, 2, 4, 1, 2, 3), 17, 130, 1088, 2, "int4", 1),
    (Tiling(1, 2, 1, 1, 2, 4, 1), 1, 40, 1024, 1, "int4", 2),
    (Tiling(1, 4, 2, 1, 2, 2, 2), 4, 50, 1152, 1, "int4", 6),
    (StagedTiling(2, 2, 2, 2, 3, 1, 2, 2), 50, 130, 448, 6, None),
    (StagedTiling(4, 5, 1, 1, 2, 1, 1, 4), 33, 60, 320, 1, None),
    (StagedTiling(1, 1, 4, 4, 6, 1, 2, 1), 40, 20, 64, 2, None),
    (StagedTiling(2, 3, 1, 2, 4, 1, 1, 1), 41, 45, 192, 2, "int8"),
    (StagedTiling(1, 5, 3, 1, 2, 2, 1, 2), 36, 47, 320, 1, "fp8_e4m3"),
    (StagedTiling(2, 2, 1, 4, 3, 1, 1, 1), 63, 33, 128, 2, "int4"),
    (StagedTiling(2, 2, 1, 2, 3, 2, 2, 2), 37, 34, 448, 4, "int4", 1),
    (StagedTiling(1, 6, 2, 1, 4, 1, 1, 1), 48, 41, 512, 2, "int4", 2),
    (StagedTiling(3, 2, 3, 2, 3, 1, 2, 2), 50, 150, 576, 4, None),
    (StagedTiling(3, 5, 5, 1, 2, 1, 1, 1), 37, 70, 192, 1, "int4", 1),
]
"""Tiling, rows, outputs, inputs, blocks along outputs and rows, grid of rounded values, blocks that share a scale."""
HALF_CASES = [
    (Tiling(3, 8, 2, 4, 1, 2, 3), 17, 131, 1088, 2, "int8"),
    (Tiling(1, 4, 2, 1, 2, 2, 1), 4, 50, 1088, 1, "fp8_e4m3"),
    (StagedTiling(1, 1, 4, 4, 6, 1, 2, 1), 40, 20, 64, 2, None),
    (StagedTiling(2, 3, 1, 2, 4, 1, 1, 1), 41, 45, 192, 2, "int8"),
    (StagedTiling(1, 5, 3, 1, 2, 2, 1, 2), 36, 47, 320, 1, "fp8_e4m3"),
    (StagedTiling(2, 2, 1, 2, 3, 2, 2, 2), 37, 34, 448, 4, "int4", 1),
]
"""The same in fp16."""
ALL_CASES = [(torch.bfloat16, case) for case in CASES] + [(torch.float16, case) for case in HALF_CASES]
STAGED = StagedTiling(1, 2, 2, 2, 2, 1, 1, 1)
MISTAKES = [
    ("__syncthreads();", "", b"another lane has copied"),
    ("arrived<STAGES - 2>", "arrived<STAGES - 1>", b"on its way"),
    ("fetch_ahead(step + STAGES - 1)", "fetch_ahead(step + STAGES)", b"on its way"),
    ("min(o, of.out - 1) * blocks * (CHUNKS * 16)", "o * blocks * (CHUNKS * 16)", b"outside the operands"),
    ("min(n, of.rows - 1) * blocks * 128 + c * 16), n < of.rows", "n * blocks * 128 + c * 16), true", b"outside"),
]
"""Lines of `staged24.cu`, faults to put in their place, and words of the mistake that the emulation must report."""
GPUS = {"H100": (132, 227 * 1024), "A100": (108, 163 * 1024), "RTX 4090": (128, 99 * 1024)}
"""Multiprocessors, and bytes of shared memory that a block may have."""
SHAPES = [(outputs, inputs) for outputs in (1, 1000, 4096, 28672, 128256) for inputs in (64, 2048, 4160, 14336, 28672)]


def case_source(name: str, tiling: Tiling | StagedTiling, macros: dict[str, int], source: str) -> list[str]:
    """Return lines of C++ with a kernel and a function that runs it."""
    parameters = (
        "char* v, char* p, unsigned short* x, float* scale, unsigned short* bias, unsigned short* y, float* part"
    )
    return [
        *(f"#define {macro} {value}" for macro, value in macros.items()),
        f"namespace in_{name} {{",
        source.replace('extern "C"', ""),
        f"""
        static_assert(THREADS == {tiling.threads});
        extern "C" const char* {name}({parameters}, int rows, int out, int in, unsigned blocks, int memory,
                                      const size_t* bytes) {{
          emulated::is_half = {str("HALF" in macros).lower()};
          auto multiply = [=] {{ {tiling.kernel}(v, p, x, (Scale*)scale, bias, y, part, rows, out, in); }};
          const char* race = emulated::run(multiply, {{blocks, {tiling.parts}}}, THREADS, memory,
                                           {{{{v, bytes[0]}}, {{p, bytes[1]}}, {{x, bytes[2]}}, {{scale, bytes[3]}}}});
          auto add = [=] {{ sum24(part, (Scale*)scale, bias, y, rows * out, out, {tiling.parts}); }};
          if (part) emulated::run(add, {{(rows * out + 255u) / 256, 1}}, 256, 0, {{}});
          return race;
        }} }}""",
        *(f"#undef {macro}" for macro in (*macros, "KEPT", "PER_SCALE", "THREADS")),
    ]


@pytest.fixture(scope="module")
def emulation(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """Compile the real source for the host, once for each case."""
    if shutil.which("g++") is None:
        pytest.skip("g++ is not installed: apt install g++")
    folder = tmp_path_factory.mktemp("emulation")
    text = ['#include "linear24_emulated.h"']
    # Every tiling of `ALL_CASES`, with the macros that it is compiled with.
    for i, (dtype, (tiling, _, _, inputs, _, grid, *per_scale)) in enumerate(ALL_CASES):
        macros = tiling.macros(inputs) | ({"HALF": 1} if dtype == torch.float16 else {})
        macros |= {} if grid is None else dict(Stored(GRIDS[grid], *per_scale).macros())
        text += case_source(f"run{i}", tiling, macros, read_source("STAGES" in macros))
    source = read_source(True)
    for parts in (1, 2):
        text += case_source(f"staged{parts}", STAGED._replace(parts=parts), STAGED.macros(64), source)
    # The staged kernel with one known mistake each, which the emulation has to notice.
    for i, (right, wrong, _) in enumerate(MISTAKES):
        assert source.count(right) > 0
        text += case_source(f"mistake{i}", STAGED, STAGED.macros(192), source.replace(right, wrong))
    # All of them in one library.
    (folder / "all.cpp").write_text("\n".join(text))
    command = [
        "g++",
        "-std=c++17",
        "-O1",
        "-w",
        "-shared",
        "-fPIC",
        f"-I{Path(__file__).parent}",
        "all.cpp",
        "-oall.so",
    ]
    process = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=PATIENCE)
    assert process.returncode == 0, process.stderr[-3000:]
    return ctypes.CDLL(str(folder / "all.so"))


def run_emulated(
    function: Any, tiling: Tiling | StagedTiling, blocks: int, stored: Stored, operands: Sequence[Tensor | None]
) -> tuple[Tensor, bytes | None]:
    """Return the product of values, positions, x, scale and bias, and the mistake that the emulation has found."""
    values, _, x, *_ = operands
    assert values is not None and x is not None
    rows, inputs = x.shape
    outputs = len(values)
    y = torch.full((rows, outputs), torch.nan, dtype=x.dtype)
    part = torch.full((tiling.parts, rows, outputs), torch.nan) if tiling.parts > 1 else None
    pointers = [ctypes.c_void_p(None if tensor is None else tensor.data_ptr()) for tensor in (*operands, y, part)]
    function.restype = ctypes.c_char_p
    memory = tiling.shared_memory(inputs, stored.slot_bytes())
    sizes = (ctypes.c_size_t * len(operands))(*(0 if tensor is None else tensor.nbytes for tensor in operands))
    return y, function(*pointers, rows, outputs, inputs, blocks, memory, sizes)


@pytest.mark.parametrize("case", range(len(ALL_CASES)))
def test_emulated_numbers_are_those_of_the_dense_product(emulation: ctypes.CDLL, case: int) -> None:
    dtype, (tiling, rows, outputs, inputs, blocks, grid, *per_scale) = ALL_CASES[case]
    group = 32 * per_scale[0] if per_scale else None
    made = packed(outputs, inputs, dtype) if grid is None else rounded(outputs, inputs, grid, group)
    values, positions, scale = (*made, None) if grid is None else made
    x = torch.randn(rows, inputs).to(dtype)
    stored = Stored() if grid is None else Stored(GRIDS[grid], *per_scale)
    for bias in (torch.randn(outputs).to(dtype), None):
        function = getattr(emulation, f"run{case}")
        y, race = run_emulated(function, tiling, blocks, stored, (values, positions, x, scale, bias))
        assert race is None
        assert within_bound(y, x, values, positions, bias, scale)


@settings(max_examples=15)
@given(st.integers(1, 70), st.integers(1, 70), st.integers(1, 9))
def test_staged_kernel_takes_any_size(emulation: ctypes.CDLL, rows: int, outputs: int, blocks: int) -> None:
    """Multiply with tilings of one part and of two, whose blocks have 32 outputs and 32 rows."""
    values, positions = packed(outputs, 64 * blocks, torch.bfloat16)
    x = torch.randn(rows, 64 * blocks).bfloat16()
    for parts in (1, 2):
        tiling = STAGED._replace(row_blocks=-(-rows // STAGED.rows), parts=parts)
        operands = (values, positions, x, None, None)
        function = getattr(emulation, f"staged{parts}")
        y, race = run_emulated(function, tiling, tiling.blocks(outputs, 1)[0], Stored(), operands)
        assert race is None and within_bound(y, x, values, positions, None)


@pytest.mark.parametrize("mistake", range(len(MISTAKES)))
def test_emulation_finds_mistakes(emulation: ctypes.CDLL, mistake: int) -> None:
    """Miss a barrier or a copy, fill a slot too early, or read behind a tensor: numbers may be right here."""
    operands = (*packed(31, 192, torch.bfloat16), torch.randn(31, 192).bfloat16(), None, None)
    _, race = run_emulated(getattr(emulation, f"mistake{mistake}"), STAGED, 1, Stored(), operands)
    assert race is not None and MISTAKES[mistake][2] in race


class Driver:
    """Stand-in for NVIDIA's driver that notes the launches."""

    def __init__(self) -> None:
        self.launches: list[tuple[Any, ...]] = []
        self.compiled: list[tuple[tuple[str, int], ...]] = []
        self.capability = (8, 0)

    def load_module(self, macros: tuple[tuple[str, int], ...], _device: int) -> SimpleNamespace:
        """Note the macros; a kernel is its name."""
        self.compiled.append(macros)
        return SimpleNamespace(device=0, function=str)

    def cuLaunchKernel(self, kernel: str, *arguments: Any) -> int:  # noqa: N802 (the name that the driver gives it)
        """Note a plain launch."""
        self.launches.append((kernel, *(number.value for number in arguments[:8])))
        return 0

    def cuLaunchKernelEx(self, reference: Any, kernel: str, *_: Any) -> int:  # noqa: N802 (likewise)
        """Note a launch with attributes."""
        config = reference._obj
        attributes = [(config.attributes[i].id, config.attributes[i].value) for i in range(config.count)]
        self.launches.append((kernel, *config.dimensions, config.shared_memory, config.stream, attributes))
        return 0


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    """Pretend to have a GPU of four multiprocessors, whose stream is 7."""
    driver = Driver()
    monkeypatch.delenv("SPARSEFORGE_OVERLAP", raising=False)
    monkeypatch.setattr(mma_kernel, "load_module", driver.load_module)
    monkeypatch.setattr(cuda_driver, "load_driver", lambda: driver)
    properties = SimpleNamespace(multi_processor_count=4)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: driver.capability)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 7, raising=False)
    return driver


def test_staged_launches_have_the_blocks_threads_and_memory_that_the_kernel_takes(driver: Driver) -> None:
    """Launch blocks of 64 outputs and 32 rows: three times two of them, in two parts, with three slots each."""
    plan = ProductPlan(StagedTiling(2, 2, 2, 2, 3, 1, 2, 2), 50, 130, 448, torch.bfloat16, 0)
    x = torch.zeros(50, 448, dtype=torch.bfloat16)
    plan(x, *packed(130, 448, torch.bfloat16), None, x.new_empty(50, 130))
    memory = 3 * (32 * 128 + 64 * (64 + 8))
    assert driver.launches == [("staged24", 6, 2, 1, 128, 1, 1, memory, 7), ("sum24", 26, 1, 1, 256, 1, 1, 0, 7)]
    assert driver.compiled == [(("WM", 2), ("NT", 2), ("WO", 2), ("WR", 2), ("STAGES", 3), ("RESIDENT", 1))]


@pytest.mark.parametrize(
    ("setting", "capability", "is_on"),
    [("1", (9, 0), True), ("1", (12, 0), True), ("1", (8, 9), False), (None, (9, 0), False)],
)
def test_launches_overlap_where_that_is_asked_for_and_known(
    monkeypatch: pytest.MonkeyPatch, driver: Driver, setting: str | None, capability: tuple[int, int], is_on: bool
) -> None:
    driver.capability = capability
    if setting is not None:
        monkeypatch.setenv("SPARSEFORGE_OVERLAP", setting)
    plan = ProductPlan(Tiling(1, 2, 1, 1, 2, 2, 2), 1, 40, 1024, torch.bfloat16, 0)
    values, positions = packed(40, 1024, torch.bfloat16)
    x = torch.zeros(1, 1024, dtype=torch.bfloat16)
    plan(x, values, positions, None, x.new_empty(1, 40))
    # Weights in a copy are written by the kernel ahead.
    plan(x, torch.cat([values[0, :1], values.flatten()])[1:].view_as(values), positions, None, x.new_empty(1, 40))
    (macros,) = driver.compiled
    assert (("OVERLAP", 1) in macros) == is_on
    memory = Tiling(1, 2, 1, 1, 2, 2, 2).shared_memory(1024)
    plain = [("linear24", 2, 2, 1, 64, 1, 1, memory, 7), ("sum24", 1, 1, 1, 256, 1, 1, 0, 7)]
    overlapping = [(*launch, [(6, 1)]) for launch in plain]
    in_order = [(*plain[0], []), overlapping[1]]
    assert driver.launches == ([*overlapping, *in_order] if is_on else plain * 2)


@pytest.mark.parametrize("word", ["true", "on", "2"])
@pytest.mark.parametrize("variable", ["SPARSEFORGE_STAGED", "SPARSEFORGE_OVERLAP"])
def test_other_words_than_0_and_1_are_refused(
    monkeypatch: pytest.MonkeyPatch, driver: Driver, variable: str, word: str
) -> None:
    monkeypatch.setenv(variable, word)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    properties = SimpleNamespace(major=9, multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(mma_kernel, "shared_memory_limit", lambda device: GPUS["H100"][1])
    rows = MOST_ROWS + 1 if variable == "SPARSEFORGE_STAGED" else 3
    with pytest.raises(ValueError, match=f"^{variable}='{word}' .*: set .* 1, or unset it$"):
        mma24(*on_meta(rows, 48, 192, torch.bfloat16))


def test_the_configuration_of_a_launch_is_laid_out_as_the_drivers_header_says(tmp_path: Path) -> None:
    triton = find_spec("triton")
    if shutil.which("g++") is None or triton is None or triton.origin is None:
        pytest.skip("needs g++, and Triton, which has the header of NVIDIA's driver")
    lines = ["#include <cstddef>", '#include "cuda.h"']
    for name, structure, fields in (
        (
            "CUlaunchConfig",
            cuda_driver.LaunchConfig,
            {"shared_memory": "sharedMemBytes", "stream": "hStream", "attributes": "attrs", "count": "numAttrs"},
        ),
        ("CUlaunchAttribute", cuda_driver.LaunchAttribute, {"id": "id", "value": "value"}),
    ):
        lines.append(f"static_assert(sizeof({name}) == {ctypes.sizeof(structure)});")
        lines += [
            f"static_assert(offsetof({name}, {header_name}) == {getattr(structure, name_here).offset});"
            for name_here, header_name in fields.items()
        ]
    lines.append("static_assert(CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION == 6);")
    (tmp_path / "layout.cpp").write_text("\n".join(lines))
    include = Path(triton.origin).parent / "backends" / "nvidia" / "include"
    command = ["g++", "-std=c++17", "-fsyntax-only", f"-I{include}", str(tmp_path / "layout.cpp")]
    process = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE)
    assert process.returncode == 0, process.stderr[-3000:]


def test_weights_are_read_before_kernels_ahead_are_awaited_and_all_else_after(tmp_path: Path) -> None:
    """Compile for compute capability 9.0, where there is NVIDIA's compiler."""
    if shutil.which("nvcc") is None:
        pytest.skip("nvcc is not installed; it comes with the CUDA toolkit")
    macros = {**Tiling(1, 8, 1, 1, 2, 3, 1).macros(1024), "OVERLAP": 1, "ORDERED": 1}
    lines = [f"#define {name} {value}" for name, value in macros.items()]
    (tmp_path / "kernel.cu").write_text("\n".join([*lines, read_source(False)]))
    command = ["nvcc", "-ptx", "-arch=sm_90", "-std=c++17", "-o", "kernel.ptx", "kernel.cu"]
    process = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=PATIENCE)
    assert process.returncode == 0, process.stderr[-3000:]
    (multiply, add) = sorted(
        (tmp_path / "kernel.ptx").read_text().split(".entry ")[1:], key=lambda text: "sum24" in text[:9]
    )
    assert multiply.index("cp.async") < multiply.index("griddepcontrol.wait") < multiply.index("ld.global")
    assert add.index("griddepcontrol.wait") < add.index("ld.global")
    # What the kernel ahead writes is no constant: 16 bytes of x, and of the sums.
    for kernel in (multiply, add):
        assert "ld.global.v4" in kernel and "ld.global.nc.v4" not in kernel


@pytest.mark.parametrize("tiling", [Tiling(2, 8, 1, 1, 2, 2, 2), STAGED], ids=["few rows", "staged"])
def test_kernels_are_built_for_every_architecture(tiling: Tiling | StagedTiling, tmp_path: Path) -> None:
    """Let NVIDIA's assembler refuse what an architecture has not, for each kind of values."""
    if shutil.which("nvcc") is None:
        pytest.skip("nvcc is not installed; it comes with the CUDA toolkit")
    kinds: list[tuple[torch.dtype, Stored, list[int]]] = [
        (torch.bfloat16, Stored(), [80, 86, 89, 90, 100, 120]),
        (torch.float16, Stored(GRIDS["fp8_e4m3"]), [80, 90]),
        (torch.bfloat16, Stored(GRIDS["int8"]), [80]),
        (torch.float16, Stored(GRIDS["int4"], 1), [80]),
        (torch.bfloat16, Stored(GRIDS["int4"], 2), [80]),
    ]
    for dtype, stored, architectures in kinds:
        macros = {"ORDERED": 1, **tiling.macros(192), **({"HALF": 1} if dtype == torch.float16 else {})}
        # In the source, since short names as macros of a command line would reach NVIDIA's headers.
        lines = [f"#define {name} {value}" for name, value in {**macros, **dict(stored.macros())}.items()]
        (tmp_path / "kernel.cu").write_text("\n".join([*lines, read_source("STAGES" in macros)]))
        codes = [f"-gencode=arch=compute_80,code=sm_{number}" for number in architectures]
        command = ["nvcc", "-fatbin", "-std=c++17", *codes, "kernel.cu"]
        process = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=PATIENCE)
        assert process.returncode == 0, process.stderr[-3000:]


@pytest.mark.parametrize("gpu", list(GPUS))
def test_tilings_fit_and_divide_everything(gpu: str) -> None:
    multiprocessors, memory = GPUS[gpu]
    for outputs, inputs in SHAPES:
        for rows in (1, 4, 8, 9, 16, 32):
            slot = Stored(*{4: (torch.int8,), 16: (torch.uint8, 2)}.get(rows, ())).slot_bytes()
            tilings = ranked(rows, outputs, inputs, multiprocessors, memory, slot)
            assert tilings and tilings[0] == choose_tiling(rows, outputs, inputs, multiprocessors, memory, slot)
            for tiling in tilings:
                along, parts = tiling.blocks(outputs, multiprocessors)
                assert tiling.shared_memory(inputs, slot) <= memory
                assert tiling.threads <= 512 and tiling.U in (1, 2, 3, 4)
                assert rows <= tiling.XR * tiling.NT and 256 * parts * tiling.steps(inputs) >= inputs
                assert 1 <= along * parts <= max(multiprocessors, parts)


@pytest.mark.parametrize("gpu", list(GPUS))
def test_staged_tilings_fit_and_divide_everything(gpu: str) -> None:
    multiprocessors, memory = GPUS[gpu]
    for outputs, inputs in SHAPES[::2]:
        for rows in (33, 96, 130, 256):
            slot = Stored(*{96: (torch.int8,), 130: (torch.uint8, 2)}.get(rows, ())).slot_bytes()
            tilings = ranked(rows, outputs, inputs, multiprocessors, memory, slot)
            assert tilings
            for tiling in tilings:
                assert isinstance(tiling, StagedTiling)
                along, parts = tiling.blocks(outputs, multiprocessors)
                shared = tiling.shared_memory(inputs, slot) + 1024  # a block's own, and what the driver takes
                assert tiling.RESIDENT * shared <= memory + 1024 and tiling.STAGES >= 2
                assert 65536 // (tiling.threads * tiling.RESIDENT) > 4 * tiling.WM * tiling.NT + 80
                assert tiling.threads <= 512 and parts <= max(1, inputs // 256)
                # The kernel derives the blocks of rows itself: one more would leave the weight.
                assert tiling.row_blocks == -(-rows // tiling.rows)
                assert outputs <= tiling.outputs * along // tiling.row_blocks < outputs + tiling.outputs


def test_tilings_are_those_that_were_measured() -> None:
    """Compare with the best on an H200 of some that were tried."""
    for outputs, inputs, expected in (
        (14336, 4096, Tiling(1, 8, 1, 1, 16, 2, 1)),
        (4096, 4096, Tiling(1, 8, 1, 2, 8, 2, 1)),
        (17408, 5120, Tiling(1, 8, 1, 1, 10, 3, 1)),
    ):
        assert choose_tiling(8, outputs, inputs, *GPUS["H100"]) == expected


def on_meta(rows: int, outputs: int, inputs: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, None]:
    values = torch.empty(outputs, inputs // 2, dtype=dtype, device="meta")
    positions = torch.empty(outputs, -(-inputs // 8), dtype=torch.uint8, device="meta")
    return torch.empty(rows, inputs, dtype=dtype, device="meta"), values, positions, None


@pytest.fixture
def gpu_queries(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[SimpleNamespace]]:
    """Pretend to have a GPU, and list its answers about itself; it is too old for the kernel."""
    gpu = SimpleNamespace(major=7, multi_processor_count=132)
    answers: list[SimpleNamespace] = []
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: answers.append(gpu) or gpu)
    mma_kernel.plan_product.cache_clear()
    yield answers
    mma_kernel.plan_product.cache_clear()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_few_rows_of_whole_blocks_are_its_own(dtype: torch.dtype, gpu_queries: list[SimpleNamespace]) -> None:
    """Ask once a product if a device has the instruction, and only for products that it could take."""
    products = ((1, 4096), (1, 4096), (MOST_ROWS, 192), (MOST_ROWS + 1, 192), (0, 192), (1, 4100), (2, 32))
    counts = []
    for rows, inputs in products:
        assert mma24(*on_meta(rows, 48, inputs, dtype)) is None
        counts.append(len(gpu_queries))
    assert counts == [1, 1, 2, 2, 2, 2, 2]


@pytest.mark.parametrize(("setting", "counts"), [(None, [0, 0, 0]), ("0", [0, 0, 0]), ("1", [1, 2, 2])])
def test_more_rows_are_its_own_where_that_is_asked_for(
    setting: str | None, counts: list[int], gpu_queries: list[SimpleNamespace], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SPARSEFORGE_STAGED", raising=False)
    if setting is not None:
        monkeypatch.setenv("SPARSEFORGE_STAGED", setting)
    asked_so_far = []
    for rows in (MOST_ROWS + 1, STAGED_ROWS, STAGED_ROWS + 1):
        assert mma24(*on_meta(rows, 48, 192, torch.bfloat16)) is None
        asked_so_far.append(len(gpu_queries))
    assert asked_so_far == counts


def test_other_dtypes_and_builds_of_torch_are_not_its_own(
    gpu_queries: list[SimpleNamespace], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert mma24(*on_meta(1, 48, 64, torch.float32)) is None
    monkeypatch.setattr(torch.version, "cuda", None)  # as AMD's and CPU builds have it
    assert mma24(*on_meta(1, 48, 64, torch.bfloat16)) is None
    assert not gpu_queries


@pytest.mark.parametrize(
    ("group", "outputs", "is_its_own"),
    [(32, 48, True), (96, 48, True), (16, 48, False), (48, 48, False), (64, 47, False)],
)
def test_groups_that_it_does_not_take_are_said_once(
    group: int,
    outputs: int,
    is_its_own: bool,
    gpu_queries: list[SimpleNamespace],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A row has 192 values: of 47 rows with 3 scales each, the last is no pair."""
    codes, positions, scale = rounded(outputs, 384, "int4", group)
    hopper = SimpleNamespace(major=9, multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: hopper)
    planned: list[int] = []
    monkeypatch.setattr(mma_kernel, "shared_memory_limit", lambda device: 0)
    monkeypatch.setattr(mma_kernel, "choose_tiling", lambda *sizes: planned.append(1))
    mma_kernel.note_groups.cache_clear()
    with caplog.at_level(logging.WARNING):
        for rows in (1, 9):
            assert mma24(torch.ones(rows, 384).bfloat16(), codes, positions, None, scale) is None
    assert len(planned) == (2 if is_its_own else 0)
    assert len(caplog.records) == (0 if is_its_own else 1)
    assert ("--group_size, such as 64" in caplog.text) != is_its_own


def test_where_it_cannot_be_compiled_one_warning_names_the_reason(
    gpu_queries: list[SimpleNamespace], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    reason = f"libnvrtc.so.13: cannot open shared object file, {uuid.uuid4()}"

    def gone(*_: object) -> None:
        raise OSError(reason)

    hopper = SimpleNamespace(major=9, multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: hopper)
    monkeypatch.setattr(mma_kernel, "shared_memory_limit", gone)
    with caplog.at_level(logging.WARNING):
        for rows in (1, 9):
            assert mma24(*on_meta(rows, 48, 64, torch.bfloat16)) is None
    assert len(caplog.records) == 1 and reason in caplog.text
