"""Curvature estimators on shards, interchangeable behind one method: `refresh(closure, step, probes, total)`.

    hutchinson      v (H v) by a central gradient difference, two extra passes a probe: v at the outputs of layers,
                    or at the weights (`per_token` false: the paper's, eq. 2)
    fisher          squared gradients of the training loss, per token where the layer is linear
    gauss_newton    the same with labels drawn from the model (Sophia's estimator, arXiv 2305.14342)
    wanda           mean squared input of each column (arXiv 2306.11695), forward only
    magnitude       none: the score is W^2

What is estimated always refers to the published weight, the only one that the loss depends on.

Of a routed expert it is the mean over the tokens that the expert saw, on all ranks; zero where it saw none.
"""

from __future__ import annotations

from collections.abc import Callable

from sparseforge_ds.config import SparseForgeConfig
from sparseforge_ds.estimate.hutchinson import Hutchinson
from sparseforge_ds.estimate.input_norms import InputNorms
from sparseforge_ds.estimate.output_hutchinson import OutputHutchinson
from sparseforge_ds.estimate.shards import Diagonal, Estimator, Shards, Take
from sparseforge_ds.estimate.squared_gradients import SquaredGradients

__all__ = ["ESTIMATORS", "Diagonal", "Estimator", "Shards", "Take"]


def _hutchinson(shards: Shards, config: SparseForgeConfig) -> Estimator:
    return (OutputHutchinson if config.curvature.per_token else Hutchinson)(shards, config)


ESTIMATORS: dict[str, Callable[[Shards, SparseForgeConfig], Estimator] | None] = {
    "hutchinson": _hutchinson,
    "gauss_newton": SquaredGradients,
    "fisher": SquaredGradients,
    "wanda": InputNorms,
    "magnitude": None,
}
