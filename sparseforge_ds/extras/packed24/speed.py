"""Speed and memory of a packed 2:4 model against the dense model, and against torchao's quantized forms of that one.

All models are in one process and are measured in turns, so that other load on the machine affects all. A speed-up is
the median quotient of neighbouring turns.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median, quantiles
from typing import Any, BinaryIO

import torch
from torch import Tensor
from tqdm import tqdm
from transformers import PreTrainedModel

from sparseforge_ds.evaluate.perplexity import max_positions
from sparseforge_ds.transformers_internals import CACHE

PAPER = (
    "the paper (arXiv 2605.06402) reports 1.40x to 1.44x the dense model's speed and 0.58x its memory, on an H800 with "
    "TensorRT-LLM; those are other kernels on another machine, and are not measured here"
)

ENGINES = {"eager": "eager, where a small batch on a GPU waits for the host", "graph": "in CUDA graphs"}
"""Descriptions of `--engine`, for the table."""
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
