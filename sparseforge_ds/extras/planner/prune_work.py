"""Sizes of a prune: its largest block, its text, and what is made of them."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from sparseforge_ds.config import BlockStartConfig
from sparseforge_ds.mask.pattern import Pattern
from sparseforge_ds.prune.block_by_block import micro_batches
from sparseforge_ds.start.blocks import DecoderBlock
from sparseforge_ds.start.solve import MEASURED


@dataclass(frozen=True)
class PruneWork:
    """Sizes of a prune, as far as memory and time depend on them."""

    block: DecoderBlock
    """The largest block."""
    all_blocks: tuple[DecoderBlock, ...]
    """Blocks of the model, with those that stay dense."""
    block_elements: int
    """Elements of the largest block."""
    other_elements: int
    """Elements of the embedding and of whatever else is in memory before the first block."""
    total_elements: int
    """Elements of the model."""
    hidden: int
    pattern: Pattern
    block_start: BlockStartConfig
    """Settings, with the kind of mask."""
    dtype: torch.dtype
    """Dtype that the weights are stored in."""
    sequences: int
    seq_length: int
    expert_share: float
    """Share of the routed experts that a token passes."""
    done: frozenset[int] = frozenset()
    """Numbers of the blocks that an earlier call has finished."""

    @property
    def blocks(self) -> int:
        """Number of blocks with a mask."""
        return sum(bool(block.weights) for block in self.all_blocks)

    @property
    def blocks_to_do(self) -> int:
        """Number of blocks with a mask that are not done."""
        return sum(bool(block.weights) for number, block in enumerate(self.all_blocks) if number not in self.done)

    @property
    def blocks_passed(self) -> int:
        """Number of blocks with a mask that are done, and move the streams on; 0 if all are done."""
        return 0 if len(self.done) == len(self.all_blocks) else self.blocks - self.blocks_to_do

    @property
    def tokens(self) -> int:
        """Tokens of all sequences."""
        return self.sequences * self.seq_length

    @property
    def micro_batches(self) -> tuple[int, int]:
        """Sequences of a micro-batch, and micro-batches of an optimizer step."""
        return micro_batches(self.sequences, self.seq_length, self.hidden, self.block_start)

    @property
    def steps(self) -> int:
        """Optimizer steps of a block."""
        size, per_step = self.micro_batches
        return self.block_start.epochs * math.ceil(self.sequences // size / per_step)

    @property
    def autocast(self) -> bool:
        """True if matrices are multiplied in bf16."""
        return self.dtype != torch.float32

    @property
    def streams(self) -> int:
        """Bytes of both streams of hidden states."""
        return 2 * self.tokens * self.hidden * (2 if self.autocast else 4)

    @property
    def needs_inputs(self) -> bool:
        """True if the inputs of the weights are measured."""
        return self.block_start.mask in ("sparsegpt", "wanda") or any(weight.experts for weight in self.block.weights)

    @property
    def matrices(self) -> list[tuple[int, int]]:
        """Outputs and inputs of every matrix of the largest block under a mask, as many as it has experts."""
        shapes = []
        for weight in self.block.weights:
            inputs = weight.shape[weight.input_axis]
            shapes += [(weight.numel // weight.matrices // inputs, inputs)] * weight.matrices
        return shapes

    def forward_passes(self) -> float:
        """Passes over all tokens without a backward pass: both streams, the measurement of inputs, and of errors."""
        size, _ = self.micro_batches
        count = max(1, self.sequences // size)
        return 2 + self.needs_inputs + 2 * min(MEASURED, count) / count
