"""A block-wise start on the engine of a run, from which it takes blocks, inputs and shards.

One pass of the dense model says what its decoder blocks are called with. Then every block in turn is gathered whole on
every rank, as a plain copy in fp32, and solved on the sequences that each rank has read (`sparseforge_ds.start`).
Gradients and moments are summed over the ranks, so all ranks end with the same block. It is written back to the shards:
W and masks of the weights under a mask, and the master of whatever else was trained.

Legend of shape suffixes: B sequences of a micro-batch, S their tokens, H hidden size.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Collection
from dataclasses import replace
from functools import partial
from itertools import count

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from sparseforge_ds.config import SparseForgeConfig
from sparseforge_ds.model.families import PrunableWeight
from sparseforge_ds.model.shared_weights import refuse_shared
from sparseforge_ds.ranks import AgreedError, all_or_raise
from sparseforge_ds.sharded_weights import ShardedWeights
from sparseforge_ds.start import DecoderBlock, SolvedBlock, SolveOptions, decoder_blocks, solve_block
from sparseforge_ds.start.block_inputs import BlockInputs
from sparseforge_ds.start.blocks import run_block
from sparseforge_ds.start.first_mask import mask_for
from sparseforge_ds.zero.extra_passes import Closure, ExtraPasses, ProbeBatches, batches_of
from sparseforge_ds.zero.full_parameters import FullParameters, plain_copy

_LOG = logging.getLogger(__name__)
_LEAST_STEPS = 16
"""Optimizer steps that every block makes at least, where `start.tokens` is not given."""
_ALONE = {torch.float32: 1e-3}
"""Largest relative distance between the outputs of a block that runs alone and of the same block in its model."""
_ALONE_IN_16_BITS = 0.1


def check_blocks(model: nn.Module, weights: Collection[PrunableWeight], config: SparseForgeConfig) -> None:
    """Raise ValueError where a start cannot go block by block, without a weight being loaded."""
    block_start = config.block_start
    if block_start is None:
        return
    key = 'importance "sparsegpt"' if config.start is None else "start"
    cure = '"importance": "magnitude"' if config.start is None else '"start": null'
    refuse_shared(model, weights, "be measured", cure)
    for weight in weights if block_start.mask == "sparsegpt" else ():
        layer = model.get_submodule(weight.module)
        if not isinstance(layer, (nn.Linear, Conv1D)):
            raise ValueError(
                f"{key} needs the inputs of a linear layer for every prunable weight, which "
                f'{weight.name} ({type(layer).__name__}) has not; use "wanda", or keep it dense with "exclude": '
                f'["{weight.name}"]'
            )
    mask_for(block_start, list(weights), config.parsed_pattern)  # refuses settings that do not fit these weights
    decoder_blocks(model, list(weights))


class BlockStart:
    """Start of a run: the whole model is pruned, block by block."""

    def __init__(self, weights: ShardedWeights, extra_passes: ExtraPasses) -> None:
        """Find the blocks. Raises ValueError as `check_blocks`."""
        settings = weights.config.block_start
        assert settings is not None
        self.weights = weights
        self.extra_passes = extra_passes
        model = weights.engine.module
        check_blocks(model, weights.prunable.values(), weights.config)
        # All blocks get one kind of first mask, as `prune` gives them.
        kind = mask_for(settings, list(weights.prunable.values()), weights.pattern)
        self.settings = replace(settings, mask=kind)
        self.blocks = decoder_blocks(model, list(weights.prunable.values()))
        self.dtype: torch.dtype = weights.layout.compute_dtype
        """The dtype that the engine's forward computes in."""
        self._epochs = settings.epochs
        """Epochs of a probe that names none."""
        self._inputs: BlockInputs | None = None
        """Recorded inputs of the blocks, from `read` to `run`."""

    def require_probe(self, probe: Closure | ProbeBatches | None) -> None:
        """Raise ValueError if there is no text, or only one micro-batch to train every block on."""
        key = 'importance "sparsegpt"' if self.weights.config.start is None else "sparseforge.start"
        if probe is None:
            raise ValueError(f"{key} needs calibration batches: call forge.start(probe)")
        if callable(probe) and self.settings.epochs:
            raise ValueError(
                f"{key} would train every block on the one micro-batch of a function; give forge.start an object whose "
                "passes(n) returns the micro-batches of batch n, as functions (docs/guides/own-loop.md)"
            )

    @torch.no_grad()
    def run(self) -> None:
        """Set mask and dense weights of every prunable weight, and what is trained beside them. Collective.

        It takes what `read` has read. Where masks move afterwards, they stay 1, and what is pruned becomes 0.

        Raises:
            ValueError: on all ranks: a block cannot be run alone, or its inputs are not finite.
        """
        inputs = self._inputs
        assert inputs is not None
        self._inputs = None
        parameters = FullParameters(self.weights.layout, self.weights.state)
        # Solve block after block, on the outputs of the one before.
        start_time = time.perf_counter()
        for number, block in enumerate(self.blocks):
            solved = self._solve(number, block, inputs, parameters)
            # All ranks have the same numbers.
            if self.weights.layout.rank:
                continue
            seconds = time.perf_counter() - start_time
            blocks = len(self.blocks)
            left = seconds / (number + 1) * (blocks - number - 1)
            error = "" if math.isnan(solved.error) else f"error {solved.error:.4f} of its output, "
            _LOG.info(f"start: block {number + 1} of {blocks}, {error}{seconds:.0f} s, {left:.0f} s left")
            for warning in solved.warnings():
                _LOG.warning(f"start: {block.name}: {warning}")

    # -- what the blocks are called with ------------------------------------------------------------------------------

    @torch.no_grad()
    def read(self, probe: Closure | ProbeBatches | None) -> None:
        """Run the dense model over as many batches as the start reads, and keep what its blocks are called with.

        Collective. No weight changes.

        Raises:
            ValueError: on all ranks: `require_probe` refuses the probe, or batches do not have equally many passes.
        """
        self.require_probe(probe)
        assert probe is not None
        batches = batches_of(probe)
        layout = self.weights.layout
        modules = [layout.engine.module.get_submodule(block.name) for block in self.blocks]
        inputs = BlockInputs(modules, self.dtype)
        if self._epochs:
            self.settings = replace(self.settings, epochs=getattr(batches, "epochs", self._epochs))
        tokens = 0
        batches_to_read = 0
        with inputs.recording(layout.engine.module):
            for batch in count():
                passes = all_or_raise(partial(_passes, batches, batch, inputs), layout.all_gather_object)
                for closure in passes:
                    self.extra_passes.loss(closure)
                # Tokens and sequences of the batch on all ranks; the first batch says how many are read.
                shapes = [inputs.dense.shape(-1 - number) for number in range(len(passes))]
                sizes = [float(sum(B * S for B, S, _ in shapes)), float(sum(B for B, *_ in shapes))]
                totals = layout.all_reduce(torch.tensor(sizes, dtype=torch.float64, device=layout.device)).tolist()
                tokens += int(totals[0])
                if not batches_to_read:
                    batches_to_read = self._batches(*totals)
                    inputs.settle(batches_to_read)
                if batch + 1 >= batches_to_read:
                    break
        self._check_chain(inputs)
        inputs.pruned = inputs.dense.copy()
        if epochs := self.settings.epochs:
            _LOG.info(f"start: {tokens:,} tokens, {batches_to_read * epochs} steps of each of {len(modules)} blocks")
        self._inputs = inputs

    def _batches(self, batch_tokens: float, batch_sequences: float) -> int:
        """Return how many batches are read.

        Args:
            batch_tokens: tokens of the first batch on all ranks.
            batch_sequences: its sequences, or parts of sequences that ranks share.
        """
        settings = self.settings
        config = self.weights.config
        if config.start is None:
            return config.curvature.first_probes
        length = batch_tokens / batch_sequences * self.weights.layout.sequence_parallel
        step_tokens = self.weights.engine.train_batch_size() * length
        batches = math.ceil(settings.tokens_of(round(config.max_steps * step_tokens)) / batch_tokens)
        min_batches = 1 if settings.tokens is not None else math.ceil(_LEAST_STEPS / max(settings.epochs, 1))
        return max(batches, min_batches)

    def _check_chain(self, inputs: BlockInputs) -> None:
        """Raise AgreedError where blocks do not hand hidden states to each other as they are."""
        layout = self.weights.layout
        chains = layout.all_reduce(torch.tensor(float(inputs.is_chain), device=layout.device))
        if not (chains == layout.world_size).item():
            model = type(layout.engine.module).__name__
            raise AgreedError(
                f"{model} does not hand its hidden states from block to block as they are, each once, so that its "
                'blocks cannot be pruned one after the other; set "start": null, and use an importance other than '
                '"sparsegpt"'
            )

    # -- one block ----------------------------------------------------------------------------------------------------

    def _solve(self, number: int, block: DecoderBlock, inputs: BlockInputs, parameters: FullParameters) -> SolvedBlock:
        """Gather, solve and hand back one block. Collective."""
        weights = self.weights
        layout = weights.layout
        # A plain copy of the block with its masters, whole on every rank.
        module = layout.engine.module.get_submodule(block.name)
        names = parameters.names(module)
        flat, values = parameters.gather(names)
        own = {id(p): values[name] for name, p in zip(names, module.parameters(), strict=True)}
        copy = plain_copy(module, own)

        def call(index: int, hidden_BSH: Tensor) -> Tensor:
            with torch.autocast(layout.device.type, torch.bfloat16, enabled=self.dtype == torch.bfloat16):
                return run_block(copy, hidden_BSH, inputs.arguments[index][number])

        self._check_alone(block, call(0, inputs.dense[0].float()), inputs.ends[number])
        try:
            solved = solve_block(
                copy,
                inputs.dense,
                inputs.pruned,
                call,
                block.weights,
                weights.pattern,
                self.settings,
                SolveOptions(
                    reduce=self._reduce,
                    per_step=inputs.per_step,
                    ranks=layout.world_size,
                    seed=weights.config.seed,
                    is_trained=lambda name: parameters.is_trained(f"{block.name}.{name}"),
                ),
            )
        except ValueError as error:  # the same on all ranks: it is said of what they have summed
            raise AgreedError(f"{block.name}: {error}") from None
        # Ranks may differ in the last bits, and a group of which two hold a part must be decided once.
        masks = {f"{block.name}.{name}": kept.contiguous() for name, kept in solved.masks.items()}
        for tensor in (flat, *(kept.view(torch.uint8) for kept in masks.values())):
            layout.broadcast(tensor, 0)
        # Back to the shards: W, what was trained beside it, and the masks.
        moves = weights.config.soft is not None
        if moves:
            # Masks begin at 1 and move: what this start prunes begins at 0 instead, and can come back.
            for name, kept in masks.items():
                values[name].mul_(kept)
        parameters.write(values)
        for name, kept in masks.items() if not moves else ():
            shard = weights.shards[name]
            part = kept.reshape(-1)[shard.start : shard.stop]
            weights.state.write_mask(shard, part.float().to(weights.state_view(shard, "mask").device))
        return solved

    def _check_alone(self, block: DecoderBlock, output_BSH: Tensor, end_BH: Tensor) -> None:
        """Raise AgreedError where a block alone computes something else than in its model."""
        layout = self.weights.layout
        end_BH = end_BH.float()
        distance = (output_BSH[:, -1].float() - end_BH).norm() / end_BH.norm()
        bound = _ALONE.get(self.dtype, _ALONE_IN_16_BITS)
        # What is not finite is for `solve_block` to name.
        ranks_in_bound = layout.all_reduce((~(distance > bound)).float())
        if not (ranks_in_bound == layout.world_size).item():
            largest = max(layout.all_gather_object(float(distance)))
            raise AgreedError(
                f"{block.name} computes something else alone than in its model (relative distance "
                f'{largest:.2g} of its output), so that it cannot be pruned alone; set "start": null, and use '
                'an importance other than "sparsegpt"'
            )

    def _reduce(self, tensors: list[Tensor]) -> None:
        """Sum over the ranks, in place."""
        for tensor in tensors:
            self.weights.layout.all_reduce(tensor)


def _passes(batches: ProbeBatches, batch: int, inputs: BlockInputs) -> list[Closure]:
    """Return the passes of a batch, as many as the first one had."""
    passes = list(batches.passes(batch))
    inputs.per_step = inputs.per_step or len(passes)
    if len(passes) != inputs.per_step:
        raise ValueError(
            f"the probe gave forge.start {inputs.per_step} micro-batches at first and {len(passes)} in batch {batch}; "
            "give as many in every one"
        )
    return passes
