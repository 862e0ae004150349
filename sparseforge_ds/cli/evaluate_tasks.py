"""Accuracy of models on tasks, as `sparseforge evaluate` measures, prints and records it."""

from __future__ import annotations

import argparse
import gc
from functools import partial
from typing import TYPE_CHECKING, Any

from sparseforge_ds.evaluate.paper_accuracies import accuracy_table, generation_table, means

if TYPE_CHECKING:
    from sparseforge_ds.evaluate.harness import LoadedTasks
    from sparseforge_ds.evaluate.task_scores import TaskScores, TaskSettings

FLAGS_OF_ANSWERS = ("num_fewshot", "gen_kwargs", "apply_chat_template", "backend", "model_args")
"""Flags that answers depend on, which the JSON repeats."""


def measure_tasks(
    args: argparse.Namespace,
    tasks: LoadedTasks,
    tokenizers: list[Any],
    models: list[Any],
    dtype: str,
    dense_adapter: str | None,
    record: dict[str, Any],
) -> None:
    """Measure accuracy, and print it for people.

    Args:
        args: the flags.
        tasks: the tasks with their rows.
        tokenizers: of the model and, with `--dense`, of the dense model.
        models: the dense model and the model, each None if it is not loaded; the list is emptied, which frees them.
        dtype: of the weights.
        dense_adapter: adapter that belongs to the dense model; None for none.
        record: the JSON, which gets the results of a model as soon as they are there.
    """
    from sparseforge_ds.evaluate import task_scores
    from sparseforge_ds.evaluate.finished_model import load_model

    settings = task_settings(args)
    model_args = task_scores.parse_arguments(args.model_args)

    def measure(name: str, model: Any, tokenizer: Any) -> task_scores.TaskScores:
        if args.backend == "vllm":
            wrapped = task_scores.open_in_vllm(name, dtype, model_args)
        else:
            wrapped = task_scores.wrap_model(model, tokenizer, args.batch_size)
        return task_scores.measure(wrapped, tasks, settings)

    # One model after the other. Both stay only where next tokens along the dense model's answers can be compared.
    model = models.pop()
    dense = models.pop()
    results = {"this": measure(args.model, model, tokenizers[0])}
    record |= _record_of_tasks(args, tasks, results)
    if args.dense is not None:
        same_tokens = tokenizers[0].get_vocab() == tokenizers[1].get_vocab()
        has_kl = model is not None and same_tokens and bool(results["this"].generated)
        if not has_kl:
            del model
            gc.collect()
        if dense is None and args.backend != "vllm":
            dense = load_model(args.dense, dtype, dense_adapter)
        results["dense"] = measure(args.dense, dense, tokenizers[1])
        task_scores.compare_answers(results["this"], results["dense"])
        record |= _record_of_tasks(args, tasks, results)  # KL holds both models, and may run out of memory
        if has_kl and model.get_output_embeddings().weight.shape[0] == dense.get_output_embeddings().weight.shape[0]:
            task_scores.compare_next_tokens(results["this"], results["dense"], model, dense, args.batch_size)
            record |= _record_of_tasks(args, tasks, results)
    for is_generated, table in ((False, partial(accuracy_table, paper=args.paper)), (True, generation_table)):
        metrics = _metrics_of(tasks, results, is_generated)
        if metrics["this"]:
            print(table(metrics))


def _record_of_tasks(args: argparse.Namespace, tasks: LoadedTasks, results: dict[str, TaskScores]) -> dict[str, Any]:
    """Return the part of the JSON about tasks, of `this` model and, once it is measured, of the `dense` one.

    Tasks whose answers are generated have a part of their own, and alone read `--num_fewshot` and `--gen_kwargs`.
    """
    record: dict[str, Any] = {}
    for part, is_generated in (("zero_shot", False), ("generation", True)):
        metrics = _metrics_of(tasks, results, is_generated)
        if not metrics["this"]:
            continue
        entries = {model: {"tasks": by_task, "means": means(by_task)} for model, by_task in metrics.items()}
        flags = {flag: getattr(args, flag) for flag in FLAGS_OF_ANSWERS}
        if not is_generated:
            flags |= {"num_fewshot": 0, "gen_kwargs": None}
        record[part] = {**entries["this"], "limit": args.limit, **flags}
        if "dense" in entries:
            record[part]["dense"] = {"model": args.dense, **entries["dense"]}
    return record


def _metrics_of(tasks: LoadedTasks, results: dict[str, TaskScores], is_generated: bool) -> dict[str, Any]:
    """Return the metrics of every model, by task: of tasks whose answers are generated, or of the others."""
    names = [name for name in tasks.by_name if (name in results["this"].generated) == is_generated]
    return {model: {name: result.metrics[name] for name in names} for model, result in results.items()}


def task_settings(args: argparse.Namespace) -> TaskSettings:
    """Return what the flags say about tasks."""
    from sparseforge_ds.evaluate.task_scores import TaskSettings, parse_arguments

    return TaskSettings(
        limit=args.limit,
        gen_kwargs=parse_arguments(args.gen_kwargs),
        apply_chat_template=bool(args.apply_chat_template),
        confirm_run_unsafe_code=bool(args.confirm_run_unsafe_code),
    )


def check_flags_of_answers(args: argparse.Namespace, tasks: Any, tokenizers: list[Any], configs: list[Any]) -> None:
    """Reject flags that no task reads or that a model cannot use, before any model is loaded."""
    from sparseforge_ds.evaluate.perplexity import max_positions
    from sparseforge_ds.evaluate.task_scores import check_task_settings, require_generation

    require_generation(tasks, num_fewshot=args.num_fewshot, gen_kwargs=args.gen_kwargs)
    if args.paper is not None and all(task.OUTPUT_TYPE == "generate_until" for task in tasks.by_name.values()):
        raise ValueError(f"--paper {args.paper}: the paper has no accuracies of generated answers; leave it out")
    settings = task_settings(args)
    for name, tokenizer, config in zip((args.model, args.dense), tokenizers, configs, strict=False):
        check_task_settings(tasks, settings, name, tokenizer, max_positions(config), args.backend or "hf")
