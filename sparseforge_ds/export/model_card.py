"""Model card (README.md) of an exported folder: the content of its `sparsity.json`, its run and its scores.

Scores that are measured later come from the JSON files of `sparseforge evaluate`.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import huggingface_hub
from huggingface_hub import CommitOperationAdd, EvalResult, ModelCard, ModelCardData
from huggingface_hub.errors import HTTPError
from yaml import YAMLError

from sparseforge_ds.checkpoint.disk import atomic_file, json_bytes
from sparseforge_ds.checkpoint.folder import read_json_object
from sparseforge_ds.checkpoint.model_files import check_links
from sparseforge_ds.export.adapter import ADAPTER_CONFIG, adapter_rank
from sparseforge_ds.export.model_folder import describe_values
from sparseforge_ds.export.source import origin_sections, recorded_config
from sparseforge_ds.export.stored import listed_weights
from sparseforge_ds.mask.pattern import parse_pattern
from sparseforge_ds.model.hub_access import HUB_ID, REPOSITORY, public_name
from sparseforge_ds.model.stored_config import is_packed_config
from sparseforge_ds.packed_format.packed_values import require_grid

NAME = "README.md"
_TEMPLATE = Path(__file__).parents[1] / "assets" / "model_card.md"
_LINKED = re.compile(rf"{REPOSITORY.pattern}(:[\w./-]+)?", re.ASCII)
"""Names that become links: a repository, perhaps with a part of it."""
_HARMLESS = re.compile(r"[\w .,:;+=%()/-]*")
"""Text that is not Markdown."""
KL = "KL to dense, nats a token"
"""Metric of a text on which a model was compared with the dense one."""
_LONGEST = 200
"""Most characters of a value."""
_LARGEST_LOSS = 88.0
"""Nats per token. The perplexity of a larger loss overflows fp32."""
_OURS = "<!-- made by `sparseforge card`; without this line it is left alone -->"
"""Line that marks a card as ours."""


def read_results(paths: Iterable[str | Path], folder: Path, name: str | None = None) -> list[EvalResult]:
    """Read scores from files that `sparseforge evaluate` wrote by `--json`.

    Args:
        paths: of the files.
        folder: with the model that was measured.
        name: of that model on the hub.

    Raises:
        ValueError: a file is missing, damaged, or has the scores of another model.
    """
    results = []
    for path in paths:
        if not Path(path).exists():
            raise ValueError(f"--results {path}: no such file; give what sparseforge evaluate writes by --json")
        content = read_json_object(Path(path))
        try:
            results += _results_in(content)
        except (LookupError, TypeError, AttributeError, ValueError) as error:
            raise ValueError(f"--results {path}: damaged ({error!r:.200}); measure again") from None
        if not {"perplexity", "zero_shot", "generation"} & content.keys():
            raise ValueError(f"--results {path}: is no result of sparseforge evaluate; give what it writes by --json")
        if (mismatch := _mismatch(content, folder, name)) is not None:
            raise ValueError(f"--results {path}: {mismatch}; give what sparseforge evaluate {folder} writes by --json")
    return results


def _results_in(content: dict[str, Any]) -> list[EvalResult]:
    """Return the scores in one file of `sparseforge evaluate`."""
    results = []
    # Perplexities, of one text or of several.
    single_text = [] if content.get("perplexity") is None else [content["perplexity"]]
    for row in content.get("texts", single_text):
        conditions = {"dtype": content.get("dtype"), **row}
        arguments = {
            key: conditions[key]
            for key in ("protocol", "seq_length", "stride", "limit", "max_tokens", "dtype")
            if conditions.get(key)
        }
        text = public_name(row["text"])
        results.append(_result("text-generation", text, "perplexity", row["perplexity"], arguments))
        if row.get("kl") is not None:
            results.append(_result("text-generation", text, KL, row["kl"], arguments))
    # Accuracies of tasks, and lengths of generated answers.
    for part, kind in (("zero_shot", "multiple-choice"), ("generation", "text-generation")):
        section = content.get(part) or {"tasks": {}}
        limit = {"limit": section["limit"]} if section.get("limit") else {}
        for task, row in section["tasks"].items():
            chosen = ("acc", "acc_norm") if part == "zero_shot" else [key for key in row if _is_of_answers(key, row)]
            results += [_result(kind, task, metric, row[metric], limit) for metric in chosen if metric in row]
    return results


def _is_of_answers(key: str, row: dict[str, Any]) -> bool:
    """Return whether a number of a task is a metric, which has a standard error, or about the length of answers."""
    name, comma, answer_filter = key.partition(",")
    return key in ("answer_tokens", "cut_at_limit") or f"{name}_stderr{comma}{answer_filter}" in row


def _mismatch(content: dict[str, Any], folder: Path, name: str | None) -> str | None:
    """Return the reason why scores are not those of the model in a folder, or None if they are."""
    model = content.get("model")
    adapter = content.get("adapter")
    if content.get("one_shot") is not None:
        return f"its scores are of {model} after --one_shot {content['one_shot']}"
    if not _means_folder(model, folder, name):
        return f"its scores are of {model}, and not of {folder}{'' if name is None else f' or {name}'}"
    if adapter is None and (folder / ADAPTER_CONFIG).is_file():
        return f"its scores are of {model} without the low-rank adapter that belongs to it"
    if adapter is not None and not ((folder / ADAPTER_CONFIG).is_file() and _means_folder(adapter, folder, name)):
        return f"its scores are of {model} with another adapter, {adapter}"
    return None


def _means_folder(model: Any, folder: Path, name: str | None) -> bool:
    """Return True if the model of a result is the one in a folder, which is `name` on the hub.

    A path that does not exist here may have been moved, or be another machine's. Its last part decides then, unless the
    dense model has the same.
    """
    if not isinstance(model, str):
        return False
    if model == name:
        return True
    if Path(model).exists():
        return Path(model).resolve() == folder.resolve()
    run = _record(folder).get("run")
    dense = run.get("model") if isinstance(run, dict) else None
    return Path(model).name == folder.resolve().name and dense not in (model, Path(model).name)


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
    record = _record(folder)
    config = read_json_object(folder / "config.json")
    weights, _, _ = listed_weights(folder, record)
    sections = origin_sections(folder / "sparsity.json", record)
    run = sections["run"]
    pattern = str(parse_pattern(str(record.get("pattern"))))
    # The run's own score comes first, and only once.
    of_run = _run_result(run.get("evaluation"))
    measured_later = (result for result in results if result not in of_run and _is_number(result.metric_value))
    all_results = [*of_run, *measured_later]
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
        pipeline_tag="text-generation",
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


def _record(folder: Path) -> dict[str, Any]:
    """Return the content of a folder's `sparsity.json`."""
    if not (folder / "sparsity.json").is_file():
        raise ValueError(f"{folder}: has no sparsity.json; give a folder that consolidate or export wrote")
    return read_json_object(folder / "sparsity.json")


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


def require_hub_name(name: str) -> None:
    """Reject a value of `--push` that is no name on the hub."""
    if not REPOSITORY.fullmatch(name):
        raise ValueError(f"--push {name}: give owner/name")


def push(folder: Path, name: str, private: bool = False) -> str:
    """Upload a folder to the hub as a model, which is created if it does not exist, and return its address.

    Raises:
        ValueError: the hub refuses, or a link leads out of the folder.
    """
    require_hub_name(name)
    check_links(folder, everything=True)
    changed = _with_base(folder, name) if (folder / ADAPTER_CONFIG).is_file() else {}
    message = "Upload by sparseforge card"
    try:
        api = huggingface_hub.HfApi()
        address = api.create_repo(name, private=private, exist_ok=True)
        # The adapter comes before the weights, which compute nonsense without it.
        if changed:
            additions = [CommitOperationAdd(file, content) for file, content in changed.items()]
            api.create_commit(name, additions, commit_message=message)
        api.upload_folder(repo_id=name, folder_path=folder, commit_message=message, ignore_patterns=list(changed))
    except (HTTPError, ValueError, OSError) as error:
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise ValueError(
            f"--push {name}: the hub did not take it ({reason[0][:300]}); check name, network and token (hf auth login)"
        ) from None
    return str(address)


def _with_base(folder: Path, name: str) -> dict[str, bytes]:
    """Return the files that differ on the hub: its adapter names the model there, where transformers gets the weights.

    The folder itself stays as it is, with the adapter of the weights beside it.
    """
    adapter = {**read_json_object(folder / ADAPTER_CONFIG), "base_model_name_or_path": name}
    files = {ADAPTER_CONFIG: json_bytes(adapter)}
    record = _record(folder)
    if "adapter_config_sha256" in record:
        digest = hashlib.sha256(files[ADAPTER_CONFIG]).hexdigest()
        files["sparsity.json"] = json_bytes({**record, "adapter_config_sha256": digest})
    return files


def _result(task: str, name: str, metric: str, value: float, arguments: dict[str, Any]) -> EvalResult:
    """Return one score as the hub's metadata has it."""
    if not math.isfinite(float(value)):
        raise ValueError(f"{metric} is {value}")
    kind = name if HUB_ID.fullmatch(name) else re.sub(r"[^\w.-]+", "-", name)
    return EvalResult(
        task_type=task,
        dataset_type=kind,
        dataset_name=name,
        metric_type="accuracy" if metric.startswith("acc") else "kl" if metric == KL else metric,
        metric_name=metric,
        metric_value=round(float(value), 6),
        dataset_args=arguments or None,
    )


def _run_result(score: Any) -> list[EvalResult]:
    """Return the score of the exported step that the run itself measured, if there is one."""
    loss = score.get("loss") if isinstance(score, dict) else None
    if not isinstance(loss, (int, float)) or not 0 <= loss <= _LARGEST_LOSS:  # a run may have diverged
        return []
    arguments = {key: score[key] for key in ("sequences", "seq_length") if isinstance(score.get(key), int)}
    text = public_name(str(score.get("text")))
    return [_result("text-generation", text, "perplexity", math.exp(loss), arguments)]


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
        "rate, relative to the weights": pruned.get("rate"),
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
    return isinstance(value, (int, float)) and math.isfinite(value)


def _code(text: str) -> str:
    """Return text as code, in which nothing is a link or HTML, on one line and not too long."""
    shown = "".join(letter if letter.isprintable() else " " for letter in text).replace("`", "'").replace("|", " ")
    return f"`{' '.join(shown.split())[:_LONGEST]}`" if shown.strip() else ""
