"""Start that is trained block by block: a mask for each decoder block, and kept weights that make up for it."""

from sparseforge_ds.start.blocks import DecoderBlock, decoder_blocks
from sparseforge_ds.start.solve import SolvedBlock, SolveOptions, solve_block

__all__ = ["DecoderBlock", "SolveOptions", "SolvedBlock", "decoder_blocks", "solve_block"]
