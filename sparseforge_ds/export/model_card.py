"""Model card (README.md) of an exported folder: the content of its `sparsity.json`, its run and its scores.

Scores that are measured later come from `sparseforge_ds.export.card_scores.read_results`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult, ModelCard, ModelCardData
from transformers import CONFIG_MAPPING
from yaml import YAMLError

from sparseforge_ds.checkpoint.disk import atomic_file
from sparseforge_ds.checkpoint.folder import read_json_object
from sparseforge_ds.export.adapter import ADAPTER_CONFIG, adapter_rank
from sparseforge_ds.export.card_scores import result_of_run
from sparseforge_ds.export.model_folder import describe_values
from sparseforge_ds.export.source import origin_sections, recorded_config
from sparseforge_ds.export.stored import listed_weights, read_sparsity
from sparseforge_ds.mask.pattern import parse_pattern
from sparseforge_ds.model.hub_access import REPOSITORY
from sparseforge_ds.model.registration import load_config, model_class, register_model_classes
from sparseforge_ds.model.stored_config import is_packed_config
from sparseforge_ds.packed_format.packed_values import require_grid

NAME = "README.md"
_TEMPLATE = Path(__file__).parents[1] / "assets" / "model_card.md"
_LINKED = re.compile(rf"{REPOSITORY.pattern}(:[\w./-]+)?", re.ASCII)
"""Names that become links: a repository, perhaps with a part of it."""
_HARMLESS = re.compile(r"[\w .,:;+=%()/-]*")
"""Text that is not Markdown."""
_LONGEST = 200
"""Most characters of a value."""
_OURS = "<!-- made by `sparseforge card`; without this line it is left alone -->"
"""Line that marks a card as ours."""


def make_card(
    folder: Path,
    results: Sequence[EvalResult] = (),
    license: str | None = None,
    name: str | None = None,
    base_model: str | None = None,
) -> ModelCard:
    """Make the card of a folder that `consolidate` or `export` wrote.

    Args:
        folder: with `sparsity.json`.
        results: scores beside that of the run.
        license: of the model.
        name: owner/name on the hub.
        base_model: owner/name of the dense model there; None takes what `sparsity.json` names.

    Raises:
        ValueError: `sparsity.json` is missing or damaged, or `base_model` is no name on the hub.
    """
    if base_model is not None and not REPOSITORY.fullmatch(base_model):
        raise ValueError(f"--base_model {base_model}: give owner/name, as the hub has it")
    record = read_sparsity(folder)
    config = read_json_object(folder / "config.json")
    weights, _, _ = listed_weights(folder, record)
    sections = origin_sections(folder / "sparsity.json", record)
    run = sections["run"]
    pattern = str(parse_pattern(str(record.get("pattern"))))
    # The run's own score comes first, and each only once.
    of_run = result_of_run(run.get("evaluation"))
    all_results = list(of_run)
    for result in results:
        if result not in all_results and _is_number(result.metric_value):
            all_results.append(result)
    loader = _loader(folder, config)
    # Metadata that the hub reads.
    model = base_model or run.get("model")
    title = f"{_plain(Path(model or 'A model').name)} {pattern}"
    texts = run.get("dataset") or []
    data = ModelCardData(
        model_name=title,
        base_model=model if REPOSITORY.fullmatch(model or "") else None,
        datasets=sorted({text.partition(":")[0] for text in texts if _LINKED.fullmatch(text)}) or None,
        library_name="transformers",
        license=license,
        pipeline_tag="text-generation" if loader == "AutoModelForCausalLM" else None,
        tags=["sparse", pattern, *(["sparseforge"] if "method" in sections["config"] else [])],
        eval_results=all_results or None,
    )
    # The text, from a template.
    packed = is_packed_config(config)
    settings = recorded_config(folder, sections["config"])
    branched = bool(config["quantization_config"].get("low_rank")) if packed else (folder / ADAPTER_CONFIG).is_file()
    return ModelCard.from_template(
        data,
        template_path=str(_TEMPLATE),
        title=title,
        pattern=pattern,
        model=model,
        ours="method" in sections["config"],
        finished=record.get("finished"),
        step=record.get("step"),
        weights=len(weights),
        loader=loader,
        packed=packed,
        branched=branched,
        shifted=settings is not None and settings.moves_weights_into_branches,
        learned=settings is not None and settings.low_rank is not None and settings.low_rank.learned,
        rank=adapter_rank(folder) if branched and not packed else 0,
        training=_training(record, sections, config),
        evaluation=[_row(result) for result in all_results],
        folder=name or "THIS_FOLDER",
        link=_link,
        mark=_OURS,
    )


def _loader(folder: Path, config: dict[str, Any]) -> str:
    """Return the class that loads a model with its head: a classifier would get a random one as a causal model."""
    register_model_classes()
    if config.get("model_type") not in CONFIG_MAPPING:  # of a package that is not here
        return "AutoModelForCausalLM"
    return str(model_class(load_config(folder, str(folder))).__name__)


def write_card(
    folder: Path,
    results: Sequence[EvalResult] = (),
    license: str | None = None,
    name: str | None = None,
    base_model: str | None = None,
) -> bool:
    """Write README.md, unless there is one that somebody else wrote.

    Without results, a license or a base model, those of our card that is there stay. Arguments are as in `make_card`.

    Returns:
        True if the card was written.

    Raises:
        ValueError: the metadata of our card that is there is damaged.
    """
    # Leave somebody else's file alone; take from our own what is not given now.
    path = folder / NAME
    other_bases: list[str] = []
    if path.is_file():
        if _OURS not in (text := path.read_text(errors="replace")):
            return False
        previous = _metadata(text, path)
        license = license or previous.license
        results = results or previous.eval_results or ()
        if base_model is None and isinstance(previous.base_model, str):
            base_model = previous.base_model
        elif base_model is None and isinstance(previous.base_model, list):
            other_bases = previous.base_model
    card = make_card(folder, results, license, name, base_model)
    if other_bases:
        card.data["base_model"] = other_bases
    with atomic_file(path) as file:
        file.write(str(card).encode())
    return True


def _metadata(text: str, path: Path) -> ModelCardData:
    """Return the metadata of a card of ours, which the hub reads."""
    try:
        data = ModelCard(text).data
    except (TypeError, ValueError, YAMLError) as error:
        headline = str(error).splitlines()[0]
        raise ValueError(f"{path}: its metadata is damaged ({headline:.200}); delete the file") from None
    assert isinstance(data, ModelCardData)
    return data


def _quantization(settings: Any) -> str | None:
    """Return a row about weights that were trained quantized, or None."""
    if not isinstance(settings, dict):
        return None
    group_size = settings.get("group_size")
    owner = "an output" if group_size is None else f"{group_size} kept weights"
    return f"{settings.get('bits')} bits, a scale for {owner}"


def _rounding(record: dict[str, Any], stored: dict[str, Any]) -> dict[str, str]:
    """Return rows about the values of a packed model that were rounded after training; `stored` is its config.json."""
    settings = stored.get("quantization_config")
    grid = require_grid(settings.get("values"), settings.get("group_size")) if isinstance(settings, dict) else None
    errors = {name: row.get("error") for name, row in record["weights"].items()}
    if grid is None or not all(map(_is_number, errors.values())):
        return {}
    rows = {"rounded after training, to nearest": describe_values(grid, errors).removeprefix("values: ")}
    compared = record.get("compared")
    if isinstance(compared, dict) and _is_number(compared.get("kl")):
        measured_on = f"{compared.get('tokens')} tokens of {Path(str(compared.get('text'))).name}"
        rows["KL to the model without rounding"] = f"{compared['kl']:.5f} nats a token on {measured_on}"
    return rows


def _training(
    record: dict[str, Any], sections: dict[str, dict[str, Any]], stored: dict[str, Any]
) -> list[tuple[str, str]]:
    """Return the rows of the table of settings, as Markdown."""
    run = sections["run"]
    config = sections["config"]
    method = config.get("method")
    # A model that was pruned without a run has the settings of that in place of a method.
    start = sections["source"].get("start")
    pruned = start if isinstance(start, dict) else {}
    if pruned:
        method = "sparseforge prune, block by block"
    tokens = run.get("tokens")
    teacher = run.get("teacher")
    values = {
        "method": method.get("name") if isinstance(method, dict) else method,
        "pattern": record.get("pattern"),
        "importance": None if pruned else config.get("importance"),
        "quantization": _quantization(config.get("quantize")),
        **({} if config.get("quantize") or not is_packed_config(stored) else _rounding(record, stored)),
        "first masks": pruned.get("mask"),
        "share of steps with soft masks": pruned.get("soft") if pruned.get("epochs") else None,
        "epochs": pruned.get("epochs"),
        "rate, relative to the weights": pruned.get("rate") if pruned.get("epochs") else None,
        "steps": record.get("step"),
        "tokens": f"{tokens:,}" if isinstance(tokens, int) else None,
    }
    rows = {name: _plain(value) for name, value in values.items() if value is not None}
    rows["text"] = ", ".join(map(_link, run.get("dataset") or []))
    rows["teacher"] = _link(teacher) if isinstance(teacher, str) else ""
    shown_settings = {"seq_length": "seq length", "global_batch": "global batch", "learning_rate": "learning rate"}
    shown_settings |= {"lr_scheduler_type": "schedule of the rate", "lr_scheduler_kwargs": "settings of the schedule"}
    settings = {shown: run.get(name) for name, shown in shown_settings.items()}
    rows |= {name: _plain(value) for name, value in settings.items() if value is not None}
    rows["dtype"] = _plain(record.get("dtype"))
    return [(name, shown) for name, shown in rows.items() if shown]


def _row(result: EvalResult) -> tuple[str, str]:
    """Return a score as a row of the card's table: name and value."""
    arguments = ", ".join(f"{_plain(key)} {_plain(value)}" for key, value in (result.dataset_args or {}).items())
    return (
        f"{_plain(result.metric_name or result.metric_type)}, {_plain(result.dataset_name)}",
        f"{result.metric_value:g} {f'({arguments})' if arguments else ''}",
    )


def _link(name: str) -> str:
    """Return a link to a repository on the hub, or the name as code if it is none."""
    hub, _, _ = name.partition(":")
    return f"[{name}](https://huggingface.co/{hub})" if _LINKED.fullmatch(name) else _code(name)


def _plain(value: object) -> str:
    """Return a value from a file as one line of text in which Markdown finds no link and no HTML."""
    text = str(value)
    harmless = _HARMLESS.fullmatch(text) and len(text) <= _LONGEST and "://" not in text and "www." not in text.lower()
    return text if harmless else _code(text)


def _is_number(value: object) -> bool:
    """Return True if a score is a finite number; somebody may have changed README.md."""
    try:
        return isinstance(value, (int, float)) and math.isfinite(value)
    except OverflowError:  # an integer that no float holds
        return False


def _code(text: str) -> str:
    """Return text as code, in which nothing is a link or HTML, on one line and not too long."""
    shown = "".join(letter if letter.isprintable() else " " for letter in text).replace("`", "'").replace("|", " ")
    return f"`{' '.join(shown.split())[:_LONGEST]}`" if shown.strip() else ""
