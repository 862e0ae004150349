"""Zero-shot accuracy by lm-evaluation-harness, with its own prompts, on data that lies on this machine if need be.

    python -m sparseforge_ds.evaluate.zero_shot MODEL --tasks arc_easy,piqa
    python -m sparseforge_ds.evaluate.zero_shot MODEL --tasks arc_easy --data arc_easy=arc/validation --limit 200

Needs the extra `zero_shot` (lm-eval). Without `--data` the harness downloads a task's data. `--data DIR` looks for
DIR/TASK.jsonl (or .parquet, .arrow, or a folder DIR/TASK of them), `--data TASK=PATH` names one file or folder. The
rows must have the task's original columns. The metric to compare with papers is `acc`, unless they say `acc_norm`.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from sparseforge_ds.evaluate.pretrained import DTYPES, load_model, load_tokenizer, prune_by_magnitude
from sparseforge_ds.mask.pattern import parse_pattern

_BUILDERS = {".jsonl": "json", ".parquet": "parquet", ".arrow": "arrow"}


def find_data(tasks: Sequence[str], data: Sequence[str]) -> dict[str, list[Path]]:
    """The local files of every task.

    Args:
        data: `DIR` or `TASK=PATH`, as on the command line.

    Returns:
        Files by task; tasks without local data are absent only when `data` is empty.

    Raises:
        ValueError: a path does not exist or holds no usable file, or a task has no data although some was given.
    """
    named = dict(entry.split("=", 1) for entry in data if "=" in entry)
    folders = [Path(entry) for entry in data if "=" not in entry]
    for task in named:
        if task not in tasks:
            raise ValueError(f"--data {task}=...: {task} is not in --tasks {','.join(tasks)}")
    found: dict[str, list[Path]] = {}
    for task in tasks if data else ():
        places = [Path(named[task])] if task in named else [f / f"{task}{s}" for f in folders for s in ("", *_BUILDERS)]
        place = next((place for place in places if place.exists()), None)
        if place is None:
            raise ValueError(f"--data: no data of {task}; looked for {', '.join(map(str, places)) or 'nothing'}")
        files = sorted(file for file in place.iterdir() if file.suffix in _BUILDERS) if place.is_dir() else [place]
        if not files or len({file.suffix for file in files}) != 1 or files[0].suffix not in _BUILDERS:
            raise ValueError(f"--data {place}: give files of one kind, {', '.join(_BUILDERS)}")
        found[task] = files
    return found


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
        from lm_eval import simple_evaluate
        from lm_eval.models.huggingface import HFLM
        from lm_eval.tasks import TaskManager
    except ImportError as error:
        raise ValueError(f"lm-eval cannot be imported ({error}); pip install 'sparseforge_ds[zero_shot]'") from None
    manager = TaskManager()
    for task in tasks:
        if task not in manager.all_tasks:
            raise ValueError(f"--tasks {task}: lm-eval knows no such task; `lm-eval ls tasks` lists them")
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
            bootstrap_iters=0,
            task_manager=manager,
        )
    except (KeyError, OSError, TypeError) as error:
        raise ValueError(
            f"--tasks {','.join(tasks)}: the data does not fit ({type(error).__name__}: {error})"
        ) from error
    results: dict[str, dict[str, float]] = {}
    for task in tasks:
        metrics = {key.removesuffix(",none"): value for key, value in output["results"][task].items()}
        results[task] = {key: value for key, value in metrics.items() if isinstance(value, (int, float))}
        results[task]["items"] = output["n-samples"][task]["effective"]
    return results


def _override(task: str, files: list[Path]) -> dict[str, Any]:
    return {
        "task": task,
        "dataset_path": _BUILDERS[files[0].suffix],
        "dataset_name": None,
        "dataset_kwargs": {"data_files": {"test": [str(file.absolute()) for file in files]}},
        "training_split": None,
        "validation_split": None,
        "test_split": "test",
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; 0, or 2 with one line on stderr."""
    parser = argparse.ArgumentParser(
        prog="python -m sparseforge_ds.evaluate.zero_shot",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("model", help="folder or hub id of a Hugging Face model")
    parser.add_argument("--tasks", required=True, help="names of the harness, with commas between")
    parser.add_argument("--data", action="append", default=[], metavar="DIR|TASK=PATH", help="local data; repeatable")
    parser.add_argument("--limit", type=int, help="items of each task")
    parser.add_argument("--one_shot", metavar="PATTERN", help="prune by magnitude in memory first, for example 2:4")
    parser.add_argument("--adapter", metavar="FOLDER", help="PEFT adapter to put on the model (needs peft)")
    parser.add_argument("--dtype", default="auto", choices=DTYPES, help="default: what the model was saved in")
    parser.add_argument("--batch_size", type=int, default=8)
    parser.add_argument("--json", metavar="FILE", help="also write the result to a file")
    args = parser.parse_args(arguments)
    try:
        pattern = None if args.one_shot is None else parse_pattern(args.one_shot)
        tasks = [task for task in args.tasks.split(",") if task]
        data = find_data(tasks, args.data)
        tokenizer = load_tokenizer(args.model)
        model = load_model(args.model, args.dtype, args.adapter)
        if pattern is not None:
            prune_by_magnitude(model, pattern)
        results = measure(model, tokenizer, tasks, data, args.limit, args.batch_size)
        if args.json:
            try:
                Path(args.json).write_text(json.dumps({"model": args.model, "tasks": results}, indent=2) + "\n")
            except OSError as error:
                raise ValueError(f"--json {args.json}: cannot be written ({error})") from None
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    for task, metrics in results.items():
        shown = ", ".join(f"{key} {100 * metrics[key]:.2f}%" for key in ("acc", "acc_norm") if key in metrics)
        print(f"{task:<16} {shown or json.dumps(metrics)}  ({metrics['items']:g} items)")
    print(json.dumps({"model": args.model, "tasks": results}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
