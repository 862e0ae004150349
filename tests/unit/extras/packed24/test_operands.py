"""Operands that no operator on packed weights may take: one line refuses them, and no memory is touched before."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.utils import cpp_extension

from sparseforge_ds.extras.packed24 import cpu_kernel, experts24, linear24
from sparseforge_ds.extras.packed24 import operands as operands_module
from sparseforge_ds.extras.packed24.operands import require_operands
from tests.conftest import ROOT
from tests.distributed import PATIENCE
from tests.unit.extras.packed24.fuzzed_operands import OPERATORS, OTHERS
from tests.unit.extras.packed24.test_linear24 import rounded

GPU_OPERATORS: dict[str, Callable[..., Tensor]] = {
    "linear24": linear24.linear24_on_gpu,
    "experts24": experts24.experts24_on_gpu,
}


def operands(operator: str, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """Operands that belong together: 7 rows, 6 outputs, 20 inputs."""
    lead = (3,) if "experts" in operator else ()
    made = {
        "x": torch.ones(7, 6 if "gradient" in operator else 20).to(dtype),
        "values": torch.ones(*lead, 6, 10).to(dtype),
        "positions": torch.tensor([0x44, 0x44, 0x04], dtype=torch.uint8).expand(*lead, 6, 3),
    }
    return made | ({"ends": torch.tensor([2, 2, 5])} if lead else {})


@pytest.mark.parametrize("operator", OPERATORS)
@pytest.mark.parametrize("dtype", OTHERS, ids=str)
def test_no_kernel_sees_a_dtype_that_no_packed_weight_has(operator: str, dtype: torch.dtype) -> None:
    expected = f"{operator}: x is {dtype}; packed weights and what they multiply are float64, float32, bfloat16 or"
    tensors = operands(operator, dtype)
    for call in (OPERATORS[operator], GPU_OPERATORS.get(operator)):
        if call is not None:
            with pytest.raises(ValueError, match=expected):
                call(*tensors.values())
    with pytest.raises(ValueError, match=expected), torch.autocast("cpu", torch.bfloat16):
        OPERATORS[operator](*tensors.values())
    with pytest.raises(ValueError, match=expected):  # what torch.compile calls
        OPERATORS[operator](*(tensor.to("meta") for tensor in tensors.values()))


@pytest.mark.parametrize("operator", ["experts24", "experts24_input_gradient"])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"ends": torch.tensor([2.0, 2, 5])}, "ends are int32 or int64, these are torch.float32"),
        ({"ends": torch.tensor([2, 2, 8])}, r"ends \[2, 2, 8\] are not in order between 0 and the 7 rows of x"),
        ({"ends": torch.tensor([5, 2, 5])}, r"ends \[5, 2, 5\] are not in order"),
        ({"ends": torch.tensor([-1, 2, 5])}, r"ends \[-1, 2, 5\] are not in order"),
        ({"positions": torch.ones(3, 6, 3)}, "positions are uint8, these are torch.float32"),
        ({"values": torch.ones(3, 6, 10).to_sparse()}, "operands are dense tensors, here: values torch.sparse_coo"),
    ],
)
def test_ends_and_positions_of_experts(operator: str, change: dict[str, Tensor], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        OPERATORS[operator](*(operands(operator) | change).values())


def test_weights_without_inputs_or_experts_are_refused() -> None:
    """Refuse a weight without inputs, by whose number kernels divide."""
    nothing = torch.ones(6, 0, dtype=torch.uint8)
    with pytest.raises(ValueError, match="no weight that is packed along its last axis"):
        linear24.linear24(torch.ones(7, 0), torch.ones(6, 0), nothing)
    empty = {name: tensor[:0] for name, tensor in operands("experts24").items() if name != "x"}
    with pytest.raises(ValueError, match="are not rows and the packed weights of as many experts"):
        experts24.experts24(torch.ones(7, 20), **empty)


def test_sound_operands_pass() -> None:
    for operator in OPERATORS:
        tensors = operands(operator)
        require_operands(operator, **tensors, backward="gradient" in operator)
        assert OPERATORS[operator](*tensors.values()).shape == (7, 20 if "gradient" in operator else 6)


def test_sound_groups_are_found_sound_without_a_search_for_the_damage() -> None:
    """Pay nothing for the messages in a sound product, those of groups among them."""
    codes, positions, scale = rounded(6, 128, "int4", 16)
    with pytest.MonkeyPatch.context() as patch:
        for name in ("grid_of", "require_scale_shape"):
            patch.delattr(operands_module, name)
        require_operands("linear24", torch.ones(3, 128), codes, positions, scale=scale)
        experts = (codes[None], positions[None], None, torch.tensor([3]), scale[None])
        require_operands("experts24", torch.ones(3, 128), *experts)


def test_random_operands_are_refused_or_multiplied_rightly() -> None:
    """Without the sanitizer, where the compiler has none, a fault of memory may go unseen, and often does not."""
    command = [sys.executable, "-m", "tests.unit.extras.packed24.fuzzed_operands", "300"]
    environment = dict(os.environ)
    if (preload := sanitizer_libraries()) is not None:
        command.append(str(build_with_sanitizer()))
        # Python frees nothing at its end, and torch has more than one C++ runtime.
        environment |= {"LD_PRELOAD": preload, "ASAN_OPTIONS": "detect_leaks=0:detect_odr_violation=0"}
    process = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=PATIENCE)
    report = [line for line in process.stderr.splitlines() if "AddressSanitizer" in line or line.startswith("    #")]
    assert process.returncode == 0, "\n".join(report[:20]) or process.stderr[-3000:]
    assert all(outcome in process.stdout for outcome in ("refused", "right", "any number"))


def sanitizer_libraries() -> str | None:
    """Return what a process must load first for a library with the sanitizer; None where g++ does not bring it."""
    if shutil.which("g++") is None:
        return None
    ask = ["g++", "-print-file-name=libasan.so", "-print-file-name=libstdc++.so"]
    paths = [
        subprocess.run([ask[0], question], capture_output=True, text=True, check=True).stdout.strip()
        for question in ask[1:]
    ]
    return " ".join(paths) if all(map(os.path.isabs, paths)) else None


def build_with_sanitizer() -> Path:
    """Compile the CPU kernel with the address sanitizer, once for its source, beside torch's other extensions."""
    folder = Path(cpu_kernel.__file__).parent
    sources = sorted(path for kind in ("linear24*.cpp", "linear24*.h") for path in folder.glob(kind))
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in sources) + torch.__version__.encode()).hexdigest()
    built = Path(cpp_extension._get_build_directory("sparseforge_linear24_asan", False)) / f"{digest[:16]}.so"
    if not built.exists():
        unfinished = built.with_suffix(f".{os.getpid()}")
        torch_libraries = Path(torch.__file__).parent / "lib"
        subprocess.run(
            [
                *("g++", "-std=c++20", "-shared", "-fPIC", "-O0", "-fsanitize=address", "-fopenmp", "-Wno-psabi"),
                *(option for path in cpp_extension.include_paths() for option in ("-isystem", path)),
                *(str(folder / "linear24.cpp"), "-o", str(unfinished)),
                *(f"-L{torch_libraries}", "-ltorch_cpu", "-lc10", f"-Wl,-rpath,{torch_libraries}"),
            ],
            check=True,
            timeout=PATIENCE,
        )
        unfinished.rename(built)
    return built
