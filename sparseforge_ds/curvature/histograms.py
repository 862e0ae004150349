"""Histograms of masks and curvatures, for TensorBoard."""

from __future__ import annotations

import torch
from torch import Tensor

from sparseforge_ds.curvature.running_curvature import RunningCurvature

CURVATURE_DECADES = (-20.0, 5.0)
"""Range of the curvature histograms, in log10 of |H|."""


def histograms(running: RunningCurvature, bins: int) -> dict[str, tuple[list[int], list[float]]]:
    """Return counts and bin edges of every mask, and of log10 |H| of every curvature. Collective."""
    weights = running.weights
    table = torch.zeros(len(weights.shards), 2 * bins, dtype=torch.float64, device=weights.layout.device)
    row_of = {name: row for row, name in enumerate(weights.shards)}
    for chunk, curvature in running.chunks():
        corrected = None if curvature is None else curvature / running.correction(chunk.name)
        counts_of_chunk = histogram_counts(weights.state.mask(chunk), corrected, bins)
        table[row_of[chunk.name]] += counts_of_chunk.to(table.device)
    counts = weights.layout.sum_shards(table).long().tolist()
    low, high = CURVATURE_DECADES
    mask_edges = [i / bins for i in range(bins + 1)]
    curvature_edges = [low + (high - low) * i / bins for i in range(bins + 1)]
    result = {}
    for name, row_counts in zip(weights.shards, counts, strict=True):
        result[f"mask/{name}"] = (row_counts[:bins], mask_edges)
        if running.is_needed:
            result[f"curvature_log10/{name}"] = (row_counts[bins:], curvature_edges)
    return result


def histogram_counts(mask: Tensor, curvature: Tensor | None, bins: int) -> Tensor:
    """Count one shard's mask over [0, 1], and log10 |H| over CURVATURE_DECADES: (2 * bins,) fp64."""
    counts = torch.zeros(2 * bins, dtype=torch.float64, device=mask.device)
    counts[:bins] = torch.histc(mask, bins, 0.0, 1.0)
    if curvature is not None:
        low, high = CURVATURE_DECADES
        decades = curvature.abs().clamp(min=10.0**low).log10().clamp(low, high)
        counts[bins:] = torch.histc(decades, bins, low, high)
    return counts
