"""How fast a packed 2:4 model reads and writes text, and what memory it holds, against the dense model.

Both are in one process and are measured in turns, so that whatever else the machine does meets both; a speed-up is the
median of the quotients of neighbours.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm
from transformers import PreTrainedModel

from sparseforge_ds.evaluate.finished_model import NO_ADAPTER, find_adapter, load_model
from sparseforge_ds.evaluate.perplexity import max_positions
from sparseforge_ds.mask.packing import is_packed
from sparseforge_ds.transformers_internals import CACHE

PAPER = (
    "the paper (arXiv 2605.06402) reports 1.40x to 1.44x the dense model's speed and 0.58x its memory, on an H800 with "
    "TensorRT-LLM; those are other kernels on another machine, and are not measured here"
)

ENGINES = {"eager": "eager, where a small batch on a GPU waits for the host", "graph": "in CUDA graphs"}
"""Descriptions of `--engine`, for the table."""
_BEFORE_DECODE = 16
"""Tokens of the prompt that decode goes on from."""


@dataclass(frozen=True)
class Workload:
    """What is measured."""

    batches: Sequence[int] = (1, 4)
    prompt: int = 512
    """Tokens of each sequence that prefill reads."""
    generated: int = 16
    """Tokens that decode writes, one after the other, behind a prompt of 16."""
    repeats: int = 5
    """Turns; the first one is not counted."""


@dataclass(frozen=True)
class Speed:
    """Tokens per second of one kind of work, over all sequences of the batch."""

    work: str
    batch: int
    dense: tuple[float, float, float]
    """Lower quartile, median, upper quartile."""
    packed: tuple[float, float, float]
    speedup: tuple[float, float, float]
    """Packed over dense, of neighbouring turns."""


def load_pair(name: str, against: str | None, dtype: str = "auto") -> tuple[PreTrainedModel, PreTrainedModel]:
    """(packed, dense): the model of a packed24 folder, and `against` or what it is without packing. Raises ValueError
    where one cannot be loaded, the first is not packed, or they are not of one size."""
    packed = load_model(name, dtype, find_adapter(name, NO_ADAPTER))
    if not any(map(is_packed, packed.modules())):
        raise ValueError(
            f"{name}: no weight of it is packed, there is nothing to compare; sparseforge export {name} PACKED "
            "--format packed24 makes it so"
        )
    other = name if against is None else against
    dense = load_model(other, dtype, find_adapter(other, NO_ADAPTER))
    if getattr(dense, "hf_quantizer", None) is not None:
        dense.hf_quantizer.make_dense(dense)
    mine, theirs = packed.config.get_text_config(), dense.config.get_text_config()
    for key in ("vocab_size", "hidden_size", "num_hidden_layers"):
        if getattr(mine, key) != getattr(theirs, key):
            raise ValueError(f"{other}: {key} {getattr(theirs, key)} is not the {getattr(mine, key)} of {name}")
    for model in (packed, dense):
        for parameter in model.parameters():
            parameter.data = parameter.data.clone()  # of a mapped file, neither aligned nor in memory yet
    return packed, dense


@torch.inference_mode()
def measure(packed: PreTrainedModel, dense: PreTrainedModel, workload: Workload) -> list[Speed]:
    """Prefill and decode of both models at each batch size, in turns. Raises ValueError for more tokens than a model
    has positions."""
    positions = min(max_positions(model.config) for model in (packed, dense))
    for flag, length, most in (
        ("--prompt", workload.prompt, positions),
        ("--generated", workload.generated, positions - _BEFORE_DECODE),
    ):
        if length > most:
            raise ValueError(f"{flag} {length}: the model has {positions} positions; use {most} at most")
    found = []
    bar = tqdm(total=2 * len(workload.batches) * (workload.repeats + 1), unit=" turns", disable=None)
    for work, run in (("prefill", _prefill), ("decode", _decode)):
        for batch in workload.batches:
            bar.set_description(f"{work}, batch {batch}")
            rates: dict[str, list[float]] = {"dense": [], "packed": []}
            for turn in range(workload.repeats + 1):
                for name, model in (("dense", dense), ("packed", packed)):
                    rate = run(model, batch, workload)
                    if turn:
                        rates[name].append(rate)
                bar.update()
            quotients = [mine / theirs for mine, theirs in zip(rates["packed"], rates["dense"], strict=True)]
            found.append(Speed(work, batch, *map(quartiles, (rates["dense"], rates["packed"], quotients))))
    bar.close()
    return found


def report(
    packed: PreTrainedModel,
    dense: PreTrainedModel,
    names: tuple[str, str],
    workload: Any,
    speeds: list[Speed],
    engine: str = "eager",
) -> dict[str, Any]:
    """Everything that was measured, for a JSON file; `workload` is a dataclass of what was."""
    device = packed.device
    return {
        "format": 1,
        "packed": {"model": names[0], "resident_bytes": resident(packed), "disk_bytes": _on_disk(names[0])},
        "dense": {"model": names[1], "resident_bytes": resident(dense), "disk_bytes": _on_disk(names[1])},
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
    """The report for people: medians, and quartiles of the speed-up."""
    packed, dense = measured["packed"], measured["dense"]
    lines = [
        f"{measured['device']}, {measured['threads']} threads, {measured['dtype']}, torch {measured['torch']}, "
        f"{ENGINES[measured['engine']]}; tokens per second, medians, the speed-up with its quartiles",
        "",
        "| | batch | dense | packed | packed / dense |",
        "|---|---|---|---|---|",
    ]
    for kind in ("resident", "disk"):
        mine, theirs = packed[f"{kind}_bytes"], dense[f"{kind}_bytes"]
        cells = ["-" if size is None else f"{size / 1e6:.1f}" for size in (theirs, mine)]
        cells.append("-" if mine is None or theirs is None else f"{mine / theirs:.3f}")
        lines.append(f"| MB {kind} | | {' | '.join(cells)} |")
    for speed in measured["speeds"]:
        low, middle, high = speed["speedup"]
        tokens = f"{speed['dense'][1]:.4g} | {speed['packed'][1]:.4g}"
        lines.append(f"| {speed['work']} | {speed['batch']} | {tokens} | {middle:.2f} ({low:.2f} to {high:.2f}) |")
    return "\n".join([*lines, "", measured["paper"]])


def draw(measured: dict[str, Any], path: Path) -> None:
    """Tokens per second of both models, a panel for prefill and one for decode, with quartiles, as a PNG."""
    from matplotlib.figure import Figure  # an extra

    speeds = measured["speeds"]
    works = list(dict.fromkeys(speed["work"] for speed in speeds))
    figure = Figure(figsize=(4.5 * len(works), 3.6), layout="constrained")
    for axes, work in zip(figure.subplots(1, len(works), squeeze=False)[0], works, strict=True):
        rows = [speed for speed in speeds if speed["work"] == work]
        for offset, name in ((-0.2, "dense"), (0.2, "packed")):
            low, middle, high = zip(*(row[name] for row in rows), strict=True)
            below = [m - lo for m, lo in zip(middle, low, strict=True)]
            above = [hi - m for m, hi in zip(middle, high, strict=True)]
            at = [place + offset for place in range(len(rows))]
            axes.bar(at, middle, 0.4, yerr=(below, above), capsize=3, label=name)
        for place, row in enumerate(rows):
            axes.annotate(f"{row['speedup'][1]:.2f}x", (place + 0.2, 0), ha="center", va="bottom", color="white")
        axes.set(title=work, xlabel="sequences at once", ylabel="tokens per second")
        axes.set_xticks(range(len(rows)), [str(row["batch"]) for row in rows])
        axes.legend()
    figure.savefig(path, dpi=130)


def _prefill(model: PreTrainedModel, batch: int, workload: Workload) -> float:
    ids = tokens_of(model, batch, workload.prompt)
    began = now(model)
    model(ids, use_cache=True, logits_to_keep=1)
    return batch * workload.prompt / (now(model) - began)


def _decode(model: PreTrainedModel, batch: int, workload: Workload) -> float:
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
    """Return the time in seconds when the model's device has done all that it was given."""
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
        for tensor in (*model.parameters(), *model.buffers())
    }
    return sum(storages.values())


def _on_disk(name: str) -> int | None:
    """None for a model of the hub's cache, and for one that is not on disk as it was measured."""
    files = list(Path(name).glob("*.safetensors")) if Path(name).is_dir() else []
    return sum(file.stat().st_size for file in files) or None
