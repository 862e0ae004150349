"""Zero-shot accuracy by lm-evaluation-harness, with its own prompts, beside the paper's numbers.

The metric to compare with papers is `acc`, unless they say `acc_norm`; both are shown, with the standard errors of the
harness. Text of these benchmarks in the training data makes the comparison worthless: some mixtures have it.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from sparseforge_ds.evaluate.harness import LoadedTasks, load_tasks
from sparseforge_ds.evaluate.pretrained import (
    adapter_of,
    load_model,
    load_tokenizer,
    prune_by_magnitude,
    write_result,
)
from sparseforge_ds.evaluate.published import MEANS, SUITES, accuracy_table, mean_accuracy
from sparseforge_ds.mask.pattern import parse_pattern


def measure(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    tasks: LoadedTasks,
    limit: int | None = None,
    batch_size: int = 8,
    max_length: int | None = None,
) -> dict[str, dict[str, float]]:
    """Run the tasks without examples in the prompt; metrics by task: `acc`, `acc_stderr`, ..., and `items`."""
    from lm_eval import simple_evaluate  # an extra, which load_tasks has found
    from lm_eval.models.huggingface import HFLM

    length = max_length or model.config.get_text_config().max_position_embeddings
    wrapped = HFLM(
        pretrained=model,
        tokenizer=tokenizer,
        batch_size=batch_size,
        max_length=length,
        device=str(model.device),
        trust_remote_code=False,
    )
    output = simple_evaluate(
        wrapped,
        tasks=list(tasks.by_name.values()),
        num_fewshot=0,
        limit=limit,
        bootstrap_iters=1,  # switches standard errors on; those of a mean have a formula
        task_manager=tasks.manager,
    )
    results: dict[str, dict[str, float]] = {}
    for task in tasks.by_name:
        metrics = {key.removesuffix(",none"): value for key, value in output["results"][task].items()}
        results[task] = {key: value for key, value in metrics.items() if isinstance(value, (int, float))}
        results[task]["items"] = output["n-samples"][task]["effective"]
    return results


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Measure as the flags of `sparseforge evaluate` say, print the table, write `--markdown`, return the result."""
    pattern = None if args.one_shot is None else parse_pattern(args.one_shot)
    tasks = list(SUITES[args.suite]) if args.suite else list(dict.fromkeys(t for t in args.tasks.split(",") if t))
    if not tasks:
        raise ValueError(f"--tasks {args.tasks!r}: name at least one task")
    if args.limit is not None and args.limit < 1:
        raise ValueError(f"--limit {args.limit}: use an integer >= 1")
    for flag, path in (("json", args.json), ("markdown", args.markdown)):  # not after hours
        if path is not None and not Path(path).absolute().parent.is_dir():
            raise ValueError(f"--{flag} {path}: cannot be written, there is no folder {Path(path).parent}")
    tokenizer = load_tokenizer(args.model)
    dense_tokenizer = None if args.dense is None else load_tokenizer(args.dense)
    adapter = adapter_of(args.model, args.adapter)
    loaded = load_tasks(tasks, args.include_path, args.limit)
    model = load_model(args.model, args.dtype, adapter)
    dtype = str(model.dtype).removeprefix("torch.")
    if pattern is not None:
        prune_by_magnitude(model, pattern)
    found = {"this": measure(model, tokenizer, loaded, args.limit, args.batch_size)}
    if dense_tokenizer is not None:
        del model
        dense = load_model(args.dense, dtype)
        found["dense"] = measure(dense, dense_tokenizer, loaded, args.limit, args.batch_size)
    result: dict[str, Any] = {"model": args.model, "tasks": found["this"], "means": _means(found["this"])}
    if "dense" in found:
        result["dense"] = {"model": args.dense, "tasks": found["dense"], "means": _means(found["dense"])}
    result |= {"one_shot": args.one_shot, "adapter": adapter, "dtype": dtype, "limit": args.limit}
    table = accuracy_table(found, args.paper)
    print(table)
    write_result("markdown", args.markdown, table)
    return result


def _means(results: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    means = {suite: mean_accuracy(results, suite) for suite in MEANS}
    return {suite: mean for suite, mean in means.items() if mean is not None}
