"""Speed and memory of a packed 2:4 model against the dense model, and against torchao's quantized forms of that one.

All models are in one process and are measured in turns, so that other load on the machine affects all. A speed-up is
the median quotient of neighbouring turns.
"""

from __future__ import annotations

import copy
import platform
import shlex
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median, quantiles
from typing import Any, BinaryIO

import torch
from torch import Tensor, nn
from tqdm import tqdm
from transformers import PreTrainedModel

from sparseforge_ds.evaluate.finished_model import NO_ADAPTER, find_adapter, load_model
from sparseforge_ds.evaluate.perplexity import max_positions
from sparseforge_ds.model.registration import load_config
from sparseforge_ds.model.stored_config import is_packed_config
from sparseforge_ds.packed_format.packed_values import SCALE, Grid, round_values
from sparseforge_ds.packed_format.packing import POSITIONS, has_packed_weights, packed24_axis
from sparseforge_ds.transformers_internals import CACHE

PAPER = (
    "the paper (arXiv 2605.06402) reports 1.40x to 1.44x the dense model's speed and 0.58x its memory, on an H800 with "
    "TensorRT-LLM; those are other kernels on another machine, and are not measured here"
)

ENGINES = {"eager": "eager, where a small batch on a GPU waits for the host", "graph": "in CUDA graphs"}
"""Descriptions of `--engine`, for the table."""
RIVALS = ("int8", "fp8", "int4")
"""Quantized forms of the dense model, weights only, by torchao: a scale a row, or for int4 a scale a group."""
_INT4_GROUP = 128
_BEFORE_DECODE = 16
"""Tokens of the prompt before decoding."""


@dataclass(frozen=True)
class Workload:
    """Sizes of a measurement."""

    batches: Sequence[int] = (1, 4)
    prompt: int = 512
    """Tokens of each sequence that prefill reads."""
    generated: int = 16
    """Tokens that decode writes, one after the other, after a prompt of 16."""
    repeats: int = 5
    """Turns that count; one more comes before them."""

    def require_positions(self, positions: int) -> None:
        """Reject a prompt or a text that is longer than a model's positions."""
        for flag, length, limit in (
            ("--prompt", self.prompt, positions),
            ("--generated", self.generated, positions - _BEFORE_DECODE),
        ):
            if length > limit:
                raise ValueError(f"{flag} {length}: the model has {positions} positions; use {limit} at most")


@dataclass(frozen=True)
class Speed:
    """Tokens per second of one kind of work, summed over the sequences of the batch."""

    work: str
    batch: int
    rates: dict[str, tuple[float, float, float]]
    """Lower quartile, median and upper quartile, by the name of the model."""
    over_dense: dict[str, tuple[float, float, float]]
    """The same of the quotient by the dense model in neighbouring turns, of every other model."""


def load_pair(name: str, against: str | None, dtype: str = "auto") -> tuple[PreTrainedModel, PreTrainedModel]:
    """Load (packed, dense).

    Args:
        name: a packed24 folder.
        against: the dense model; None: the packed model, unpacked.
        dtype: dtype of both.

    Raises:
        ValueError: a model cannot be loaded, the first is not packed, or their sizes or dtypes differ.
    """
    other = name if against is None else against
    _require_comparable(name, other, dtype)
    packed = load_model(name, dtype, find_adapter(name, NO_ADAPTER))
    if not any(map(has_packed_weights, packed.modules())):
        raise not_packed(name)
    dense = load_model(other, dtype, find_adapter(other, NO_ADAPTER))
    if (quantizer := getattr(dense, "hf_quantizer", None)) is not None:
        quantizer.make_dense(dense)
    _require_one_dtype(name, packed.dtype, other, dense.dtype)  # a config.json may name none
    # Tensors in a mapped file may be unaligned, and not in memory yet. Positions of packed weights are buffers.
    for model in (packed, dense):
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.data = tensor.data.clone()
    return packed, dense


def _require_comparable(name: str, other: str, dtype: str) -> None:
    """Reject models of different sizes or dtypes, or a quantized one for the dense one, by what config.json says."""
    packed_config = load_config(name, name)
    dense_config = load_config(other, other)
    for key in ("vocab_size", "hidden_size", "num_hidden_layers"):
        expected = getattr(packed_config.get_text_config(), key)
        size = getattr(dense_config.get_text_config(), key)
        if size != expected:
            raise ValueError(f"{other}: {key} {size} is not the {expected} of {name}")
    quantization = vars(dense_config).get("quantization_config")
    if quantization and not is_packed_config(vars(dense_config)):
        method = quantization.get("quant_method", "quantization_config")
        raise ValueError(f"--against {other}: its weights are quantized ({method}); give the dense model")
    if dtype == "auto" and None not in (dense_config.dtype, packed_config.dtype):
        _require_one_dtype(name, packed_config.dtype, other, dense_config.dtype)


def _require_one_dtype(name: str, packed: torch.dtype, other: str, dense: torch.dtype) -> None:
    if dense != packed:
        raise ValueError(
            f"{other}: is stored in {dense}, and {name} in {packed}, so the times would compare dtypes; "
            f"give --dtype {str(packed).removeprefix('torch.')}"
        )


def not_packed(name: str) -> ValueError:
    """Return the error about a model that is not packed."""
    return ValueError(
        f"{name}: none of its weights is packed, so there is nothing to compare; pack them by sparseforge export "
        f"{shlex.quote(name)} PACKED --format packed24"
    )


def quantized(dense: PreTrainedModel, packed: PreTrainedModel, kind: str) -> PreTrainedModel:
    """Copy the dense model, and let torchao quantize the layers that the other model has packed.

    Args:
        dense: the dense model.
        packed: the packed model.
        kind: one of `RIVALS`.

    Raises:
        ValueError: torchao cannot do this here, or the model has packed experts.
    """
    flag = f"--rivals {kind}"
    from torchao import quantization

    # torchao leaves what it cannot quantize dense, in silence: the comparison would not be one.
    layers = {name for name, module in packed.named_modules() if has_packed_weights(module)}
    odd = next((name for name in layers if not isinstance(dense.get_submodule(name), nn.Linear)), None)
    if odd is not None:
        raise ValueError(f"{flag}: {odd} is no linear layer, and torchao would leave it as it is; leave the flag out")
    if kind == "int4":
        odd = next((name for name in sorted(layers) if dense.get_submodule(name).in_features % _INT4_GROUP), None)
        if odd is not None:
            raise ValueError(
                f"{flag}: the inputs of {odd} are no multiple of {_INT4_GROUP}, and torchao would leave it dense; "
                "leave the flag out"
            )
    # Quantize a copy in the layers that the packed model has packed, and in no others.
    config: Any
    try:
        if kind == "int4":
            where = "tile_packed_to_4d" if dense.device.type == "cuda" else "opaque"
            config = quantization.Int4WeightOnlyConfig(group_size=_INT4_GROUP, int4_packing_format=where)
        else:
            config = getattr(quantization, {"int8": "Int8WeightOnlyConfig", "fp8": "Float8WeightOnlyConfig"}[kind])()
        model = copy.deepcopy(dense)
        quantization.quantize_(model, config, filter_fn=lambda _, name: name in layers)
    except (ImportError, NotImplementedError) as error:  # kernels that are missing here
        reason = " ".join(str(error).split())
        raise ValueError(f"{flag}: torchao cannot quantize this model here ({reason}); leave it out") from None
    return model


def rounded(packed: PreTrainedModel, grid: Grid) -> PreTrainedModel:
    """Copy the packed model, and round its values to nearest, as an export does.

    Args:
        packed: a model whose packed values are floating point.
        grid: of the copy.

    Raises:
        ValueError: values are rounded already, or groups do not divide them; the message names the weight.
    """
    model = copy.deepcopy(packed)
    for module_name, module in model.named_modules():
        if not has_packed_weights(module):
            continue
        for buffer in [name for name, _ in module.named_buffers(recurse=False) if name.endswith(POSITIONS)]:
            name = buffer.removesuffix(POSITIONS)
            # Round the kept values of one weight, which are floating point.
            values = getattr(module, name).detach()
            if getattr(module, name + SCALE, None) is not None:
                raise ValueError(
                    f"{module_name}.{name}: its values are rounded; leave --values out, or give a folder in bf16"
                )
            axis = packed24_axis(tuple(values.shape), tuple(getattr(module, buffer).shape))
            try:
                codes, scale = round_values(values, axis, grid)
            except ValueError as error:
                raise ValueError(f"{module_name}.{name}: {error}") from None
            if values.stride(axis) == 1:  # GPT-2's inputs are contiguous in memory
                codes = codes.transpose(-1, axis).contiguous().transpose(-1, axis)
                scale = scale.transpose(-1, axis).contiguous().transpose(-1, axis)
            # Store the codes in the place of the values, as a loaded export has them.
            setattr(module, name, nn.Parameter(codes, requires_grad=False))
            module.register_buffer(name + SCALE, scale)
    return model


@torch.inference_mode()
def measure(models: dict[str, PreTrainedModel], workload: Workload) -> list[Speed]:
    """Measure prefill and decode of all models at each batch size, in turns.

    Args:
        models: by name; "dense" is the one that others are compared with.
        workload: sizes.

    Raises:
        ValueError: the workload has more tokens than a model has positions.
    """
    workload.require_positions(min(max_positions(model.config) for model in models.values()))
    # Turns of all models, for each kind of work and batch size.
    speeds = []
    bar = tqdm(total=2 * len(workload.batches) * (workload.repeats + 1), unit=" turns", disable=None)
    for work, run in (("prefill", _prefill), ("decode", _decode)):
        for batch in workload.batches:
            bar.set_description(f"{work}, batch {batch}")
            rates: dict[str, list[float]] = {name: [] for name in models}
            for turn in range(workload.repeats + 1):
                for name, model in models.items():
                    rate = run(model, batch, workload)
                    if turn:  # the first one warms up
                        rates[name].append(rate)
                bar.update()
            speeds.append(speed_of(work, batch, rates))
    bar.close()
    return speeds


def speed_of(work: str, batch: int, rates: dict[str, list[float]]) -> Speed:
    """Summarize the tokens per second of neighbouring turns, by the name of the model; "dense" is one of them."""
    quotients = {
        name: [rate / dense for rate, dense in zip(of_model, rates["dense"], strict=True)]
        for name, of_model in rates.items()
        if name != "dense"
    }
    return Speed(
        work,
        batch,
        {name: quartiles(of_model) for name, of_model in rates.items()},
        {name: quartiles(of_model) for name, of_model in quotients.items()},
    )


def report(
    models: dict[str, PreTrainedModel],
    folders: dict[str, str],
    workload: Any,
    speeds: list[Speed],
    engine: str = "eager",
) -> dict[str, Any]:
    """Return all measurements as JSON.

    Args:
        models: what was measured, by name; "dense" and "packed" are among them.
        folders: where a model comes from, by name, or a description.
        workload: dataclass with the sizes of the measurement.
        speeds: its results.
        engine: key of `ENGINES`.
    """
    packed = models["packed"]
    device = packed.device
    return {
        "format": 2,
        "models": {
            name: {
                "model": folders[name],
                "resident_bytes": resident(model),
                "disk_bytes": _on_disk(folders[name]),
            }
            for name, model in models.items()
        },
        "dtype": str(packed.dtype).removeprefix("torch."),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or "cpu",
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda if device.type == "cuda" else None,
        "engine": engine,
        "workload": asdict(workload),
        "speeds": [asdict(speed) for speed in speeds],
        "paper": PAPER,
    }


def table(measured: dict[str, Any]) -> str:
    """Format a report as Markdown: medians of tokens per second, and the quotients by the dense model."""
    models = measured["models"]
    others = [name for name in models if name != "dense"]
    lines = [
        f"{measured['device']}, {measured['threads']} threads, {measured['dtype']}, torch {measured['torch']}, "
        f"{ENGINES[measured['engine']]}; tokens per second, medians, the speed-up with its quartiles",
        "",
        f"| | batch | dense | {' | '.join(f'{name} | {name} / dense' for name in others)} |",
        "|---" * (3 + 2 * len(others)) + "|",
    ]
    # Bytes in memory and on disk; a model of the hub's cache, or one made here, has none on disk.
    for kind in ("resident", "disk"):
        sizes = {name: model[f"{kind}_bytes"] for name, model in models.items()}
        dense = sizes["dense"]
        cells = ["-" if dense is None else f"{dense / 1e6:.1f}"]
        for name in others:
            size = sizes[name]
            cells.append("-" if size is None else f"{size / 1e6:.1f}")
            cells.append("-" if size is None or dense is None else f"{size / dense:.3f}")
        lines.append(f"| MB {kind} | | {' | '.join(cells)} |")
    # Tokens per second.
    for speed in measured["speeds"]:
        cells = [f"{speed['rates']['dense'][1]:.4g}"]
        for name in others:
            low, middle, high = speed["over_dense"][name]
            cells += [f"{speed['rates'][name][1]:.4g}", f"{middle:.2f} ({low:.2f} to {high:.2f})"]
        lines.append(f"| {speed['work']} | {speed['batch']} | {' | '.join(cells)} |")
    return "\n".join([*lines, "", measured["paper"]])


def draw(measured: dict[str, Any], file: BinaryIO) -> None:
    """Draw tokens per second of all models with quartiles as a PNG, in a panel for each kind of work."""
    from matplotlib.figure import Figure  # an extra

    speeds = measured["speeds"]
    works = list(dict.fromkeys(speed["work"] for speed in speeds))
    figure = Figure(figsize=(4.5 * len(works), 3.6), layout="constrained")
    for axes, work in zip(figure.subplots(1, len(works), squeeze=False)[0], works, strict=True):
        rows = [speed for speed in speeds if speed["work"] == work]
        # A bar a model at each batch size, with quartiles, and the speed-up written into it.
        names = list(rows[0]["rates"])
        width = 0.8 / len(names)
        for number, name in enumerate(names):
            low, middle, high = zip(*(row["rates"][name] for row in rows), strict=True)
            below = [m - lo for m, lo in zip(middle, low, strict=True)]
            above = [hi - m for m, hi in zip(middle, high, strict=True)]
            abscissas = [index + (number + 0.5) * width - 0.4 for index in range(len(rows))]
            axes.bar(abscissas, middle, width, yerr=(below, above), capsize=3, label=name)
            for abscissa, row in zip(abscissas, rows, strict=True):
                if name != "dense":
                    speedup = f"{row['over_dense'][name][1]:.2f}x"
                    axes.annotate(speedup, (abscissa, 0), ha="center", va="bottom", color="white")
        axes.set(title=work, xlabel="sequences at once", ylabel="tokens per second")
        axes.set_xticks(range(len(rows)), [str(row["batch"]) for row in rows])
        axes.legend()
    figure.savefig(file, format="png", dpi=130)


def _prefill(model: PreTrainedModel, batch: int, workload: Workload) -> float:
    """Return the tokens per second of reading a prompt."""
    ids = tokens_of(model, batch, workload.prompt)
    began = now(model)
    model(ids, use_cache=True, logits_to_keep=1)
    return batch * workload.prompt / (now(model) - began)


def _decode(model: PreTrainedModel, batch: int, workload: Workload) -> float:
    """Return the tokens per second of writing after a short prompt."""
    output = model(tokens_of(model, batch, _BEFORE_DECODE), use_cache=True)
    began = now(model)
    for _ in range(workload.generated):
        ids = output.logits[:, -1:].argmax(-1)
        output = model(ids, **{CACHE: getattr(output, CACHE)}, use_cache=True)
    return batch * workload.generated / (now(model) - began)


def tokens_of(model: PreTrainedModel, batch: int, length: int) -> Tensor:
    """Return (batch, length) random tokens on the model's device, the same at every call."""
    generator = torch.Generator().manual_seed(0)
    size = model.config.get_text_config().vocab_size
    return torch.randint(size, (batch, length), generator=generator).to(model.device)


def now(model: PreTrainedModel) -> float:
    """Wait for the model's device to finish its work, and return the time in seconds."""
    if model.device.type == "cuda":
        torch.cuda.synchronize(model.device)
    return time.perf_counter()


def quartiles(values: list[float]) -> tuple[float, float, float]:
    """Return the lower quartile, the median and the upper quartile."""
    if len(values) == 1:
        return values[0], values[0], values[0]
    low, _, high = quantiles(values, n=4, method="inclusive")
    return low, median(values), high


def resident(model: PreTrainedModel) -> int:
    """Return the bytes of a model's tensors in memory."""
    storages = {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
        for parameter in (*model.parameters(), *model.buffers())
        for tensor in _plain(parameter)
    }
    return sum(storages.values())


def _plain(tensor: Tensor) -> Iterator[Tensor]:
    """Yield the plain tensors that a tensor is made of: itself, or those inside one of torchao's."""
    if not hasattr(tensor, "__tensor_flatten__"):
        yield tensor
        return
    for name in tensor.__tensor_flatten__()[0]:
        yield from _plain(getattr(tensor, name))


def _on_disk(name: str) -> int | None:
    """Return the bytes of a model's weights on disk, or None for a model of the hub's cache."""
    files = list(Path(name).glob("*.safetensors")) if Path(name).is_dir() else []
    return sum(file.stat().st_size for file in files) or None
