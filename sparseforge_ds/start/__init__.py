"""Block-wise start: masks of each decoder block, and weights that make up for them."""

from sparseforge_ds.start.blocks import DecoderBlock, decoder_blocks
from sparseforge_ds.start.solve import SolvedBlock, SolveOptions, solve_block

__all__ = ["DecoderBlock", "SolveOptions", "SolvedBlock", "decoder_blocks", "solve_block"]
