"""Moments and scores of many elements are those of `mask.importance`, for every way to keep a curvature."""

from __future__ import annotations

import pytest
import torch

from sparseforge_ds.mask import importance
from sparseforge_ds.mask.kernels import fusing
from sparseforge_ds.mask.kernels.scores import RankOne, curvature_slice, score_moments, standardized_score
from tests.unit.mask.problem import elements_of, problem

SHAPES = [(33, 44), (7, 5), (130, 68)]


@pytest.mark.parametrize(
    ("kind", "compiled"), [("none", False), ("elements", False), ("product", False), ("product", True)]
)
def test_moments_and_scores_are_the_readable_ones(kind: str, compiled: bool) -> None:
    """Scores bit for bit; moments too but for the order of a sum."""
    for shape in SHAPES[: 2 if compiled else 3]:
        dense, _, curvature = problem(shape, kind)
        h = elements_of(curvature, dense.numel())
        expected = importance.score_moments(dense, h)
        scaling = importance.scalings(expected[None], 1e-3)[0]
        with fusing.compiled(compiled):
            moments = score_moments(dense, curvature)
            score = standardized_score(dense, curvature, scaling)
        torch.testing.assert_close(moments, expected, rtol=1e-13, atol=0)
        assert compiled or torch.equal(moments, expected)
        assert torch.equal(score, importance.standardized_score(dense, h, scaling))


def test_a_slice_of_a_product_begins_where_it_begins() -> None:
    _, _, curvature = problem((7, 5), "product")
    assert isinstance(curvature, RankOne)
    numbers, first = curvature_slice(curvature, slice(8, 21))
    assert numbers[0] is curvature.share_R and numbers[1] is curvature.column_C and first == 8
