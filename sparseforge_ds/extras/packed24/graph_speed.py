"""Speed of a packed 2:4 model in CUDA graphs, against the dense model: a static cache and compiled decoding.

Without graphs a small batch waits for the host, and a faster kernel shows no gain. Each length is a prompt to read and
a number of new tokens to write. On other devices the same steps run without a compiler, which tests them and measures
no speed.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, StaticCache

from sparseforge_ds.evaluate.perplexity import max_positions
from sparseforge_ds.extras.packed24.packed_experts import Packed24Experts
from sparseforge_ds.extras.packed24.packed_linear import Packed24Linear
from sparseforge_ds.extras.packed24.speed import Speed, now, resident, speed_of, tokens_of
from sparseforge_ds.model.architecture import bare_model, with_layers
from sparseforge_ds.model.registration import load_config
from sparseforge_ds.packed_format.packed_values import Grid, require_group_size
from sparseforge_ds.packed_format.packing import pack24
from sparseforge_ds.transformers_internals import CACHE

_HUB_CONFIGS = Path(__file__).resolve().parents[2] / "assets" / "hub_configs"
SHAPES = {"llama-2-7b": _HUB_CONFIGS / "meta-llama" / "Llama-2-7b-hf", "qwen3-14b": _HUB_CONFIGS / "Qwen" / "Qwen3-14B"}
"""Configs of models that are measured with random weights."""


@dataclass(frozen=True)
class Length:
    """Tokens of one sequence."""

    prompt: int
    new: int

    def __str__(self) -> str:
        return f"{self.prompt}x{self.new}"


@dataclass(frozen=True)
class Lengths:
    """Lengths, batches and repeats of a measurement."""

    batches: Sequence[int]
    lengths: Sequence[Length]
    repeats: int
    """Turns that count; two more come first, which compile."""

    def require_positions(self, positions: int) -> None:
        """Reject a length that is beyond a model's positions."""
        for length in self.lengths:
            if length.prompt + length.new > positions:
                raise ValueError(f"--workload {length}: the model has {positions} positions; use fewer tokens in all")


@dataclass(frozen=True)
class Generation:
    """Time and memory of one model at one length and batch; medians over the turns."""

    length: str
    batch: int
    model: str
    first_token_seconds: float
    seconds: float
    """Time from the prompt to the last token."""
    decode_tokens_per_second: float
    """Tokens after the first of all sequences, divided by the seconds after the first."""
    cache_bytes: int
    peak_bytes: int | None
    """Peak allocation on the GPU, without the other models' weights and caches; None on other devices."""
    step_bytes: int | None
    """Weights and cache that a decoding step reads; None for mixtures, whose tokens choose the weights."""
    bytes_per_second: float | None


def random_pair(shapes: str, layers: int | None, dtype: torch.dtype) -> tuple[PreTrainedModel, PreTrainedModel]:
    """Return (packed, dense) of published shapes with random weights, on the GPU where there is one.

    Args:
        shapes: a key of `SHAPES`.
        layers: number of layers; None: all of the published model.
        dtype: dtype of the weights.

    Raises:
        ValueError: the published model has fewer layers.
    """
    config = AutoConfig.from_pretrained(SHAPES[shapes], trust_remote_code=False)
    if layers is not None:
        config = with_layers(config, layers)
    # The packed model first: otherwise two dense models and a packed one would be in memory.
    models = []
    for is_packed in (True, False):
        with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
            model = AutoModelForCausalLM.from_config(copy.deepcopy(config), dtype=dtype, trust_remote_code=False)
        model.generation_config.eos_token_id = None
        models.append(model.eval().requires_grad_(False))
        if is_packed:
            _pack(model)
    return models[0], models[1]


def require_groups(shapes: str, layers: int | None, grids: Mapping[str, Grid]) -> None:
    """Reject `--values` whose groups do not divide the weights of `random_pair`, before its models are made.

    Args:
        shapes: a key of `SHAPES`.
        layers: number of layers; None: all of the published model.
        grids: by the text that names each.

    Raises:
        ValueError: a group does not divide a row, or the published model has fewer layers.
    """
    config = AutoConfig.from_pretrained(SHAPES[shapes], trust_remote_code=False)
    if layers is not None:
        config = with_layers(config, layers)
    groups = {text: grid.group_size for text, grid in grids.items() if grid.group_size is not None}
    if not groups:
        return
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    for name, layer in _packable(model):
        for text, group_size in groups.items():
            try:
                require_group_size(layer.in_features // 2, group_size)
            except ValueError as error:
                raise ValueError(f"--values {text}: {name}: {error}") from None


def _packable(model: Any) -> list[tuple[str, nn.Linear]]:
    """Return every linear layer but the head, with its name."""
    head = model.get_output_embeddings()
    layers = [(name, module) for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    return [(name, layer) for name, layer in layers if layer is not head]


def _pack(model: Any) -> None:
    """Keep the first two weights of each group of four in every linear layer but the head, and pack them."""
    for name, layer in _packable(model):
        weight = layer.weight.detach()
        weight.view(-1, 4)[:, 2:] = 0
        model.set_submodule(name, Packed24Linear(*pack24(weight, -1), layer.bias))


def require_compilable(name: str) -> None:
    """Reject a model that transformers cannot compile as a whole, by its config.json."""
    kind = type(bare_model(load_config(name, name)))
    if not kind._can_compile_fullgraph:
        raise ValueError(
            f"--engine graph: transformers cannot compile {name}, a {kind.__name__}, as a whole; use --engine eager"
        )


@torch.inference_mode()
def measure_graphs(models: dict[str, Any], workload: Lengths) -> tuple[list[Speed], list[Generation]]:
    """Generate with all models at each length and batch size, in turns.

    Args:
        models: by name; "dense" is the one that others are compared with.
        workload: sizes.

    Raises:
        ValueError: a length is beyond the positions of a model.
    """
    for model in models.values():
        workload.require_positions(max_positions(model.config))
    # Every length and batch size, all models in turns.
    speeds: list[Speed] = []
    generations: list[Generation] = []
    turns_in_all = len(workload.lengths) * len(workload.batches) * (workload.repeats + 2)
    bar = tqdm(total=turns_in_all, unit=" turns", disable=None)
    for length in workload.lengths:
        for batch in workload.batches:
            bar.set_description(f"{length}, batch {batch}")
            torch._dynamo.reset()  # graphs of earlier sizes are not used again
            runs = {name: GraphRun(model, batch, length) for name, model in models.items()}
            turns: dict[str, list[tuple[float, float]]] = {name: [] for name in runs}
            for turn in range(workload.repeats + 2):  # the first two compile and record
                for name, run in runs.items():
                    times = run.generate()
                    if turn > 1:
                        turns[name].append(times)
                bar.update()
            speeds += _speeds(length, batch, turns)
            for name, run in runs.items():
                others = [model for other, model in models.items() if other != name]
                generations.append(run.result(name, turns[name], others))
            del runs, run
    bar.close()
    return speeds, generations


class GraphRun:
    """One model at one length and batch size, with its cache and its compiled step."""

    def __init__(self, model: Any, batch: int, length: Length) -> None:
        self.model = model
        self.batch = batch
        self.length = length
        self.prompt = tokens_of(model, batch, length.prompt)
        self.cache = StaticCache(config=model.config, max_cache_len=length.prompt + length.new)
        self.peak = 0
        self.step = self.compile_step()

    def compile_step(self) -> Callable[[Tensor], Tensor]:
        """Compile the step: on CUDA with graphs, elsewhere traced alike and run without a compiler."""
        options: dict[str, Any] = {"backend": "aot_eager"}
        if self.model.device.type == "cuda":
            options = {"mode": "reduce-overhead"}
        compiled: Callable[[Tensor], Tensor] = torch.compile(self._step, fullgraph=True, dynamic=False, **options)
        return compiled

    def _step(self, ids: Tensor) -> Tensor:
        """Return the most likely next token, (B, 1)."""
        logits = self.model(ids, **{CACHE: self.cache}, use_cache=True, logits_to_keep=1).logits
        return logits[:, -1:].argmax(-1)

    def generate(self) -> tuple[float, float]:
        """Generate once, and return the seconds to the first token and to the last."""
        self.cache.reset()
        on_cuda = self.model.device.type == "cuda"
        if on_cuda:
            torch.cuda.reset_peak_memory_stats(self.model.device)
        began = now(self.model)
        ids = self._step(self.prompt)
        first = now(self.model) - began
        for _ in range(self.length.new - 1):
            ids = self.step(ids).clone()  # the graph overwrites its output in the next step
        last = now(self.model) - began
        if on_cuda:
            self.peak = torch.cuda.max_memory_allocated(self.model.device)
        return first, last

    def result(self, name: str, turns: list[tuple[float, float]], others: Sequence[Any]) -> Generation:
        """Return the medians of the turns; `others` are the models in memory beside this one."""
        first = median(first for first, _ in turns)
        last = median(last for _, last in turns)
        decode = median(_rate(self.length.new - 1, last - first) for first, last in turns)
        # Bytes that a step reads; a mixture's depend on its tokens.
        cache = sum(layer.keys.nbytes + layer.values.nbytes for layer in self.cache.layers)
        mixture = any(_is_mixture(module) for module in self.model.modules())
        read = None if mixture else _weights_read(self.model) + cache
        # The other models are in memory too, each with a cache as large.
        peak = self.peak - sum(resident(other) + cache for other in others) if self.peak else None
        return Generation(
            length=str(self.length),
            batch=self.batch,
            model=name,
            first_token_seconds=first,
            seconds=last,
            decode_tokens_per_second=self.batch * decode,
            cache_bytes=cache,
            peak_bytes=peak,
            step_bytes=read,
            bytes_per_second=None if read is None else read * decode,
        )


def _rate(count: float, seconds: float) -> float:
    return count / max(seconds, 1e-9)


def _speeds(length: Length, batch: int, turns: dict[str, list[tuple[float, float]]]) -> list[Speed]:
    """Return the tokens per second of prefill, decode and both together."""
    rates: dict[str, Callable[[float, float], float]] = {
        "prefill": lambda first, last: _rate(batch * length.prompt, first),
        "decode": lambda first, last: _rate(batch * (length.new - 1), last - first),
        "new tokens in all": lambda first, last: _rate(batch * length.new, last),
    }
    speeds = []
    for work, rate in rates.items():
        rates_of = {name: [rate(*times) for times in of_model] for name, of_model in turns.items()}
        speeds.append(speed_of(f"{length} {work}", batch, rates_of))
    return speeds


def _is_mixture(module: nn.Module) -> bool:
    return isinstance(module, Packed24Experts) or hasattr(module, "num_experts")


def _weights_read(model: Any) -> int:
    """Return the bytes of weights that a decoding step reads: all but the embeddings, unless the head shares them."""
    embeddings = model.get_input_embeddings()
    head = model.get_output_embeddings()
    weight_bytes = resident(model)
    is_shared = head is not None and head.weight.data_ptr() == embeddings.weight.data_ptr()
    return weight_bytes if is_shared else weight_bytes - embeddings.weight.nbytes


def table_of_generations(generations: Sequence[Generation]) -> str:
    """Format times and memory of each model as Markdown, with the speed-up that bytes alone would allow."""
    lines = [
        "| prompt x new | batch | | first token, ms | decode tokens/s | peak GB | cache GB | read GB/s | byte bound |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    dense = {(run.length, run.batch): run for run in generations if run.model == "dense"}
    for run in generations:
        cells = [run.length, run.batch, run.model, f"{run.first_token_seconds * 1e3:.4g}"]
        cells.append(f"{run.decode_tokens_per_second:.4g}")
        cells.append("-" if run.peak_bytes is None else f"{run.peak_bytes / 1e9:.2f}")
        cells.append(f"{run.cache_bytes / 1e9:.3g}")
        cells.append("-" if run.bytes_per_second is None else f"{run.bytes_per_second / 1e9:.4g}")
        bound = dense[run.length, run.batch].step_bytes
        is_bound = run.model != "dense" and run.step_bytes is not None and bound is not None
        cells.append(f"{(bound or 0) / (run.step_bytes or 1):.2f}x" if is_bound else "")
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines)
