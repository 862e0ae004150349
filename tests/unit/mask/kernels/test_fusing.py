"""Compiled functions: as many kernels as are counted, no graph for a size or a rate, and also inside hooks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from unittest import mock

import torch
import torch._inductor.metrics as metrics
from torch import Tensor
from torch._dynamo.utils import counters

from sparseforge_ds.config import DistillationConfig
from sparseforge_ds.mask.importance import scalings
from sparseforge_ds.mask.kernels import fusing, scores
from sparseforge_ds.mask.kernels.bits import pack
from sparseforge_ds.mask.kernels.codes import CODE
from sparseforge_ds.mask.kernels.fisher import fisher_sums, token_squares, weighted_squares
from sparseforge_ds.mask.kernels.fused_update import mask_stats, update_mask_in_place
from sparseforge_ds.mask.kernels.publication import masked_gradient, soft_publish, soft_step
from sparseforge_ds.mask.kernels.scores import RankOne, score_moments, standardized_score
from sparseforge_ds.mask.pattern import NM
from sparseforge_ds.model.token_losses import TokenLosses
from sparseforge_ds.zero.layer_hooks import uncompiled
from tests.unit.mask.problem import DIALS, problem


def test_the_compiler_makes_as_many_kernels_as_are_counted() -> None:
    """Compare `KERNELS`, by which a device's cost is counted, with what the compiler makes of every fused function."""
    dense, mask, curvature = problem((16, 24), "product", CODE, seed=3)
    assert isinstance(curvature, RankOne)
    moments = score_moments(dense, curvature)[None]
    scaling = scalings(moments, 1e-3)[0]
    bits = pack(mask.int() > 0)
    inputs = torch.randn(12, 24, dtype=torch.bfloat16)
    losses = TokenLosses(torch.arange(12), DistillationConfig(temperature=2.0), inputs.dtype)
    functions: dict[str, Callable[[], object]] = {
        "update_small_groups": lambda: update_mask_in_place(
            dense, mask, curvature, scaling, DIALS, NM(2, 4), (16, 24), -1
        ),
        "scalings": lambda: scores.scalings(moments, 1e-3),
        "sum_moments": lambda: score_moments(dense, curvature),
        "score_chunk": lambda: standardized_score(dense, curvature, scaling),
        "mask_stats": lambda: mask_stats(mask, dense > 0, dense > 0, bits),
        "soft_step": lambda: soft_step(dense, dense.clone(), mask, bits, 0.7, 0.6, torch.empty_like(dense)),
        "soft_publish": lambda: soft_publish(dense, mask, bits, 0.6, torch.empty_like(dense)),
        "keep_in_place": lambda: masked_gradient(dense.clone(), bits),
        "token_squares": lambda: token_squares(inputs),
        "fisher_sums": lambda: fisher_sums(inputs, inputs[:, :20].clone()),
        "weighted_squares": lambda: weighted_squares(inputs, torch.rand(12)),
        "token_losses": lambda: losses.add(slice(None), inputs, inputs.flip(1)),
        "logit_gradient": lambda: losses.gradient(inputs, inputs.flip(1), torch.ones(()), dtype=inputs.dtype),
    }
    assert functions.keys() == fusing.KERNELS.keys()
    torch._dynamo.reset()
    made = {}
    # A graph from the cache would generate no kernel.
    with fusing.compiled(True), torch._inductor.config.patch(force_disable_caches=True):
        for name, call in functions.items():
            metrics.reset()
            call()
            made[name] = metrics.generated_kernel_count
    assert made == fusing.KERNELS


def test_what_hooks_call_is_compiled_where_the_model_is_not() -> None:
    """While layers are heard, compiled code of the model stands back; ours ran step by step there, with whole copies of
    the inputs in fp32."""

    def steps() -> set[str]:
        with torch.profiler.profile() as profile:
            fisher_sums(torch.ones(12, 20), torch.ones(12, 8))
        return {event.key for event in profile.key_averages()} & {"aten::mul", "aten::pow", "aten::mv"}

    assert steps() == {"aten::pow", "aten::mv"}
    with fusing.compiled(True), uncompiled():
        steps()  # in which the compiler runs some of its own
        assert steps() == set()


def test_sums_of_any_size_are_of_rows_by_one_graph() -> None:
    """Sums over everything are divided among a GPU's multiprocessors by the first size; rows do for every size."""

    def sums(rows: int, columns: int) -> list[Tensor]:
        dense, mask, curvature = problem((rows, columns), "product", CODE, seed=rows)
        stats = mask_stats(mask, dense > 0, dense > 0, pack(dense > 0.25))
        grad = dense.view(rows, columns)
        inputs = dense.view(rows, columns)[:, :20].clone()
        return [score_moments(dense, curvature), *stats.sums, *fisher_sums(grad, inputs)]

    graphs = []
    for rows, columns in ((16, 24), (128, 32), (130, 68), (1024, 40)):  # less than a row, exactly one, some
        plain = sums(rows, columns)
        with fusing.compiled(True):
            torch.testing.assert_close(sums(rows, columns), plain)
        graphs.append(counters["stats"]["unique_graphs"])
    assert graphs == [graphs[0]] * 4
    with mock.patch.object(torch.compiler, "is_compiling", lambda: True):
        by_rows = [fusing.row_sums([torch.ones(count, dtype=torch.float64)]) for count in (1, 4096, 16385)]
    assert [partial.tolist()[0] for partial in by_rows] == [[1, 0], [4096, 0], [4096] * 4 + [1, 0]]


def test_no_rate_makes_a_graph_of_its_own() -> None:
    """Change a rate at every step: of floats, torch makes a graph for each value where it does not know better."""
    graphs = []
    with fusing.compiled(True), torch._dynamo.config.patch(specialize_float=True):
        for x_before, x in ((0.7, 0.65), (0.65, 0.6), (0.6, 0.6), (1.0, 0.3)):
            dense, mask, curvature = problem((24, 24), "product", CODE)
            soft_step(dense, dense.clone(), mask, pack(dense > 0), x_before, x, torch.empty_like(dense))
            dials = replace(DIALS, temperature=x, mask_rate=1 - x)
            scaling = scalings(score_moments(dense, curvature)[None], 1e-3)[0]
            update_mask_in_place(dense, mask, curvature, scaling, dials, NM(2, 4), (24, 24), -1)
            graphs.append(counters["stats"]["unique_graphs"])
    assert graphs == [graphs[0]] * 4
