"""Scores of a model card, as the hub's metadata has them: of `sparseforge evaluate` and of the run itself."""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult

from sparseforge_ds.checkpoint.folder import read_json_object
from sparseforge_ds.export.adapter import ADAPTER_CONFIG
from sparseforge_ds.export.stored import read_sparsity
from sparseforge_ds.model.hub_access import HUB_ID, public_name

KL = "KL to dense, nats a token"
"""Metric of a text on which a model was compared with the dense one."""
_LARGEST_LOSS = 88.0
"""Nats per token. The perplexity of a larger loss overflows fp32."""


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
        try:
            content = read_json_object(Path(path))
        except ValueError as error:
            raise ValueError(f"--results {error}; give what sparseforge evaluate writes by --json") from None
        try:
            results += _results_in(content)
        except (LookupError, TypeError, AttributeError, ValueError, OverflowError) as error:
            raise ValueError(f"--results {path}: damaged ({error!r:.200}); measure again") from None
        if not {"perplexity", "zero_shot", "generation"} & content.keys():
            raise ValueError(f"--results {path}: is no result of sparseforge evaluate; give what it writes by --json")
        if (mismatch := _mismatch(content, folder, name)) is not None:
            command = f"sparseforge evaluate {shlex.quote(str(folder))}"
            raise ValueError(f"--results {path}: {mismatch}; give what {command} writes by --json")
    return results


def result_of_run(score: Any) -> list[EvalResult]:
    """Return the score of the exported step that the run itself measured, if there is one."""
    loss = score.get("loss") if isinstance(score, dict) else None
    if not isinstance(loss, (int, float)) or not 0 <= loss <= _LARGEST_LOSS:  # a run may have diverged
        return []
    arguments = {key: score[key] for key in ("sequences", "seq_length") if isinstance(score.get(key), int)}
    text = public_name(str(score.get("text")))
    return [_result("text-generation", text, "perplexity", math.exp(loss), arguments)]


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
        # No arguments of vLLM, which may name folders of a machine.
        keys = ("limit", "num_fewshot", "gen_kwargs", "apply_chat_template", "backend")
        conditions = {key: section[key] for key in keys if section.get(key) is not None and section[key] is not False}
        for task, row in section["tasks"].items():
            chosen = ("acc", "acc_norm") if part == "zero_shot" else [key for key in row if _is_of_answers(key, row)]
            results += [_result(kind, task, metric, row[metric], conditions) for metric in chosen if metric in row]
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
    run = read_sparsity(folder).get("run")
    dense = run.get("model") if isinstance(run, dict) else None
    return Path(model).name == folder.resolve().name and dense not in (model, Path(model).name)


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
        # The hub keeps one set of arguments for each config of a dataset.
        dataset_config=", ".join(f"{key}={value}" for key, value in arguments.items()) or None,
        dataset_args=arguments or None,
    )
