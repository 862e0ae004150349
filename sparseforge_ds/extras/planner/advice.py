"""Memory and decode speed of a model dense and 2:4, in 16, 8 and 4 bits, from its config.json alone.

A decode step reads every weight and the cache once, so that its least time is its bytes over the bytes a second that
the matrix products reach. These shares of the memory's bandwidth are measured on single products, never on whole
models, so that whole models can be compared with what is predicted here.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PretrainedConfig

from sparseforge_ds.config import SparseForgeConfig
from sparseforge_ds.extras.planner.flops import AttentionLayer, attention_layers
from sparseforge_ds.extras.planner.machine import GPUS, Gpu
from sparseforge_ds.model.any_family import any_family
from sparseforge_ds.model.architecture import bare_model, share_of_experts
from sparseforge_ds.model.families import prunable_weights
from sparseforge_ds.packed_format.packed_values import Grid, bits_a_weight

MEASURED_SHAPES = ((14336, 4096), (4096, 14336), (17408, 5120))
"""Outputs and inputs of the products that were measured."""
MEASURED = {
    1: (111.5, 75.3),
    2: (111.1, 74.5),
    4: (110.4, 75.6),
    8: (113.1, 80.5),
    16: (114.1, 86.8),
    32: (114.7, 112.5),
    64: (119.7, 208.4),
    128: (125.2, 258.3),
    256: (163.8, 333.6),
}
"""Rows of the input, and microseconds of all three products on an H200, dense by cuBLAS and 2:4 by our kernels, in
bf16. They are sums over the shapes of the table in studies/gpu.md, under "The packed product"."""
MEASURED_ON = "h200"
MEASURED_GAINS = {1: (1.42, 1.38), 8: (1.33, 1.29)}
"""Sequences decoded together, and the speed of 2:4 over dense of 8 layers of Llama-2-7B's shape on an H200, in bf16:
predicted from the products, and measured. docs/hardware.md has them, with the tokens a second."""
MEASURED_SHARES = (0.71, 0.75)
"""Measured tokens a second over the predicted ones, least and most of these runs."""
_HALF = 16

FORMATS = {
    ("dense", 16): 16.0,
    ("2:4", 16): bits_a_weight(),
    ("dense", 8): 8.0,
    ("2:4", 8): bits_a_weight(Grid("int8")),
    ("dense", 4): 4.25,
    ("2:4", 4): bits_a_weight(Grid("int4", 64)),
}
"""Bits a weight by kind and bits of a value. At 4 bits, 64 values that are stored share a scale of 16 bits, which are
128 weights of a 2:4 model. Scales of 8-bit rows are too few to count."""


@dataclass(frozen=True)
class ModelBytes:
    """Numbers that one sequence position of a model holds and reads. Weights are counted in elements."""

    pruned: int
    """Elements that 2:4 and few bits apply to."""
    pruned_read: float
    """Elements of these that one step reads: fewer where tokens choose experts, or a vision tower is pruned too."""
    other: int
    """Elements that stay dense in 16 bits: embeddings, head, norms, routers."""
    other_read: float
    """Elements of these that one step reads; not a table of embeddings, unless it is the head as well."""
    cache: int
    """Bytes of keys and values of all sequences, in 16 bits."""

    def resident_bytes(self, bits: float) -> float:
        """Bytes in memory with `bits` a pruned weight."""
        return self.pruned * bits / 8 + self.other * _HALF / 8 + self.cache

    def read_of_pruned(self, bits: float) -> float:
        """Bytes of pruned weights that a step reads."""
        return self.pruned_read * bits / 8

    @property
    def read_of_others(self) -> float:
        """Bytes that a step reads beside pruned weights."""
        return self.other_read * _HALF / 8 + self.cache


@dataclass(frozen=True)
class Advice:
    """One format of a model on a GPU."""

    kind: str
    bits: int
    """Bits of a value."""
    bits_a_weight: float
    resident_bytes: float
    """Bytes of weights and cache in memory."""
    seconds: float
    """Least time of a decode step."""
    over_16_bits: float
    """Speed over the dense model in 16 bits."""
    over_same_bits: float
    """Speed over the dense model in as many bits."""


def model_bytes(config: PretrainedConfig, batch: int, context: int, unknown: bool = False) -> ModelBytes:
    """Count what a model holds and what a decode step reads.

    Args:
        config: of a causal language model.
        batch: sequences that are decoded together.
        context: tokens of each, whose keys and values are read.
        unknown: True to count what `--any_family` prunes of a family that is not in the table.

    Raises:
        ValueError: no model can be built, or its family is not in the table.
    """
    model = bare_model(config, torch.bfloat16)
    text = config.get_text_config()
    block = SparseForgeConfig()
    weights = prunable_weights(model, any_family(model, block) if unknown else block)
    # A decode step runs the language model and its head, not a vision tower.
    embeddings, head = model.get_input_embeddings(), model.get_output_embeddings()
    modules = [model.get_decoder(), *([] if head is None else [head])]
    in_step = {id(parameter) for module in modules for parameter in module.parameters()}
    # Rows of a separate table of embeddings are all that a step reads of it.
    if head is not None and head.weight is not embeddings.weight:
        in_step.discard(id(embeddings.weight))
    # Every token chooses its experts by itself, and all alike.
    chosen = 1 - (1 - share_of_experts(model)) ** batch
    read = {
        name: parameter.numel() * (chosen if ".experts." in name else 1)
        for name, parameter in model.named_parameters()
        if id(parameter) in in_step
    }
    pruned = sum(weight.numel for weight in weights)
    pruned_read = sum(read.get(weight.name, 0) for weight in weights)
    return ModelBytes(
        pruned=pruned,
        pruned_read=pruned_read,
        other=sum(parameter.numel() for parameter in model.parameters()) - pruned,
        other_read=sum(read.values()) - pruned_read,
        cache=batch * cache_of_sequence(text, context),
    )


def advise(model: ModelBytes, gpu: Gpu, batch: int) -> list[Advice]:
    """Return the formats with their memory and the speed that their bytes allow, as in `FORMATS`."""
    seconds = {}
    for (kind, bits), weight_bits in FORMATS.items():
        rate = gpu.bandwidth * 1e9 * share_of_bandwidth(kind, batch)
        dense_rate = gpu.bandwidth * 1e9 * share_of_bandwidth("dense", batch)
        seconds[kind, bits] = model.read_of_pruned(weight_bits) / rate + model.read_of_others / dense_rate
    return [
        Advice(
            kind=kind,
            bits=bits,
            bits_a_weight=weight_bits,
            resident_bytes=model.resident_bytes(weight_bits),
            seconds=seconds[kind, bits],
            over_16_bits=seconds["dense", _HALF] / seconds[kind, bits],
            over_same_bits=seconds["dense", bits] / seconds[kind, bits],
        )
        for (kind, bits), weight_bits in FORMATS.items()
    ]


def check_batch(batch: int) -> None:
    """Raise ValueError if no product with so many rows was measured."""
    if not 1 <= batch <= max(MEASURED):
        raise ValueError(f"--batch {batch} is not valid: products were measured with 1 to {max(MEASURED)} rows")


def measured_rows(batch: int) -> int:
    """Return the measured number of rows next above a batch; ValueError if there is none."""
    check_batch(batch)
    return min(rows for rows in MEASURED if rows >= batch)


def basis(batch: int, gpu: Gpu) -> dict[str, Any]:
    """Return the measurements that the speeds are made of, and their error where whole models were measured."""
    rows = measured_rows(batch)
    dense, sparse = MEASURED[rows]
    return {
        "rows": rows,
        "measured_on": MEASURED_ON,
        "shapes": MEASURED_SHAPES,
        "microseconds": {"dense": dense, "2:4": sparse},
        "share_of_bandwidth": {kind: share_of_bandwidth(kind, batch) for kind in ("dense", "2:4")},
        "bandwidth": gpu.bandwidth,
        "gains": {n: {"predicted": gain, "measured": measured} for n, (gain, measured) in MEASURED_GAINS.items()},
        "measured_over_predicted_tokens": MEASURED_SHARES,
    }


def share_of_bandwidth(kind: str, batch: int) -> float:
    """Return the share of an H200's bandwidth that products reached, with the measured rows next above the batch.

    Raises:
        ValueError: no product with so many rows was measured.
    """
    microseconds = MEASURED[measured_rows(batch)][0 if kind == "dense" else 1]
    elements = sum(outputs * inputs for outputs, inputs in MEASURED_SHAPES)
    return elements * FORMATS[kind, _HALF] / 8 / (microseconds * 1e-6) / (GPUS[MEASURED_ON].bandwidth * 1e9)


def lines(advices: list[Advice], batch: int, gpu: Gpu) -> Iterator[str]:
    """Yield a table for people, what it says, what it was read from, and its error.

    Args:
        advices: rows of `advise`.
        batch: sequences that are decoded together.
        gpu: that decodes.
    """
    yield "| format | bits a weight | GB held | tokens/s, at most | over dense, same bits | over dense, 16 bits | |"
    yield "|---|---:|---:|---:|---:|---:|---|"
    for row in advices:
        remark = f"measured on {MEASURED_ON}" if row.bits == _HALF else "assumed"
        if row.resident_bytes > gpu.memory * 2**30:
            remark += ", does not fit"
        cells = (
            f"{row.kind}, {row.bits} bits",
            f"{row.bits_a_weight:g}",
            f"{row.resident_bytes / 1e9:.2f}",
            f"{batch / row.seconds:,.0f}",
            f"{row.over_same_bits:.2f}x",
            f"{row.over_16_bits:.2f}x",
            remark,
        )
        yield f"| {' | '.join(cells)} |"
    by_format = {(row.kind, row.bits): row for row in advices}
    sparse, dense8, sparse8 = by_format["2:4", 16], by_format["dense", 8], by_format["2:4", 8]
    yield ""
    memory_share = sparse.resident_bytes / by_format["dense", 16].resident_bytes
    yield f"2:4 in 16 bits: {sparse.over_16_bits:.2f}x decoding, {memory_share:.2f} of the memory."
    if dense8.over_16_bits > sparse.over_16_bits:
        yield (
            f"Dense in 8 bits is faster by its bytes: {dense8.over_16_bits:.2f}x. Where 8 bits suffice, quantize; "
            f"2:4 on top would give {sparse8.over_same_bits:.2f}x, with a kernel that reads 8-bit 2:4 values."
        )
    # What all this is made of, and how far it was off.
    made_of = basis(batch, gpu)
    shapes = ", ".join(f"{outputs} x {inputs}" for outputs, inputs in MEASURED_SHAPES)
    shares = made_of["share_of_bandwidth"]
    yield ""
    yield (
        f"read from: bf16 products of {made_of['rows']} rows ({shapes}) on {MEASURED_ON}, together "
        f"{made_of['microseconds']['dense']:g} us dense and {made_of['microseconds']['2:4']:g} us 2:4, which is "
        f"{shares['dense']:.0%} and {shares['2:4']:.0%} of its bandwidth; and {gpu.bandwidth:,.0f} GB/s of this card"
    )
    errors = ", ".join(
        f"batch {n} {gain:.2f}x for {measured:.2f}x measured ({gain / measured - 1:+.0%})"
        for n, (gain, measured) in MEASURED_GAINS.items()
    )
    least, most = MEASURED_SHARES
    yield (
        f"predicted and measured: 8 layers of Llama-2-7B in 16 bits on {MEASURED_ON}: {errors}; measured tokens/s "
        f"were {least:g} to {most:g} of the predicted. "
        "Whole models were measured on no other card, and 8 and 4 bits on none"
    )


def cache_of_sequence(text: PretrainedConfig, context: int) -> int:
    """Return the bytes of keys and values of one sequence; layers without a growing cache count nothing."""
    return int(sum(_numbers_of_layer(layer, context) for layer in attention_layers(text)) * _HALF / 8)


def _numbers_of_layer(layer: AttentionLayer, context: int) -> int:
    """Return how many numbers of keys and values one sequence has in a layer."""
    config, heads = layer.config, layer.heads
    width = getattr(config, "head_dim", None) or config.hidden_size // heads
    key_value_heads = getattr(config, "num_key_value_heads", None) or heads
    if getattr(config, "multi_query", False) and not getattr(config, "new_decoder_architecture", False):
        key_value_heads = 1  # GPT BigCode, and Falcon's first models
    numbers = 2 * key_value_heads * width
    if getattr(config, "qk_nope_head_dim", None):  # latent attention, whose cache transformers keeps expanded
        numbers = heads * (config.qk_nope_head_dim + config.qk_rope_head_dim + config.v_head_dim)
    reach = {"sliding_attention": "sliding_window", "chunked_attention": "attention_chunk_size"}
    tokens = min(getattr(config, reach.get(layer.kind, ""), None) or context, context)
    return int(tokens * numbers)
