"""Work in runs gives the bits of work at once."""

from __future__ import annotations

import pytest
import torch

from sparseforge_ds.mask.importance import scalings
from sparseforge_ds.mask.kernels.chunks import ALIGNMENT, CHUNK, ELEMENTS_PER_THREAD, chunks
from sparseforge_ds.mask.kernels.scores import score_moments, standardized_score


@pytest.mark.parametrize("shape", [(0,), (1,), (200_003,), (50_001, 4), (70_000, 3), (40, 100_000)])
def test_runs_cover_everything_once(shape: tuple[int, ...]) -> None:
    tensor = torch.arange(shape[0])[:, None].expand(shape) if len(shape) > 1 else torch.arange(shape[0])
    result = [tensor[chunk] for chunk in chunks(tensor)]
    assert torch.equal(torch.cat(result) if result else tensor, tensor)
    assert all(len(chunk) % ALIGNMENT == 0 for chunk in result[:-1])


def test_an_accelerator_gets_long_runs() -> None:
    assert list(chunks(torch.empty(CHUNK, device="meta"))) == [slice(0, CHUNK)]
    assert list(chunks(torch.empty(CHUNK // 2, 4, device="meta"))) == [
        slice(0, CHUNK // 4),
        slice(CHUNK // 4, CHUNK // 2),
    ]
    assert list(chunks(torch.empty(3 * CHUNK, device="meta"), in_place=True)) == [slice(0, 3 * CHUNK)]


@pytest.mark.parametrize("members", [3, 4])
def test_scores_do_not_depend_on_runs(members: int, monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(0)
    elements = 3 * members * ELEMENTS_PER_THREAD * torch.get_num_threads() + members
    dense = torch.randn(elements, generator=generator)
    curvature = torch.rand(elements, generator=generator)
    moments = score_moments(dense, curvature)
    scaling = scalings(moments[None], 1e-4)[0]
    score = standardized_score(dense, curvature, scaling)
    monkeypatch.setattr("sparseforge_ds.mask.kernels.chunks.ELEMENTS_PER_THREAD", 1 << 40)
    torch.testing.assert_close(score_moments(dense, curvature), moments, rtol=1e-13, atol=0)
    assert torch.equal(standardized_score(dense, curvature, scaling), score)
