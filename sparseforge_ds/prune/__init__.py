"""Pruning of a dense model in a folder to a sparse one in another, with one decoder block in memory at a time."""

from sparseforge_ds.prune.block_by_block import PruneSettings, prune

__all__ = ["PruneSettings", "prune"]
