"""Every fused function of a mask update gives a GPU's numbers as it gives a CPU's.

The small matrix comes first: a compiled graph is made by the first size that it meets, and serves all later ones.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from sparseforge_ds.mask.anneal import Dials
from sparseforge_ds.mask.importance import scalings
from sparseforge_ds.mask.kernels import fusing
from sparseforge_ds.mask.kernels.bits import keep_in_place, pack
from sparseforge_ds.mask.kernels.codes import CODE
from sparseforge_ds.mask.kernels.fused_update import mask_stats, update_mask_in_place
from sparseforge_ds.mask.kernels.publication import soft_step
from sparseforge_ds.mask.kernels.scores import RankOne, score_moments
from sparseforge_ds.mask.pattern import NM
from tests.unit.mask.kernels.interpreted import (
    LARGE,
    SMALL,
    Parts,
    Problem,
    layer_sums,
    readable_sums,
    readable_update,
    tiled_update,
)

pytestmark = pytest.mark.gpu

SHAPES = [(60, 64), (576, 576), (1088, 5120), (2048, 8192)]
DIALS = Dials(temperature=0.4, beta=0.3, mid_penalty=0.2, penalty_rate=0.2, mask_rate=0.1, x=0.7)
CODES_OFF = 1e-5
"""Share of mask codes that may differ by one: an exponential or a division may round its last bit otherwise."""


@dataclass(frozen=True)
class Update:
    """The results of one update of a matrix, as tensors on the CPU."""

    stats: Tensor
    codes: Tensor
    target: Tensor
    kept: Tensor
    sums: Tensor
    dense: Tensor
    published: Tensor
    gradient: Tensor


def update_on(device: str, rows: int, columns: int) -> Update:
    """Update a random matrix once, publish it, and mask its gradient."""
    generator = torch.Generator().manual_seed(rows)
    elements = rows * columns
    dense = torch.randn(elements, generator=generator).to(device)
    codes = torch.randint(0, 65536, (elements,), generator=generator).to(CODE).to(device)
    before = pack(torch.rand(elements, generator=generator) > 0.5).to(device)
    gradient = torch.randn(elements, generator=generator).to(device)
    share_R = torch.rand(rows, generator=generator).to(device)
    column_C = torch.rand(columns, generator=generator).to(device)
    curvature = RankOne(share_R, column_C, 0)

    stats = score_moments(dense, curvature)
    scaling = scalings(stats[None], 1e-4)[0]
    update = update_mask_in_place(dense, codes, curvature, scaling, DIALS, NM(2, 4), (rows, columns), -1)
    counted = mask_stats(codes, update.target, update.kept, before)
    assert counted.kept is not None
    published = dense * 0.9
    soft_step(dense, published, codes, counted.kept, 0.6, 0.5, published)
    keep_in_place(gradient, counted.kept)
    results = (stats, codes.int(), update.target, update.kept, torch.stack(counted.sums), dense, published, gradient)
    return Update(*(tensor.cpu() for tensor in results))


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: f"{shape[0]}x{shape[1]}")
def test_an_update_has_the_cpus_numbers(shape: tuple[int, int]) -> None:
    with fusing.compiled(False):
        cpu = update_on("cpu", *shape)
    gpu = update_on("cuda", *shape)

    torch.testing.assert_close(gpu.stats, cpu.stats, rtol=1e-11, atol=0)
    apart = (gpu.codes - cpu.codes).abs()
    assert int(apart.max()) <= 1 and float((apart > 0).double().mean()) <= CODES_OFF
    assert torch.equal(gpu.target, cpu.target)
    # A code that differs may swap two members of a near tie.
    assert int((gpu.kept != cpu.kept).sum()) <= 2 * int((apart > 0).sum())
    torch.testing.assert_close(gpu.sums, cpu.sums, rtol=1e-5, atol=0)
    torch.testing.assert_close(gpu.dense, cpu.dense, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(gpu.published, cpu.published, rtol=1e-4, atol=1e-4)
    same = gpu.kept == cpu.kept
    assert torch.equal(gpu.gradient[same], cpu.gradient[same])


@pytest.mark.parametrize("parts", [SMALL, LARGE], ids=["small", "large"])
def test_tiles_have_the_cpus_numbers(parts: Parts) -> None:
    problem = Problem(parts)
    cpu = readable_update(problem, DIALS, midpoint=True)
    gpu = tiled_update(problem, DIALS, midpoint=True, device="cuda")

    torch.testing.assert_close(gpu.moments, cpu.moments, rtol=1e-11, atol=0)
    apart = (gpu.mask.int() - cpu.mask.int()).abs()
    assert int(apart.max()) <= 1 and int((apart > 0).sum()) <= 1 + CODES_OFF * len(apart)
    assert torch.equal(gpu.target, cpu.target)
    # A code that differs may swap two members of a near tie, and so what is published of its group.
    assert int((gpu.kept != cpu.kept).sum()) <= int((apart > 0).sum())
    alike = (apart.view(-1, 4) == 0).all(dim=1).repeat_interleave(4)
    assert torch.equal(gpu.master[alike], cpu.master[alike])
    torch.testing.assert_close(gpu.sums, cpu.sums, rtol=1e-5, atol=4)


@pytest.mark.parametrize(("tokens", "outputs", "inputs"), [(64, 96, 32), (4096, 1536, 576)])
def test_sums_of_layers_have_the_cpus_numbers(tokens: int, outputs: int, inputs: int) -> None:
    generator = torch.Generator().manual_seed(tokens)
    input_TI = torch.randn(tokens, inputs, generator=generator).bfloat16()
    layers = [(torch.randn(tokens, outputs, generator=generator).bfloat16(), input_TI) for _ in range(2)]
    for gpu, expected in zip(layer_sums(layers, 0.5, "cuda"), readable_sums(layers, 0.5), strict=True):
        torch.testing.assert_close(gpu, expected, rtol=1e-4, atol=0)
