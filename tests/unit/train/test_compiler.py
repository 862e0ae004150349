"""A machine without a compiler is found out before a model is loaded."""

from __future__ import annotations

import pytest
import torch
import torch._inductor.config

from sparseforge_ds.mask.kernels import fusing
from sparseforge_ds.train.compiler import require_compiler

CPU = torch.device("cpu")


def test_a_compiler_that_fails_is_told_in_one_line() -> None:
    require_compiler(CPU)  # nothing is compiled there
    torch._dynamo.reset()
    without = {"force_disable_caches": True, "cpp.cxx": ("/nowhere/g++",)}
    with (
        fusing.compiled(True),
        torch._inductor.config.patch(without),
        pytest.raises(ValueError, match="torch.compile does not work for cpu on this machine .*apt install g") as told,
    ):
        require_compiler(CPU)
    assert "\n" not in str(told.value) and "/nowhere/g++" in str(told.value)
    torch._dynamo.reset()
    with fusing.compiled(True):
        require_compiler(CPU)
