"""The two factors of a learned branch: their product, and what learns where a singular value is but rounding."""

from __future__ import annotations

import pytest
import torch

from sparseforge_ds.branches.decompose import balanced_factors


@pytest.mark.parametrize("input_last", [True, False])
def test_factors_of_a_product_that_has_a_lower_rank(input_last: bool) -> None:
    left_RK = torch.linalg.qr(torch.randn(12, 4)).Q
    right_CK = (
        torch.randn(16, 4) @ torch.diag(torch.tensor([3.0, 1.0, 0.5, 0.0])) @ torch.linalg.qr(torch.randn(4, 4)).Q
    )
    b_OK, p_KI = balanced_factors(left_RK, right_CK, input_last)
    product = b_OK @ p_KI
    torch.testing.assert_close(product if input_last else product.t(), left_RK @ right_CK.t(), rtol=1e-4, atol=1e-5)
    sizes = sorted((float(b.norm()), float(p.norm())) for b, p in zip(b_OK.t(), p_KI, strict=True))
    assert sizes[0] == (0.0, pytest.approx(1, rel=1e-4)), "no step would ever move it if P were 0 as well"
    assert all(b == pytest.approx(p, rel=1e-4) for b, p in sizes[1:])
