"""Speed of a prune's largest block: measured on a device of this machine, or by the data sheet of a GPU."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from accelerate import init_empty_weights
from torch import Tensor, nn
from transformers import PretrainedConfig

from sparseforge_ds.extras.planner.machine import Gpu
from sparseforge_ds.extras.planner.prune_work import PruneWork
from sparseforge_ds.mask.pattern import NM
from sparseforge_ds.mask.reconstruct import reconstruct
from sparseforge_ds.model.registration import build_model
from sparseforge_ds.start.annealing import Annealing
from sparseforge_ds.start.blocks import body_of, capture_inputs, run_block
from sparseforge_ds.start.first_mask import InputMoments, choose_by_score
from sparseforge_ds.start.solve import no_reduce
from sparseforge_ds.transformers_internals import no_init_weights

_LAUNCHES = 60e-6
"""Seconds that a GPU's small kernels take for each column that SparseGPT decides, about."""
_STEP_BYTES = 40
"""Bytes of a weight that an Adam step reads and writes: gradient, W, both moments, and the zeros of new gradients."""
_SOFT_BYTES = 60
"""Bytes of a weight that a step with soft masks reads and writes besides: W, m_eff, and the published weight."""
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
    sums: float
    """Seconds that the sums for soft masks add to a token's backward pass."""
    soft_step: float
    """Seconds that soft masks add to an optimizer step; their updates only where every step has one."""

    def seconds(self, work: PruneWork, copied: bool) -> dict[str, float]:
        """Return the seconds of all blocks, by part of the work; those that are done are only passed.

        Args:
            work: sizes of the prune.
            copied: True if the streams are not where the device computes.
        """
        forward = work.tokens * (self.forward * work.forward_passes() + self.inputs * work.needs_inputs)
        soft_steps = work.block_start.soft_steps(work.steps)
        soft_tokens = soft_steps / max(1, work.steps) * work.tokens * work.block_start.epochs
        training = work.tokens * work.block_start.epochs * self.backward + work.steps * self.step
        training += soft_tokens * self.sums + soft_steps * self.soft_step
        # Both streams are read and written, and the pruned one is measured; each epoch reads both.
        copies = (5 + 2 * work.block_start.epochs) * work.streams / 2 / _COPIED if copied else 0.0
        parts = {
            "forward passes": forward,
            "first masks": self.first_mask,
            "training": training,
            "copies of streams": copies,
        }
        # A block that is done moves both streams, and no more.
        passing = {
            "forward passes": work.tokens * self.forward * 2,
            "copies of streams": 4 * work.streams / 2 / _COPIED if copied else 0.0,
        }
        return {
            name: work.blocks_to_do * seconds + work.blocks_passed * passing.get(name, 0.0)
            for name, seconds in parts.items()
        }


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
    if work.block_start.mask == "sparsegpt":
        squares = sum(w.matrices * w.shape[w.input_axis] ** 2 * shares[w.name] for w in work.block.weights)
        inputs = 2.0 * squares / single
        first_mask = sum(
            4 / 3 * inputs**3 / double + outputs * inputs**2 / single + _LAUNCHES * inputs
            for outputs, inputs in work.matrices
        )
    step = _STEP_BYTES * masked / (gpu.bandwidth * 1e9)
    soft_step = _SOFT_BYTES * masked / (gpu.bandwidth * 1e9)
    return BlockRates(forward, 3 * forward, inputs, first_mask, step, 0.0, soft_step)


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
    names = [weight.name for weight in work.block.weights]
    parameters = [block.get_parameter(name) for name in names]
    clock = _Clock(device)

    # A forward pass, alone and with the measurement of its inputs.
    with torch.no_grad():
        target = call()
        forward = clock.seconds(call)
        inputs = 0.0
        inputs_squared = 1
        if work.needs_inputs:
            moments = InputMoments(block, work.block.weights, full=work.block_start.mask == "sparsegpt")
            moments.measure(_once(call), no_reduce)
            inputs = max(0.0, clock.seconds(lambda: moments.measure(_once(call), no_reduce)) - forward)
            if work.block_start.mask == "sparsegpt":  # layers with the same input share a sum
                inputs_squared = sum(moment.shape[-1] ** 2 for moment in moments.moments.values())
            del moments
        first_mask = _first_mask_seconds(work, block, inputs / tokens / inputs_squared, clock)

    # A step of Adam behind a forward and backward pass; the first makes its moments.
    backward = step = sums = soft_step = 0.0
    if work.block_start.epochs:
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
        if soft_steps := work.block_start.soft_steps(work.steps):
            masks = {name: torch.ones_like(block.get_parameter(name), dtype=torch.bool) for name in names}
            annealing = Annealing(block, work.block.weights, work.pattern, soft_steps, masks, {})
            with annealing.collect_sums():
                sums = max(0.0, clock.seconds(train) - backward)
            soft_step = clock.seconds(lambda: annealing.after_step(1, no_reduce))
    return BlockRates(forward / tokens, backward / tokens, inputs / tokens, first_mask, step, sums / tokens, soft_step)


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
    kind = work.block_start.mask
    if kind != "sparsegpt":
        weight = max(work.block.weights, key=lambda weight: weight.numel)
        value = block.get_parameter(weight.name).data
        once = clock.seconds(lambda: choose_by_score(weight, value, work.pattern, None))
        return once * sum(other.numel for other in work.block.weights) / weight.numel
    assert isinstance(work.pattern, NM)
    pattern = work.pattern
    device = next(block.parameters()).device
    outputs = max(outputs for outputs, _ in work.matrices)

    def solve(rows: int, columns: int) -> float:
        weight_OI = torch.randn(rows, columns, device=device)
        gram_II = torch.eye(columns, device=device)
        return clock.seconds(lambda: reconstruct(weight_OI, gram_II, pattern.n, pattern.m, 0.01))

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
