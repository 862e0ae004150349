"""A fused update has the bits of `mask.update`, step by step and compiled: masks, codes, choices and packed bits."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters

from sparseforge_ds.mask import importance
from sparseforge_ds.mask.anneal import Dials
from sparseforge_ds.mask.importance import scalings
from sparseforge_ds.mask.kernels import fusing
from sparseforge_ds.mask.kernels.bits import pack, unpack
from sparseforge_ds.mask.kernels.codes import CODE, decode, stored_as, values_of
from sparseforge_ds.mask.kernels.fused_update import MaskUpdate, mask_stats, update_mask_in_place
from sparseforge_ds.mask.pattern import NM, Block, Pattern, top_n
from sparseforge_ds.mask.update import update_mask
from tests.unit.mask.problem import DIALS, PATTERNS, STORAGES, elements_of, problem

Case = tuple[Pattern, tuple[int, int], int, str, torch.dtype]


def fused_update(
    case: Case, ties: bool, dials: Dials = DIALS, midpoint: bool = True
) -> tuple[Tensor, MaskUpdate, list[Tensor]]:
    """Return the new mask, its choices, and packed bits and sums of them."""
    pattern, shape, axis, kind, dtype = case
    dense, mask, curvature = problem(shape, kind, dtype, ties)
    update = update_mask_in_place(dense, mask, curvature, scaling_of(case, ties), dials, pattern, shape, axis, midpoint)
    stats = mask_stats(mask, update.target, update.kept, pack(update.kept))
    assert stats.kept is not None
    return mask, update, [stats.target, stats.kept, torch.stack(stats.sums)]


def readable_update(
    case: Case, ties: bool, dials: Dials = DIALS, midpoint: bool = True
) -> tuple[Tensor, MaskUpdate, list[Tensor]]:
    """Return what `fused_update` does, by the readable functions alone."""
    pattern, shape, axis, kind, dtype = case
    dense, mask, curvature = problem(shape, kind, dtype, ties)
    h = elements_of(curvature, dense.numel())
    dense_GM, mask_GM = (pattern.to_groups(flat, shape, axis) for flat in (dense, values_of(mask)))
    curvature_GM = None if h is None else pattern.to_groups(h, shape, axis)
    new_GM, target_GM = update_mask(dense_GM, mask_GM, curvature_GM, scaling_of(case, ties), dials, pattern, midpoint)
    stored_GM = stored_as(new_GM, dtype)
    new_GM = values_of(stored_GM)
    kept_GM = top_n(new_GM, pattern.kept_count)
    disagrees = ((new_GM > 0.5) != kept_GM).any(dim=1)
    stored, target, kept = (pattern.from_groups(choice, shape, axis) for choice in (stored_GM, target_GM, kept_GM))
    m = values_of(stored).double()
    sums = torch.stack([(m * (1 - m)).sum(), m.sum(), (target != kept).sum().double()])
    return stored, MaskUpdate(target, kept, disagrees), [bit_by_bit(target), bit_by_bit(kept), sums]


def scaling_of(case: Case, ties: bool) -> Tensor:
    dense, _, curvature = problem(case[1], case[3], case[4], ties)
    return scalings(importance.score_moments(dense, elements_of(curvature, dense.numel()))[None], 1e-3)[0]


def bit_by_bit(choice: Tensor) -> Tensor:
    """Return (ceil(n / 8),) bytes of (n,) bool, the first element in the lowest bit."""
    padded = torch.cat([choice, choice.new_zeros(-len(choice) % 8)]).view(-1, 8)
    return (padded * 2 ** torch.arange(8)).sum(dim=1).to(torch.uint8)


def assert_same_bits(
    fast: tuple[Tensor, MaskUpdate, list[Tensor]], slow: tuple[Tensor, MaskUpdate, list[Tensor]]
) -> None:
    assert fast[0].dtype == slow[0].dtype and torch.equal(fast[0], slow[0])
    for ours, expected in zip((*fast[1], *fast[2][:2]), (*slow[1], *slow[2][:2]), strict=True):
        # Disagreement is one number a group, in the order of the groups' first members.
        assert torch.equal(ours.view(-1), expected.view(-1))
    torch.testing.assert_close(fast[2][2], slow[2][2], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("pattern", "shape", "axis", "kind"), PATTERNS)
@pytest.mark.parametrize("dtype", STORAGES)
@pytest.mark.parametrize("ties", [False, True])
def test_a_fused_update_is_the_readable_one(
    pattern: Pattern, shape: tuple[int, int], axis: int, kind: str, dtype: torch.dtype, ties: bool
) -> None:
    case = (pattern, shape, axis, kind, dtype)
    ends = replace(DIALS, beta=1.0, mask_rate=1.0)
    for dials in (DIALS, replace(DIALS, beta=0.8, mask_rate=0.6), replace(DIALS, mask_rate=0.0), ends):
        for midpoint in (True, False):
            assert_same_bits(fused_update(case, ties, dials, midpoint), readable_update(case, ties, dials, midpoint))


COMPILED: list[Case] = [
    (NM(2, 4), (33, 44), -1, "product", CODE),
    (NM(2, 4), (25, 52), -1, "product", CODE),
    (NM(2, 4), (8, 13), -2, "elements", torch.float32),
    (NM(4, 8), (7, 24), -1, "none", torch.float32),
    (NM(3, 5), (7, 25), -1, "product", CODE),
    (Block(4), (8, 12), -1, "product", CODE),
]
"""Each but the second and the last takes seconds to compile."""


def test_a_compiled_update_is_the_readable_one() -> None:
    """Odd lengths, ties, all forms of H, both ways of storing a mask; no graph for a size or a rate."""
    graphs = []
    for case in COMPILED:
        for ties, dials in ((False, DIALS), (True, replace(DIALS, temperature=0.21, beta=0.1, mask_rate=0.2))):
            with fusing.compiled(True):
                fast = fused_update(case, ties, dials)
            graphs.append(counters["stats"]["unique_graphs"])
            assert_same_bits(fast, readable_update(case, ties, dials))
    assert graphs[0] == graphs[3], "another size or rate made another graph"


def test_an_update_in_chunks_is_one_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    cases: list[Case] = [
        (NM(2, 4), (65, 1000), -1, "product", torch.float32),
        (NM(4, 8), (400, 52), -2, "product", torch.float32),
        (Block(16), (96, 160), -1, "product", torch.float32),
    ]
    for case in cases:
        for midpoint in (True, False):
            with monkeypatch.context() as patch:
                patch.setattr("sparseforge_ds.mask.kernels.chunks.ELEMENTS_PER_THREAD", 1 << 10)
                chunked = fused_update(case, True, midpoint=midpoint)
            assert_same_bits(chunked, fused_update(case, True, midpoint=midpoint))


def test_codes_are_rounded_once_at_the_end_of_an_update() -> None:
    exact = fused_update((NM(2, 4), (12, 40), -1, "product", torch.float32), False)[0]
    coded = fused_update((NM(2, 4), (12, 40), -1, "product", CODE), False)[0]
    assert coded.dtype == CODE and (decode(coded) - exact).abs().max() <= 1 / 65535
    assert (decode(coded) > 0.5).any()


def test_stats_go_without_what_nobody_asks_for() -> None:
    mask = torch.rand(203)
    target = mask > 0.4
    stats = mask_stats(mask, target, None, None)
    assert stats.kept is None and len(stats.sums) == 2
    assert torch.equal(unpack(stats.target, 203), target)
