"""SR-STE: straight-through training of the N largest, with a pull on the others (arXiv 2102.04010, eq. 9)."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from sparseforge_ds.methods.refreshed import RefreshedMask


class SrSte(RefreshedMask):
    """The gradient of W is g(m W) + lambda (1 - m) W, moments and all."""

    def before_step(self, index: int, gradient: Tensor, group: dict[str, Any]) -> Tensor | None:
        """See `Rule`."""
        dense, pruned = self.pruned(index)
        return gradient.addcmul_(dense.view_as(gradient), pruned.view_as(gradient), value=self.decay)
