"""Pruning of a dense folder to a sparse one, block after block; each block is saved when it is done.

Two streams of hidden states go along: that of the dense model, and that of the model as it is pruned so far. They are
not saved: a run that was stopped computes them again, by forward passes of the blocks that are done, and goes on.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm

from sparseforge_ds.config import BlockStartConfig, SparseForgeConfig
from sparseforge_ds.export.formats import export
from sparseforge_ds.export.writer import require_free
from sparseforge_ds.mask.pattern import require_removing
from sparseforge_ds.model.any_family import any_family
from sparseforge_ds.model.families import PrunableWeight, coverage, prunable_weights
from sparseforge_ds.model.hub_access import public_name
from sparseforge_ds.prune.block_files import BlockFiles, finished_before
from sparseforge_ds.prune.dense_model import DenseModel
from sparseforge_ds.prune.hidden_streams import HiddenStream, make_streams
from sparseforge_ds.prune.pruned_source import PrunedSource
from sparseforge_ds.start.blocks import DecoderBlock, are_equal, body_of, capture_inputs, decoder_blocks, run_block
from sparseforge_ds.start.first_mask import mask_for
from sparseforge_ds.start.solve import SolvedBlock, SolveOptions, passes_of, solve_block

_ACTIVATION_BYTES = 4 << 30
"""Bytes that the activations of a micro-batch may take, about."""
BYTES_A_CHANNEL = 128
"""Bytes of a block's activations for each token and hidden channel, about."""


@dataclass(frozen=True)
class PruneSettings:
    """Settings that decide the result, beside the model and the text."""

    config: SparseForgeConfig
    """Config of which pattern, include, exclude, allow_dense and seed are used."""
    block_start: BlockStartConfig
    any_family: bool = False
    """True to prune a family without rows along the axes that its layers tell (`model.any_family`)."""
    text: str | None = None
    """Name of the text, for the model card; it decides nothing."""


@dataclass(frozen=True)
class Pruned:
    """Result of a call of `prune`."""

    blocks: tuple[SolvedBlock, ...]
    """Blocks that this call pruned, without their masks."""
    tokens: int
    """Tokens of the sequences that fill a micro-batch, which are those that it read."""
    seconds: float
    """Time of this call."""
    record: dict[str, Any]
    """Content of `sparsity.json`."""


def open_dense(
    folder: str | Path, settings: PruneSettings
) -> tuple[DenseModel, SparseForgeConfig, list[PrunableWeight], BlockStartConfig]:
    """Open a model without its weights, and check that it can be pruned by these settings.

    Returns:
        The model, its block, its prunable weights, and the start with its kind of first masks.

    Raises:
        ValueError: the model or the settings cannot be used.
    """
    pattern = require_removing(settings.config.parsed_pattern)
    dense = DenseModel(folder)
    config = any_family(dense.module, settings.config) if settings.any_family else settings.config
    weights = prunable_weights(dense.module, config)
    kind = mask_for(settings.block_start, weights, pattern)
    return dense, config, weights, replace(settings.block_start, mask=kind)


def prune(
    folder: str | Path,
    out: str | Path,
    sequences_NS: Tensor,
    settings: PruneSettings,
    device: torch.device | str = "cpu",
    max_shard_size: str = "5GB",
    workers: int | None = None,
) -> Pruned:
    """Prune the model in `folder`, and write `out` when it is complete and verified.

    Until then all results are in a folder with the name of `out` and `.part`, from which a further call with the same
    arguments goes on.

    Args:
        folder: a dense Hugging Face model with safetensors.
        out: folder to write; must not exist or be empty.
        sequences_NS: token ids.
        settings: decide the result.
        device: that computes.
        max_shard_size: most bytes of a file, such as "5GB".
        workers: threads that write.

    Raises:
        ValueError: the model, the settings or `out` cannot be used, or another run has begun `out`.
    """
    began = time.monotonic()
    require_free(out)
    device = torch.device(device)
    dense, config, weights, block_start = open_dense(folder, settings)
    blocks = decoder_blocks(dense.module, weights)
    dtype = dense.dtype(weight.name for weight in weights)
    # Blocks are pruned, or were by an earlier call.
    progress = BlockFiles(folder_of_blocks(Path(out)), _identity(dense, sequences_NS, settings, device))
    with progress.kept_on_error(len(blocks)):
        solved = []
        progress.require_room(
            _bytes_to_save(dense, blocks, progress.done),
            sum(spec.nbytes for spec in dense.specs.values()),
        )
        dense.require_finite()
        if len(progress.done) < len(blocks):
            solved = _Run(dense, blocks, sequences_NS, block_start, config, device, dtype, progress).prune_blocks()
    # The export has the pruned blocks, and the rest as it is in the dense files.
    sequences, length = sequences_NS.shape
    size, _ = micro_batches(sequences, length, dense.hidden, block_start)
    tokens = sequences // size * size * length
    source = {"dense": public_name(str(folder)), "start": asdict(block_start), "tokens": tokens}
    record = {
        "finished": True,
        "step": None,
        "source": source | {"errors": progress.errors()},
        "coverage": asdict(coverage(dense.module, weights)),
        "config": config.to_dict(),
        "run": {
            "model": public_name(str(folder)),
            "dataset": [public_name(settings.text)] if settings.text else [],
            "seq_length": length,
            "tokens": tokens,
        },
    }
    results = PrunedSource(dense, progress.results(), weights, config.parsed_pattern, dtype, record)
    with progress.kept_on_error(len(blocks)):
        written = export(results, out, max_shard_size=max_shard_size, workers=workers, skip_proof=True)
    progress.remove()
    return Pruned(tuple(solved), tokens, time.monotonic() - began, written)


def finished_blocks(
    folder: str | Path, out: Path, sequences_NS: Tensor, settings: PruneSettings, device: torch.device
) -> set[int]:
    """Return the numbers of the blocks from which `prune` with the same arguments would go on. Nothing is written.

    Raises:
        ValueError: an earlier call has begun `out` with other arguments, or `prune` would not go on from there.
    """
    return finished_before(folder_of_blocks(out), lambda: _identity(DenseModel(folder), sequences_NS, settings, device))


def micro_batches(sequences: int, length: int, hidden: int, block_start: BlockStartConfig) -> tuple[int, int]:
    """Return the sequences of a micro-batch, and the micro-batches of an optimizer step.

    Args:
        sequences: number of all sequences.
        length: tokens of a sequence.
        hidden: channels of a hidden state.
        block_start: its `batch` and `epochs` are used.
    """
    batch = min(block_start.sequences_of_step(sequences * length, length), sequences)
    largest = max(1, _ACTIVATION_BYTES // (BYTES_A_CHANNEL * hidden * length))
    sizes = [size for size in range(1, min(batch, largest) + 1) if batch % size == 0]
    # Sequences that fill no micro-batch are not read: take the largest size that leaves out 1% at most.
    size = max(size for size in sizes if sequences % size <= sequences // 100)
    return size, batch // size


def folder_of_blocks(out: Path) -> Path:
    """Return the folder that has the finished blocks until `out` is complete."""
    return out.absolute().with_name(f"{out.name}.part")


def _bytes_to_save(dense: DenseModel, blocks: Sequence[DecoderBlock], done: Collection[int]) -> int:
    """Return the bytes of the files of the blocks whose numbers are not in `done`."""
    return sum(dense.nbytes(f"{block.name}.") for number, block in enumerate(blocks) if number not in done)


class _Run:
    """Pruning of all blocks, with the streams between them."""

    def __init__(
        self,
        dense: DenseModel,
        blocks: Sequence[DecoderBlock],
        sequences_NS: Tensor,
        block_start: BlockStartConfig,
        config: SparseForgeConfig,
        device: torch.device,
        dtype: torch.dtype,
        progress: BlockFiles,
    ) -> None:
        """Make room for the streams.

        Args:
            dense: the model, without weights in memory.
            blocks: all of its blocks.
            sequences_NS: token ids.
            block_start: settings, with the kind of mask.
            config: its pattern and seed are used.
            device: that computes.
            dtype: of the model.
            progress: knows the blocks that are done.
        """
        self.dense = dense
        self.blocks = blocks
        self.block_start = block_start
        self.config = config
        self.device = device
        self.progress = progress
        # Sequences that fill no micro-batch are left out.
        sequences, length = sequences_NS.shape
        size, self.per_step = micro_batches(sequences, length, dense.hidden, block_start)
        count = len(sequences_NS) // size
        self.batches_NBS = sequences_NS[: count * size].view(count, size, -1)
        self.half = dtype != torch.float32
        stream_dtype = torch.bfloat16 if self.half else torch.float32
        shape = (*self.batches_NBS.shape, dense.hidden)
        room_for_blocks = _bytes_to_save(dense, blocks, progress.done)
        self.streams = make_streams(shape, stream_dtype, device, progress.folder, room_for_blocks)

    def prune_blocks(self) -> list[SolvedBlock]:
        """Go through all blocks: those that are done move the streams, the others are solved and saved."""
        arguments = self._embed()
        dense_stream, pruned_stream, storage = self.streams
        count = len(dense_stream)
        tqdm.write(f"{self.batches_NBS.numel():,} tokens, hidden states of {storage}")
        passes = [
            2 if number in self.progress.done or not block.weights else passes_of(self.block_start)
            for number, block in enumerate(self.blocks)
        ]
        solved = []
        with tqdm(total=sum(passes) * count, unit=" passes", disable=None) as bar:
            for number, block in enumerate(self.blocks):
                bar.set_description(f"block {number + 1} of {len(self.blocks)}")
                prefix = f"{block.name}."
                self.dense.load(prefix, self.device)
                module = self.dense.module.get_submodule(block.name)

                def call(batch: int, hidden_BSH: Tensor, module: nn.Module = module, number: int = number) -> Tensor:
                    with torch.autocast(self.device.type, torch.bfloat16, enabled=self.half):
                        return run_block(module, hidden_BSH, arguments[number])

                # The weights of a block that is done are in its file.
                if number in self.progress.done:
                    _advance(dense_stream, call, bar)
                    self.dense.load(prefix, self.device, read=self.progress.reader(number, self.dense))
                    _advance(pruned_stream, call, bar)
                else:
                    try:
                        result = solve_block(
                            module,
                            dense_stream,
                            pruned_stream,
                            call,
                            block.weights,
                            self.config.parsed_pattern,
                            self.block_start,
                            SolveOptions(
                                per_step=self.per_step,
                                seed=self.config.seed + number,
                                stored=self.dense.stored_dtypes(prefix),
                                progress=bar.update,
                            ),
                        )
                    except ValueError as error:
                        raise ValueError(f"{block.name}: {error}") from None
                    self.progress.save(number, self.dense.stored(prefix), result)
                    tqdm.write(_summary(block.name, result))
                    solved.append(replace(result, masks={}))  # masks take a byte a weight, and the file has them
                self.dense.unload(prefix)
        return solved

    def _embed(self) -> Sequence[Mapping[str, Any]]:
        """Fill both streams with the embedded tokens, and return the arguments of each block."""
        body = f"{body_of(self.blocks)}.".removeprefix(".")
        layers = self.blocks[0].name.rpartition(".")[0]
        self.dense.load(body, self.device, but=f"{layers}.")
        batches = [{"input_ids": batch_BS.to(self.device)} for batch_BS in self.batches_NBS]
        arguments: Sequence[Mapping[str, Any]] = ()
        for number, inputs in enumerate(capture_inputs(self.dense.module, self.blocks, batches)):
            for stream in self.streams[:2]:
                stream[number] = inputs.hidden_BSH
            # All sequences have one length: arguments that differ are made of the tokens.
            arguments = arguments or inputs.arguments
            if not all(map(are_equal, inputs.arguments, arguments)):
                raise ValueError(
                    f"{self.dense.folder}: its blocks are called with arguments that depend on the tokens, which a "
                    "block alone does not get; use a run with a start"
                )
        self.dense.unload(body)
        return arguments


@torch.no_grad()
def _advance(stream: HiddenStream, call: Any, bar: Any) -> None:
    """Replace every input of a block by its output."""
    for number in range(len(stream)):
        stream[number] = call(number, stream[number].float())
        bar.update(1)


def _summary(name: str, result: SolvedBlock) -> str:
    """Return the line on the screen about a block, and one for each warning."""
    if not result.masks:
        return f"{name}: stays dense"
    before = "" if math.isnan(result.error_before) else f"{result.error_before:.4f} with the first masks, "
    summary = f"{name}: error {before}{result.error:.4f} at the end"
    return "\n".join([summary, *(f"{name}: warning: {warning}" for warning in result.warnings())])


def _identity(dense: DenseModel, sequences_NS: Tensor, settings: PruneSettings, device: torch.device) -> dict[str, Any]:
    """Return the settings that decide the result, as plain JSON types."""
    text = hashlib.sha256(sequences_NS.contiguous().numpy().tobytes()).hexdigest()
    return {
        "model": dense.identity(),
        "tokens": list(sequences_NS.shape),
        "text": text,
        "start": asdict(settings.block_start),
        "config": settings.config.to_dict(),
        "any_family": settings.any_family,
        "device": device.type,
    }
