"""Memory that probes at outputs take, of which the planner knows."""

from __future__ import annotations

import pytest
import torch

from sparseforge_ds.curvature.output_hutchinson import squares_in_fp32
from sparseforge_ds.model.peak_memory import measured


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_squares_are_the_only_copy_in_fp32(dtype: torch.dtype) -> None:
    values = torch.linspace(-2, 3, 96, dtype=torch.float64).to(dtype).view(8, 12)
    arguments = values.clone()
    assert torch.equal(squares_in_fp32(values), arguments.float().square())
    assert torch.equal(values, arguments)
    on_meta = values.to("meta")
    assert measured(lambda: squares_in_fp32(on_meta)) == 4 * values.numel()
