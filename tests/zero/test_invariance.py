"""The same run gives the same masks on 1, 2, 3 and 4 ranks and at every ZeRO stage, whatever measures importance."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.distributed import run_distributed
from tests.zero.case import Case, run_all

# k_proj stays dense, so that ranks of every ZeRO stage cut groups. Where beta is 1, a flipped target moves a mask by
# mask_rate: equal masks are equal targets.
EXCLUDE = {"exclude": ["*.k_proj.weight"], "method": {"blend": [0.0, 0.2], "hardening": [0.6, 0.9]}}
IMPORTANCES: dict[str, dict[str, Any]] = {
    "fisher": {},
    "wanda": {},
    "magnitude": {},
    # As in test_parity: a large radius, so that fp32 rounding does not decide about weights of no curvature.
    "hutchinson": {"curvature": {"damping": 0.05}},
    "hutchinson of weights": {"curvature": {"per_token": False, "radius": 0.1, "damping": 0.05}},
}


def cases(stage: int) -> list[Case]:
    return [
        Case(stage=stage, config={"importance": i.split()[0], **EXCLUDE, **more}, steps=6)
        for i, more in IMPORTANCES.items()
    ]


@pytest.fixture(scope="module")
def alone() -> list[dict[str, Any]]:
    return run_distributed(run_all, 1, cases(0))[0]


@pytest.mark.parametrize(("world_size", "stages"), [(1, [3]), (2, [0, 2, 3]), (3, [1, 3]), (4, [3])], ids=str)
def test_masks_do_not_depend_on_ranks_or_stage(alone: list[dict[str, Any]], world_size: int, stages: list[int]) -> None:
    results = run_distributed(run_all, world_size, [case for stage in stages for case in cases(stage)])[0]
    records = iter(results)
    for stage in stages:
        for importance, expected in zip(IMPORTANCES, alone, strict=True):
            record = next(records)
            where = f"{importance}, stage {stage}, world {world_size}"
            assert len(record["updates"]) == len(expected["updates"]) == 3
            for actual, reference in zip(record["updates"], expected["updates"], strict=True):
                for name, mask in actual["mask"].items():
                    apart = (mask - reference["mask"][name]).abs().max().item()
                    assert apart < 1e-5, (where, actual["step"], name, apart)
            for key in ("mask/undecided", "mask/kept", "mask/flip_rate", "curvature/mean", "curvature/signal"):
                if key in expected["metrics"][-1]:
                    assert record["metrics"][-1][key] == pytest.approx(expected["metrics"][-1][key], rel=1e-4), where
            assert record["metrics"][0].keys() == expected["metrics"][0].keys()
    if world_size == 3:
        assert all(record["cut"] for record in results)


def test_another_run_has_other_masks() -> None:
    """Guards the test above."""
    first, other = run_distributed(run_all, 1, [cases(0)[0], Case(steps=6, config=EXCLUDE, lr=1e-1)])[0]
    masks, other_values = first["updates"][-1]["mask"], other["updates"][-1]["mask"]
    apart = [(mask - other_values[name]).abs().max() for name, mask in masks.items()]
    assert torch.stack(apart).min() > 0.1
