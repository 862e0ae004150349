"""Curvature estimators on shards. What is estimated always refers to the published weight, which the loss depends on.

A `SumsEstimator` measures row and column sums, of which the default scores are made, and forms no weight-shaped matrix:

    fisher          squared gradients per token, by layer hooks in the training step itself or in passes of their own
    hutchinson      v (H v) by a central gradient difference, v at the outputs of layers
    wanda           mean squared input of each column (arXiv 2306.11695), forward only

An `Estimator` measures elements, one fp32 number a weight, if `curvature.factored` or `per_token` is false:

    hutchinson      v at the weights (the paper's, eq. 2)
    fisher

The curvature of a routed expert is the mean over the tokens that it saw on all ranks; zero if it saw none.
"""

from __future__ import annotations

from collections.abc import Callable

from sparseforge_ds.config import SparseForgeConfig
from sparseforge_ds.curvature.context import Diagonal, Estimator, EstimatorContext, SumsEstimator
from sparseforge_ds.curvature.fisher_sums import FisherSums
from sparseforge_ds.curvature.hutchinson import Hutchinson
from sparseforge_ds.curvature.input_norms import InputNorms
from sparseforge_ds.curvature.output_hutchinson import OutputHutchinson
from sparseforge_ds.curvature.running_sums import RunningSums
from sparseforge_ds.curvature.squared_gradients import SquaredGradients

__all__ = [
    "Diagonal",
    "Estimator",
    "FisherSums",
    "RunningSums",
    "EstimatorContext",
    "SumsEstimator",
    "estimator_of",
    "sums_of",
]


def estimator_of(context: EstimatorContext, config: SparseForgeConfig) -> Estimator:
    """Build the estimator of elements that a config names.

    Raises:
        ValueError: it cannot work on some prunable weight.
    """
    kinds: dict[str, Callable[[EstimatorContext, SparseForgeConfig], Estimator]] = {
        "hutchinson": Hutchinson,
        "fisher": SquaredGradients,
    }
    return kinds[config.importance](context, config)


def sums_of(context: EstimatorContext, config: SparseForgeConfig) -> SumsEstimator:
    """Build the estimator of row and column sums that a config names.

    Raises:
        ValueError: it cannot work on some prunable weight.
    """
    kinds: dict[str, Callable[[EstimatorContext, SparseForgeConfig], SumsEstimator]] = {
        "hutchinson": OutputHutchinson,
        "fisher": FisherSums,
        "wanda": InputNorms,
    }
    return kinds[config.importance](context, config)
