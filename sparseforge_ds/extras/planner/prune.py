"""Memory, disk and time of `sparseforge prune`, before it runs: by a block that is measured, or by a data sheet."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from accelerate import init_empty_weights
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from sparseforge_ds.config import SparseForgeConfig, StartConfig
from sparseforge_ds.export.free_memory import free_memory
from sparseforge_ds.extras.planner.machine import GIB, GPUS, Gpu
from sparseforge_ds.mask.pattern import NM, Pattern
from sparseforge_ds.mask.reconstruct import reconstruct
from sparseforge_ds.model.architecture import share_of_experts
from sparseforge_ds.model.families import prunable_weights
from sparseforge_ds.model.registration import build_model
from sparseforge_ds.prune.block_by_block import BYTES_A_CHANNEL, micro_batches
from sparseforge_ds.prune.hidden_streams import SHARE, storage_for
from sparseforge_ds.start.blocks import DecoderBlock, body_of, capture_inputs, decoder_blocks, run_block
from sparseforge_ds.start.first_mask import InputMoments, choose_by_score, mask_for
from sparseforge_ds.start.solve import MEASURED, no_reduce
from sparseforge_ds.train.lasting_memory import Kinds
from sparseforge_ds.transformers_internals import no_init_weights

_LIBRARIES = 600 << 20
"""Bytes of Python and its libraries, or of a GPU's context, about."""
_UPDATES = 15
"""Mask updates of a block that is annealed, about."""
_LAUNCHES = 60e-6
"""Seconds that a GPU's small kernels take for each column that SparseGPT decides, about."""
_STEP_BYTES = 40
"""Bytes of a weight that an Adam step reads and writes: gradient, W, both moments, and the zeros of new gradients."""
_COPIED = 8e9
"""Bytes a second between a GPU and memory of the host that is not pinned, about."""
_COLUMNS = 512
"""Columns on which SparseGPT's loop is measured."""
_FACTOR = 2048
"""Columns on which SparseGPT's factorization is measured."""
_REPEATS = 5
"""Most measurements of the same work."""
_ENOUGH = 0.5
"""Seconds of the same work after which it is not measured again."""
_VOCABULARY = 512
"""Most entries of the vocabulary of the block that is measured."""


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

    @property
    def fits(self) -> bool:
        """True if the device has room for the largest phase."""
        return self.peak <= self.available

    @property
    def peak(self) -> int:
        """Bytes of the largest phase."""
        return max(sum(kinds.values()) for kinds in self.memory.values())

    def lines(self) -> Iterator[tuple[str, str]]:
        """Yield readable lines."""
        work = self.work
        size, per_step = work.micro_batches
        training = f", {work.steps:,} steps of {size * per_step} sequences a block" if work.start.epochs else ""
        yield "text", f"{work.tokens:,} tokens in sequences of {work.seq_length}{training}"
        yield "memory", f"{self.peak / GIB:.2f} GiB of {self.device}, in {self._worst}"
        for name, kinds in self.memory.items():
            parts = ", ".join(f"{kind} {size / GIB:.2f}" for kind, size in kinds.items())
            yield f"  {name}", f"{sum(kinds.values()) / GIB:.2f}: {parts}"
        yield "streams", f"{work.streams / GIB:.2f} GiB {self.streams_in}"
        model = work.total_elements * work.dtype.itemsize / GIB
        blocks = work.blocks * work.block_elements * work.dtype.itemsize / GIB
        yield "disk", f"{model:.2f} GiB for OUT, and until it is complete {blocks:.2f} for OUT.part"
        if self.seconds:
            parts = ", ".join(f"{name} {seconds / 60:,.1f}" for name, seconds in self.seconds.items() if seconds)
            yield "time", f"{sum(self.seconds.values()) / 60:,.1f} minutes for {work.blocks} blocks: {parts}"
            yield "", self.rate
        room = f"{self.available / GIB:.1f} GiB"
        less = "take a device with more memory, or --mask magnitude"
        yield "verdict", f"fits into {room}" if self.fits else f"does not fit into {room}: {less}"

    @property
    def _worst(self) -> str:
        return max(self.memory, key=lambda name: sum(self.memory[name].values()))


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
    start: StartConfig
    """Settings, with the kind of mask."""
    dtype: torch.dtype
    """Dtype that the weights are stored in."""
    sequences: int
    seq_length: int
    expert_share: float
    """Share of the routed experts that a token passes."""

    @property
    def blocks(self) -> int:
        """Number of blocks with a mask."""
        return sum(bool(block.weights) for block in self.all_blocks)

    @property
    def tokens(self) -> int:
        """Tokens of all sequences."""
        return self.sequences * self.seq_length

    @property
    def micro_batches(self) -> tuple[int, int]:
        """Sequences of a micro-batch, and micro-batches of an optimizer step."""
        return micro_batches(self.sequences, self.seq_length, self.hidden, self.start)

    @property
    def steps(self) -> int:
        """Optimizer steps of a block."""
        size, per_step = self.micro_batches
        return self.start.epochs * max(1, self.sequences // size // per_step)

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
        return self.start.mask in ("sparsegpt", "wanda") or any(weight.experts for weight in self.block.weights)

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
        errors = 1 if self.start.mask == "annealed" else 2
        return 2 + self.needs_inputs + errors * min(MEASURED, count) / count


def plan_prune(
    model: PreTrainedModel,
    config: SparseForgeConfig,
    start: StartConfig,
    dtype: torch.dtype,
    shape: tuple[int, int],
    out: Path,
    hardware: torch.device | tuple[str, float],
) -> PrunePlan:
    """Plan a prune.

    Args:
        model: without weights.
        config: decides what is pruned, to which pattern.
        start: settings of the blocks' training.
        dtype: in which the weights are stored.
        shape: number of sequences, and tokens of one.
        out: folder to write; its disk may get the streams.
        hardware: device of this machine, whose rates are measured; or name of a GPU in `GPUS`, and the share of its
            peak that is reached.

    Raises:
        ValueError: the model or the settings cannot be used, or the streams fit nowhere.
    """
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
        pattern=config.parsed_pattern,
        start=replace(start, mask=mask_for(start, weights, config.parsed_pattern)),
        dtype=dtype,
        sequences=shape[0],
        seq_length=shape[1],
        expert_share=share_of_experts(model),
    )
    # A GPU that is not here has its data sheet.
    if not isinstance(hardware, torch.device):
        name, mfu = hardware
        gpu = GPUS[name]
        available = int(gpu.memory * GIB)
        storage = "on the GPU" if work.streams <= SHARE * available else "in memory or on the disk"
        memory = prune_memory(work, own_streams=storage == "on the GPU")
        seconds = assumed_rates(work, gpu, mfu).seconds(work, copied=storage != "on the GPU")
        return PrunePlan(
            work, f"one {name}", memory, storage, seconds, f"at {mfu:.0%} of its peaks (assumed)", available
        )
    parent = next(path for path in out.absolute().parents if path.exists())
    storage = storage_for(work.streams, hardware, parent)
    is_gpu = hardware.type == "cuda"
    available = torch.cuda.mem_get_info(hardware)[0] if is_gpu else free_memory()
    memory = prune_memory(work, own_streams=storage == ("on the GPU" if is_gpu else "in memory"))
    # A block is measured only where there is room for it.
    seconds = {}
    if max(sum(kinds.values()) for kinds in memory.values()) <= available:
        seconds = measured_rates(model.config, work, hardware).seconds(work, copied=is_gpu and storage != "on the GPU")
    threads = "" if is_gpu else f" with {torch.get_num_threads()} threads"
    rate = f"by one block that was measured on this {hardware.type}{threads}"
    return PrunePlan(work, str(hardware) if is_gpu else "RAM", memory, storage, seconds, rate, available)


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
    if work.start.mask == "sparsegpt":
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
    if work.start.epochs:
        soft = 12 * masked + 8 * largest if work.start.mask == "annealed" else 2 * masked
        phases["training"] = {
            **block,
            "gradients": 4 * masked + (6 if work.autocast else 4) * largest,  # one is on its way
            "Adam's moments": 8 * masked,
            "masks": soft,
            "16-bit copies": 2 * masked if work.autocast else 0,
            "activations": activations,
        }
    return {name: {kind: bytes_ for kind, bytes_ in kinds.items() if bytes_} for name, kinds in phases.items()}


@dataclass(frozen=True)
class BlockRates:
    """Speed of the parts of the largest block's work."""

    forward: float
    """Seconds of a token's forward pass."""
    backward: float
    """Seconds of a token's forward and backward pass."""
    inputs: float
    """Seconds that the measurement of its inputs adds to a token."""
    first_mask: float
    """Seconds of the masks of a block."""
    step: float
    """Seconds of an optimizer step."""

    def seconds(self, work: PruneWork, copied: bool) -> dict[str, float]:
        """Return the seconds of all blocks, by part of the work.

        Args:
            work: sizes of the prune.
            copied: True if the streams are not where the device computes.
        """
        forward = work.tokens * (self.forward * work.forward_passes() + self.inputs * work.needs_inputs)
        training = work.tokens * work.start.epochs * self.backward + work.steps * self.step
        # Both streams are read and written, and the pruned one is measured; each epoch reads both.
        copies = (5 + 2 * work.start.epochs) * work.streams / 2 / _COPIED if copied else 0.0
        parts = {
            "forward passes": forward,
            "first masks": self.first_mask,
            "training": training,
            "copies of streams": copies,
        }
        return {name: work.blocks * seconds for name, seconds in parts.items()}


def assumed_rates(work: PruneWork, gpu: Gpu, mfu: float) -> BlockRates:
    """Return the rates of a GPU that reaches a share `mfu` of its peaks. Attention over the sequence is left out."""
    half = (gpu.half if work.autocast else gpu.single) * 1e12 * mfu
    single = gpu.single * 1e12 * mfu
    double = gpu.double * 1e12 * mfu
    masked = sum(weight.numel for weight in work.block.weights)
    shares = {weight.name: work.expert_share if weight.experts else 1.0 for weight in work.block.weights}
    forward = 2.0 * sum(weight.numel * shares[weight.name] for weight in work.block.weights) / half
    inputs = 0.0
    first_mask = 0.0
    if work.start.mask == "sparsegpt":
        squares = sum(w.matrices * w.shape[w.input_axis] ** 2 * shares[w.name] for w in work.block.weights)
        inputs = 2.0 * squares / single
        first_mask = sum(
            4 / 3 * inputs**3 / double + outputs * inputs**2 / single + _LAUNCHES * inputs
            for outputs, inputs in work.matrices
        )
    step = _STEP_BYTES * masked / (gpu.bandwidth * 1e9)
    return BlockRates(forward, 3 * forward, inputs, first_mask, step)


def measured_rates(config: PretrainedConfig, work: PruneWork, device: torch.device) -> BlockRates:
    """Return the rates of a device, from one micro-batch of the largest block with random weights.

    It needs the memory of the prune without its streams and factors.

    Args:
        config: of the model; its vocabulary is not used.
        work: sizes of the prune.
        device: that computes.
    """
    # A CPU needs fewer tokens to reach its rate, and minutes for a micro-batch.
    size, length = (work.micro_batches[0], work.seq_length) if device.type == "cuda" else (1, min(512, work.seq_length))
    tokens = size * length
    block, call = _random_block(config, work, device, size, length)
    parameters = [block.get_parameter(weight.name) for weight in work.block.weights]
    clock = _Clock(device)

    # A forward pass, alone and with the measurement of its inputs.
    with torch.no_grad():
        target = call()
        forward = clock.seconds(call)
        inputs = 0.0
        inputs_squared = 1
        if work.needs_inputs:
            moments = InputMoments(block, work.block.weights, full=work.start.mask == "sparsegpt")
            moments.measure(_once(call), no_reduce)
            inputs = max(0.0, clock.seconds(lambda: moments.measure(_once(call), no_reduce)) - forward)
            if work.start.mask == "sparsegpt":  # layers with the same input share a sum
                inputs_squared = sum(moment.shape[-1] ** 2 for moment in moments.moments.values())
            del moments
        first_mask = _first_mask_seconds(work, block, inputs / tokens / inputs_squared, clock)

    # A step of Adam behind a forward and backward pass; the first makes its moments.
    backward = step = 0.0
    if work.start.epochs:
        for parameter in parameters:
            parameter.requires_grad_(True)
        optimizer = torch.optim.Adam(parameters, lr=1e-9, fused=True)

        def train() -> None:
            (call().float() - target.float()).square().mean().backward()

        def move() -> None:
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)  # gradients stay, or the next step would have nothing to do

        train()
        move()
        backward = clock.seconds(train)
        step = clock.seconds(move)
    return BlockRates(forward / tokens, backward / tokens, inputs / tokens, first_mask, step)


def _once(call: Callable[[], Tensor]) -> Iterator[None]:
    """Run the block once."""
    call()
    yield


def _first_mask_seconds(work: PruneWork, block: nn.Module, moments_rate: float, clock: _Clock) -> float:
    """Return the seconds of the masks of a block.

    Args:
        work: sizes of the prune.
        block: with random weights.
        moments_rate: seconds of an element of a token's second moments, which are products in fp32.
        clock: of the device.
    """
    kind = work.start.mask
    if kind != "sparsegpt":
        weight = max(work.block.weights, key=lambda weight: weight.numel)
        value = block.get_parameter(weight.name).data
        once = clock.seconds(lambda: choose_by_score(weight, value, work.pattern, None))
        updates = _UPDATES if kind == "annealed" else 1
        return once * updates * sum(other.numel for other in work.block.weights) / weight.numel
    assert isinstance(work.pattern, NM)
    pattern = work.pattern
    device = next(block.parameters()).device
    outputs = max(outputs for outputs, _ in work.matrices)

    def solve(rows: int, columns: int) -> float:
        weight_OI = torch.randn(rows, columns, device=device)
        gram_II = torch.eye(columns, device=device)
        return clock.seconds(lambda: reconstruct(weight_OI, gram_II, pattern.n, pattern.m, 0.01, 128))

    # Of few columns the loop over them takes the time, of few rows the factorization, whose work is their cube.
    columns = max(pattern.m, _COLUMNS - _COLUMNS % pattern.m)
    factor_columns = max(pattern.m, _FACTOR - _FACTOR % pattern.m)
    loop = solve(outputs, columns) / columns
    factor = max(0.0, solve(pattern.m, factor_columns) - loop * factor_columns * pattern.m / outputs)
    product = moments_rate / 2
    seconds = 0.0
    for rows, inputs in work.matrices:
        # On a GPU the kernels of a column take equally long, whatever the number of rows.
        share = rows / outputs if device.type == "cpu" else 1.0
        seconds += loop * inputs * share + factor * (inputs / factor_columns) ** 3 + product * rows * inputs**2
    return seconds


class _Clock:
    """Clock that waits for a device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def seconds(self, work: Callable[[], Any]) -> float:
        """Return the seconds of some work: the least of several measurements."""
        measured: list[float] = []
        while len(measured) < _REPEATS and sum(measured) < _ENOUGH:
            self._wait()
            start = time.perf_counter()
            work()
            self._wait()
            measured.append(time.perf_counter() - start)
        return min(measured)

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def _random_block(
    config: PretrainedConfig, work: PruneWork, device: torch.device, size: int, length: int
) -> tuple[nn.Module, Callable[[], Tensor]]:
    """Return the largest block with random weights, and a function that runs it on `size` sequences of `length`."""
    # A block is the same beside an embedding of few tokens.
    config = copy.deepcopy(config)
    text = config.get_text_config()
    text.vocab_size = min(text.vocab_size, _VOCABULARY)
    text.pad_token_id = None
    with no_init_weights(), init_empty_weights(include_buffers=False):
        model = build_model(config, dtype=torch.float32)
    model.eval().requires_grad_(False)
    # The body without its blocks embeds the tokens and says what a block is called with.
    body = f"{body_of([work.block])}.".removeprefix(".")
    layers = work.block.name.rpartition(".")[0]
    for owner, module in model.named_modules():
        of_block = f"{owner}.".startswith(f"{work.block.name}.")
        if of_block or f"{owner}.".startswith(body) and not f"{owner}.".startswith(f"{layers}."):
            for name, parameter in module.named_parameters(recurse=False):
                value = torch.empty(parameter.shape, device=device).normal_(std=0.02)
                module._parameters[name] = nn.Parameter(value, requires_grad=False)
            for name, buffer in module.named_buffers(recurse=False):
                setattr(module, name, buffer.to(device))
    ids_BS = torch.randint(text.vocab_size, (size, length), device=device)
    (inputs,) = capture_inputs(model, work.all_blocks, [{"input_ids": ids_BS}])
    arguments = inputs.arguments[work.all_blocks.index(work.block)]
    block = model.get_submodule(work.block.name)

    def call() -> Tensor:
        with torch.autocast(device.type, torch.bfloat16, enabled=work.autocast):
            return run_block(block, inputs.hidden_BSH.float(), arguments)

    return block, call
