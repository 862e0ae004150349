"""Sums of squared gradients in chunks and by expert are those of `mask.curvature` on the rows that belong together."""

from __future__ import annotations

import pytest
import torch

from sparseforge_ds.mask import curvature
from sparseforge_ds.mask.kernels import fisher
from sparseforge_ds.mask.kernels.fisher import add_fisher_sums, expert_fisher, expert_fisher_sums, fisher_sums

TOKENS, OUTPUTS, INPUTS = 29, 6, 10
STOP_E = torch.tensor([4, 4, 17, 29])


def rows() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(TOKENS, OUTPUTS, generator=generator), torch.randn(TOKENS, INPUTS, generator=generator)


def test_sums_are_those_of_the_matrix_and_of_the_readable_function() -> None:
    grad, inputs = rows()
    row, column = curvature.fisher_sums(grad, inputs)
    matrix = curvature.token_fisher(grad, inputs)
    torch.testing.assert_close(row, matrix.sum(1))
    torch.testing.assert_close(column, matrix.sum(0))
    ours = fisher_sums(grad, inputs)
    assert torch.equal(ours[0], row) and torch.equal(ours[1], column)


@pytest.mark.parametrize("rows_at_a_time", [1, 7, 1000])
def test_chunks_and_experts_have_the_sums_of_their_rows(rows_at_a_time: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fisher, "TOKEN_BYTES", 4 * (OUTPUTS + INPUTS) * rows_at_a_time)
    monkeypatch.setattr(fisher, "EXPERT_BYTES", 4 * OUTPUTS * INPUTS * (1 + rows_at_a_time % 2))
    grad, inputs = rows()
    row = torch.ones(OUTPUTS, dtype=torch.float64)
    column = torch.ones(INPUTS, dtype=torch.float64)
    add_fisher_sums(grad, inputs, 2.0, row, column)
    expected = curvature.fisher_sums(grad, inputs)
    torch.testing.assert_close(row.float(), 1 + 2 * expected[0])
    torch.testing.assert_close(column.float(), 1 + 2 * expected[1])

    row_EHO, column_EHI = expert_fisher_sums(grad, inputs, STOP_E, stacked=2)
    matrices = {first + i: full for first, part in expert_fisher(grad, inputs, STOP_E) for i, full in enumerate(part)}
    for expert, (start, stop) in enumerate(zip([0, *STOP_E[:-1]], STOP_E, strict=True)):
        torch.testing.assert_close(matrices[expert], curvature.token_fisher(grad[start:stop], inputs[start:stop]))
        for half in range(2):
            part = grad[start:stop, half * OUTPUTS // 2 : (half + 1) * OUTPUTS // 2]
            sums = curvature.fisher_sums(part, inputs[start:stop])
            torch.testing.assert_close(row_EHO[expert, half], sums[0])
            torch.testing.assert_close(column_EHI[expert, half], sums[1])
