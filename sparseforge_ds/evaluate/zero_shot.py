"""Zero-shot accuracy by lm-evaluation-harness, with its own prompts, on data that lies on this machine if need be.

    python -m sparseforge_ds.evaluate.zero_shot MODEL --suite paper --paper llama2-7b --dense DENSE
    python -m sparseforge_ds.evaluate.zero_shot MODEL --tasks arc_easy --data arc_easy=arc/validation --limit 200

Needs the extra `zero_shot` (lm-eval). Without `--data` the harness downloads a task's data. `--data DIR` looks for
DIR/TASK.jsonl (or .parquet, .arrow, or a folder DIR/TASK of them, also as `save_to_disk` of datasets writes it, also
where the hub has it, like DIR/glue/rte/validation); `--data TASK=PATH` names one file or folder. The rows must have
the task's original columns. The metric to compare with papers is `acc`, unless they say `acc_norm`; both are shown,
with the standard errors of the harness.

`--suite paper` is ARC-challenge, ARC-easy, BoolQ, HellaSwag, OpenBookQA, RTE, WinoGrande, RACE and PIQA, with the two
means of seven that the paper (arXiv 2605.06402) has; `--paper` puts its dense and 2:4 numbers beside ours, as far as
they are known. Text of these benchmarks in the training data makes the comparison worthless: some mixtures have it.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from sparseforge_ds.evaluate.accuracy_table import accuracy_table, mean_accuracy
from sparseforge_ds.evaluate.pretrained import (
    ADAPTER_HELP,
    DTYPES,
    adapter_of,
    load_model,
    load_tokenizer,
    prune_by_magnitude,
)
from sparseforge_ds.evaluate.published import MEANS, PUBLISHED, SUITES
from sparseforge_ds.evaluate.task_data import BUILDERS, find_data, is_prepared
from sparseforge_ds.mask.pattern import parse_pattern

_FOLDERS = {"boolq": "super_glue/boolq", "rte": "glue/rte"}
"""Where the harness keeps tasks that have no file of their own name."""


def measure(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    tasks: Sequence[str],
    data: Mapping[str, list[Path]],
    limit: int | None = None,
    batch_size: int = 8,
    max_length: int | None = None,
) -> dict[str, dict[str, float]]:
    """Run the tasks without examples in the prompt.

    Args:
        tasks: names that the harness knows.
        data: local files by task, from `find_data`.
        limit: only so many items of each task.
        max_length: tokens of a prompt at most; by default what the model's positions allow.

    Returns:
        Metrics by task: `acc`, `acc_stderr`, ..., and `items`.

    Raises:
        ValueError: lm-eval is not installed, a task is unknown, or its data does not have the task's columns.
    """
    try:
        from jinja2 import TemplateError
        from lm_eval import simple_evaluate
        from lm_eval.models.huggingface import HFLM
    except ImportError as error:
        raise ValueError(f"lm-eval cannot be imported ({error}); pip install 'sparseforge_ds[zero_shot]'") from None
    manager = _task_manager(tasks)
    length = max_length or model.config.get_text_config().max_position_embeddings
    wrapped = HFLM(
        pretrained=model, tokenizer=tokenizer, batch_size=batch_size, max_length=length, device=str(model.device)
    )
    # The harness merges overrides into a registered task only inside an inline group.
    members = [_override(task, data[task]) if task in data else task for task in tasks]
    try:
        output = simple_evaluate(
            wrapped,
            tasks=[{"group": "sparseforge", "task": members}],
            num_fewshot=0,
            limit=limit,
            bootstrap_iters=1,  # switches standard errors on; those of a mean have a formula
            task_manager=manager,
        )
    except (KeyError, OSError, TypeError, TemplateError) as error:
        raise ValueError(
            f"--tasks {','.join(tasks)}: the data does not fit ({type(error).__name__}: {error})"
        ) from error
    results: dict[str, dict[str, float]] = {}
    for task in tasks:
        metrics = {key.removesuffix(",none"): value for key, value in output["results"][task].items()}
        results[task] = {key: value for key, value in metrics.items() if isinstance(value, (int, float))}
        results[task]["items"] = output["n-samples"][task]["effective"]
    return results


def _task_manager(tasks: Iterable[str]) -> Any:
    """The harness' index of tasks. To read all its thousands of files takes many seconds; those of a task, none."""
    import lm_eval
    from lm_eval.tasks import TaskManager

    root = Path(lm_eval.__file__).parent / "tasks"
    folders = {root / _FOLDERS[task] if task in _FOLDERS else _folder_of(root, task) for task in tasks}
    present = [str(folder) for folder in folders if folder is not None and folder.is_dir()]
    manager = TaskManager(include_defaults=False, include_path=present)
    if not set(tasks) <= set(manager.all_tasks):
        manager = TaskManager()
    for task in tasks:
        if task not in manager.all_tasks:
            raise ValueError(f"--tasks {task}: lm-eval knows no such task; `lm-eval ls tasks` lists them")
    return manager


def _folder_of(root: Path, task: str) -> Path | None:
    named = next(iter(root.glob(f"*/{task}.yaml")), None)
    return None if named is None else named.parent


def _override(task: str, files: list[Path]) -> dict[str, Any]:
    prepared = {"process_docs": None, "doc_to_target": "gold"} if is_prepared(task, files) else {}
    return {
        "task": task,
        "dataset_path": BUILDERS[files[0].suffix],
        "dataset_name": None,
        "dataset_kwargs": {"data_files": {"test": [str(file.absolute()) for file in files]}},
        "training_split": None,
        "validation_split": None,
        "test_split": "test",
        **prepared,
    }


def parser() -> argparse.ArgumentParser:
    """The command line."""
    result = argparse.ArgumentParser(
        prog="python -m sparseforge_ds.evaluate.zero_shot",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    result.add_argument("model", help="folder or hub id of a Hugging Face model")
    which = result.add_mutually_exclusive_group(required=True)
    which.add_argument("--tasks", help="names of the harness, with commas between")
    which.add_argument("--suite", choices=list(SUITES), help="a named list of tasks")
    result.add_argument("--data", action="append", default=[], metavar="DIR|TASK=PATH", help="local data; repeatable")
    result.add_argument("--dense", metavar="MODEL", help="run the dense model too, in the same dtype")
    result.add_argument("--paper", choices=list(PUBLISHED), help="put the paper's numbers of this model beside ours")
    result.add_argument("--limit", type=int, help="items of each task")
    result.add_argument("--one_shot", metavar="PATTERN", help="prune by magnitude in memory first, for example 2:4")
    result.add_argument("--adapter", metavar="FOLDER", help=ADAPTER_HELP)
    result.add_argument("--dtype", default="auto", choices=DTYPES, help="default: what the model was saved in")
    result.add_argument("--batch_size", type=int, default=8)
    result.add_argument("--json", metavar="FILE", help="also write the result to a file")
    result.add_argument("--markdown", metavar="FILE", help="also write the table to a file")
    return result


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; 0, or 2 with one line on stderr."""
    args = parser().parse_args(arguments)
    try:
        result, table = _run(args)
        print(table)
        print(json.dumps(result))
        for flag, path, text in (
            ("json", args.json, json.dumps(result, indent=2)),
            ("markdown", args.markdown, table),
        ):
            _write(flag, path, text)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def _run(args: argparse.Namespace) -> tuple[dict[str, Any], str]:
    pattern = None if args.one_shot is None else parse_pattern(args.one_shot)
    tasks = list(SUITES[args.suite]) if args.suite else list(dict.fromkeys(t for t in args.tasks.split(",") if t))
    if not tasks:
        raise ValueError(f"--tasks {args.tasks!r}: name at least one task")
    if args.limit is not None and args.limit < 1:
        raise ValueError(f"--limit {args.limit}: use an integer >= 1")
    for flag, path in (("json", args.json), ("markdown", args.markdown)):  # not after hours
        if path is not None and not Path(path).absolute().parent.is_dir():
            raise ValueError(f"--{flag} {path}: cannot be written, there is no folder {Path(path).parent}")
    data = find_data(tasks, args.data)
    tokenizer = load_tokenizer(args.model)
    dense_tokenizer = None if args.dense is None else load_tokenizer(args.dense)
    adapter = adapter_of(args.model, args.adapter)
    model = load_model(args.model, args.dtype, adapter)
    dtype = str(model.dtype).removeprefix("torch.")
    if pattern is not None:
        prune_by_magnitude(model, pattern)
    found = {"this": measure(model, tokenizer, tasks, data, args.limit, args.batch_size)}
    if dense_tokenizer is not None:
        del model
        dense = load_model(args.dense, dtype)
        found["dense"] = measure(dense, dense_tokenizer, tasks, data, args.limit, args.batch_size)
    result: dict[str, Any] = {"model": args.model, "tasks": found["this"], "means": _means(found["this"])}
    if "dense" in found:
        result["dense"] = {"model": args.dense, "tasks": found["dense"], "means": _means(found["dense"])}
    result |= {"one_shot": args.one_shot, "adapter": adapter, "dtype": dtype, "limit": args.limit}
    return result, accuracy_table(found, args.paper)


def _means(results: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    means = {suite: mean_accuracy(results, suite) for suite in MEANS}
    return {suite: mean for suite, mean in means.items() if mean is not None}


def _write(flag: str, path: str | None, text: str) -> None:
    if path is None:
        return
    try:
        Path(path).write_text(text + "\n")
    except OSError as error:
        raise ValueError(f"--{flag} {path}: cannot be written ({error})") from None


if __name__ == "__main__":
    sys.exit(main())
