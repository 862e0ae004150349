"""Ranks of groups that are compared member by member are those of the sort."""

from __future__ import annotations

import pytest
import torch

from sparseforge_ds.mask import pattern
from sparseforge_ds.mask.kernels.groups import SMALL, rank_in_group, top_n


@pytest.mark.parametrize("members", [2, 3, 4, 8, 15, SMALL, SMALL + 1, 64])
def test_ranks_are_the_readable_ones(members: int) -> None:
    generator = torch.Generator().manual_seed(members)
    values = torch.randn(501, members, generator=generator)
    for group_GM in (values, (values * 2).round(), torch.zeros(3, members), values[:0]):
        expected = pattern.rank_in_group(group_GM)
        assert torch.equal(rank_in_group(group_GM).long(), expected)
        for kept in {1, members // 2, members}:
            assert torch.equal(top_n(group_GM, kept), pattern.top_n(group_GM, kept))
