"""Memory, disk and time of `sparseforge prune`, before it runs."""

from __future__ import annotations

import shutil
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from transformers import PreTrainedModel

from sparseforge_ds.config import BlockStartConfig, SparseForgeConfig
from sparseforge_ds.export.free_memory import free_memory
from sparseforge_ds.extras.planner.block_rates import assumed_rates, measured_rates
from sparseforge_ds.extras.planner.machine import GIB, GPUS
from sparseforge_ds.extras.planner.prune_work import PruneWork
from sparseforge_ds.mask.pattern import require_removing
from sparseforge_ds.model.architecture import share_of_experts
from sparseforge_ds.model.families import prunable_weights
from sparseforge_ds.prune.block_by_block import BYTES_A_CHANNEL
from sparseforge_ds.prune.hidden_streams import SHARE, storage_for
from sparseforge_ds.start.blocks import body_of, decoder_blocks
from sparseforge_ds.start.first_mask import mask_for
from sparseforge_ds.train.lasting_memory import Kinds

_LIBRARIES = 600 << 20
"""Bytes of Python and its libraries, or of a GPU's context, about."""


@dataclass(frozen=True)
class PrunePlan:
    """Memory, disk and time of a prune."""

    work: PruneWork
    device: str
    """Name of the device that computes."""
    memory: dict[str, Kinds]
    """Result of `prune_memory`."""
    streams_in: str
    """Place of the streams: the device, memory or disk."""
    seconds: dict[str, float]
    """Seconds of all blocks, by part of the work; nothing where no block could be measured."""
    rate: str
    """Origin of the rates."""
    available: int
    """Bytes that the device has for it."""
    block_files: int
    """Bytes of the blocks that OUT.part does not have yet."""
    free_disk: int | None = None
    """Bytes that are free on the disk of OUT; None for a machine that is not here."""

    @property
    def fits(self) -> bool:
        """True if the device has room for the largest phase, and the disk for all files."""
        return self.peak <= self.available and (self.free_disk is None or self.disk <= self.free_disk)

    @property
    def model(self) -> int:
        """Bytes of the finished model."""
        return self.work.total_elements * self.work.dtype.itemsize

    @property
    def disk(self) -> int:
        """Bytes that files will take at a time: all blocks, and first the streams, then the finished model."""
        return self.block_files + max(self.model, self.work.streams if self.streams_in == "on the disk" else 0)

    @property
    def peak(self) -> int:
        """Bytes of the largest phase."""
        return max(sum(kinds.values()) for kinds in self.memory.values())

    def lines(self) -> Iterator[tuple[str, str]]:
        """Yield readable lines."""
        work = self.work
        # What is read, and how it is trained on.
        size, per_step = work.micro_batches
        of_step = "a sequence" if size * per_step == 1 else f"{size * per_step} sequences"
        training = f", {work.steps:,} steps of {of_step} a block" if work.block_start.epochs else ""
        yield "text", f"{work.tokens:,} tokens in sequences of {work.seq_length}{training}"
        # Memory at its worst moment, then by part; what lies beside the device; the disk.
        yield "memory", f"{self.peak / GIB:.2f} GiB of {self.device}, in {self._worst}"
        for name, kinds in self.memory.items():
            parts = ", ".join(f"{kind} {size / GIB:.2f}" for kind, size in kinds.items())
            yield f"  {name}", f"{sum(kinds.values()) / GIB:.2f}: {parts}"
        yield "streams", f"{work.streams / GIB:.2f} GiB {self.streams_in}"
        blocks = self.block_files / GIB
        yield "disk", f"{self.model / GIB:.2f} GiB for OUT, and until it is complete {blocks:.2f} for OUT.part"
        # Time, where a block was measured or a GPU is known.
        if self.seconds:
            parts = ", ".join(f"{name} {seconds / 60:,.1f}" for name, seconds in self.seconds.items() if seconds)
            count = f"{work.blocks_to_do} of {work.blocks}" if work.done else f"{work.blocks}"
            parts = parts or "all of them are done"
            yield "time", f"{sum(self.seconds.values()) / 60:,.1f} minutes for {count} blocks: {parts}"
            yield "", self.rate
        # Whether that fits, and what to do where it does not.
        room = f"{self.available / GIB:.1f} GiB"
        if self.peak > self.available:
            yield "verdict", f"does not fit into {room}: {self._cure}"
        elif not self.fits:
            assert self.free_disk is not None
            disk = f"{self.disk / GIB:.2f} GiB of files do not fit onto the disk, which has {self.free_disk / GIB:.2f}"
            yield "verdict", f"{disk}: make room, or give another OUT"
        else:
            yield "verdict", f"fits into {room}"

    @property
    def _cure(self) -> str:
        """Settings that make the largest phase smaller."""
        larger = "take a device with more memory"
        block_start = self.work.block_start
        if self._worst == "training":
            soft = "--soft 0, " if block_start.soft_steps(self.work.steps) else ""
            return f"give {soft}a smaller --batch or --seq_length, or --epochs 0, or {larger}"
        has_moments = self._worst == "first mask" and block_start.mask == "sparsegpt"
        return f"{larger}{', or --mask magnitude' if has_moments else ''}"

    @property
    def _worst(self) -> str:
        return max(self.memory, key=lambda name: sum(self.memory[name].values()))


def plan_prune(
    model: PreTrainedModel,
    config: SparseForgeConfig,
    block_start: BlockStartConfig,
    dtype: torch.dtype,
    shape: tuple[int, int],
    out: Path,
    hardware: torch.device | tuple[str, float],
    done: Collection[int] = (),
) -> PrunePlan:
    """Plan a prune.

    Args:
        model: without weights.
        config: decides what is pruned, to which pattern.
        block_start: settings of the blocks' training.
        dtype: in which the weights are stored.
        shape: number of sequences, and tokens of one.
        out: folder to write; its disk may get the streams.
        hardware: device of this machine, whose rates are measured; or name of a GPU in `GPUS`, and the share of its
            peak that is reached.
        done: numbers of the blocks that an earlier call has finished.

    Raises:
        ValueError: the model or the settings cannot be used, or the streams fit nowhere.
    """
    pattern = require_removing(config.parsed_pattern)
    # The largest block stands for all of them.
    weights = prunable_weights(model, config)
    blocks = decoder_blocks(model, weights)
    sizes = {block.name: sum(p.numel() for p in model.get_submodule(block.name).parameters()) for block in blocks}
    largest = max((block for block in blocks if block.weights), key=lambda block: sizes[block.name])
    body = f"{body_of(blocks)}.".removeprefix(".")
    of_body = sum(p.numel() for name, p in model.named_parameters() if name.startswith(body))
    work = PruneWork(
        block=largest,
        all_blocks=tuple(blocks),
        block_elements=sizes[largest.name],
        other_elements=of_body - sum(sizes.values()),
        total_elements=sum(p.numel() for p in model.parameters()),
        hidden=int(model.config.get_text_config().hidden_size),
        pattern=pattern,
        block_start=replace(block_start, mask=mask_for(block_start, weights, pattern)),
        dtype=dtype,
        sequences=shape[0],
        seq_length=shape[1],
        expert_share=share_of_experts(model),
        done=frozenset(done),
    )
    # Blocks that an earlier call has finished are on the disk already.
    block_files = dtype.itemsize * sum(sizes[block.name] for number, block in enumerate(blocks) if number not in done)
    # A GPU that is not here has its data sheet.
    if not isinstance(hardware, torch.device):
        name, mfu = hardware
        gpu = GPUS[name]
        available = int(gpu.memory * GIB)
        storage = "on the GPU" if work.streams <= SHARE * available else "in memory or on the disk"
        memory = prune_memory(work, own_streams=storage == "on the GPU")
        seconds = assumed_rates(work, gpu, mfu).seconds(work, copied=storage != "on the GPU")
        rate = f"at {mfu:.0%} of its peaks (assumed)"
        return PrunePlan(work, f"one {name}", memory, storage, seconds, rate, available, block_files)
    parent = next(path for path in out.absolute().parents if path.exists())
    storage = storage_for(work.streams, hardware, parent, block_files)
    is_gpu = hardware.type == "cuda"
    available = torch.cuda.mem_get_info(hardware)[0] if is_gpu else free_memory()
    memory = prune_memory(work, own_streams=storage == ("on the GPU" if is_gpu else "in memory"))
    # A block is measured only where there is room for it.
    seconds = {}
    if max(sum(kinds.values()) for kinds in memory.values()) <= available:
        seconds = measured_rates(model.config, work, hardware).seconds(work, copied=is_gpu and storage != "on the GPU")
    threads = "" if is_gpu else f" with {torch.get_num_threads()} threads"
    rate = f"by one block that was measured on this {hardware.type}{threads}"
    free_disk = shutil.disk_usage(parent).free
    device = str(hardware) if is_gpu else "RAM"
    return PrunePlan(work, device, memory, storage, seconds, rate, available, block_files, free_disk)


def prune_memory(work: PruneWork, own_streams: bool) -> dict[str, Kinds]:
    """Return the bytes of a prune by phase and kind, on the device that computes.

    Args:
        work: sizes of the prune.
        own_streams: True if the streams are in the memory of that device.
    """
    masked = sum(weight.numel for weight in work.block.weights)
    largest = max(weight.numel for weight in work.block.weights)
    widest = max(inputs for _, inputs in work.matrices)
    size, _ = work.micro_batches
    always = {"libraries (assumed)": _LIBRARIES, "streams": work.streams if own_streams else 0}
    activations = BYTES_A_CHANNEL * size * work.seq_length * work.hidden
    block: Kinds = {**always, "block": 4 * work.block_elements}
    # Values as they are stored, in fp32, and which of them are finite.
    phases: dict[str, Kinds] = {"embedding": {**always, "embedding": (work.dtype.itemsize + 5) * work.other_elements}}
    if work.block_start.mask == "sparsegpt":
        # X^T X of every matrix, which is more than there is where layers share an input; H^-1 of the widest in fp64 and
        # fp32; copies of W and masks.
        phases["first mask"] = {
            **block,
            "second moments": 4 * sum(inputs**2 for _, inputs in work.matrices),
            "a factor": 12 * widest**2,
            "weights and masks": 9 * largest + masked,
        }
    else:
        phases["first mask"] = {**block, "scores": 13 * largest + masked, "activations": activations}
    if work.block_start.epochs:
        soft = 13 * masked + 8 * largest if work.block_start.soft_steps(work.steps) else 2 * masked
        phases["training"] = {
            **block,
            "gradients": 4 * masked + (6 if work.autocast else 4) * largest,  # one is on its way
            "Adam's moments": 8 * masked,
            "masks": soft,
            "16-bit copies": 2 * masked if work.autocast else 0,
            "activations": activations,
        }
    return {name: {kind: bytes_ for kind, bytes_ in kinds.items() if bytes_} for name, kinds in phases.items()}
