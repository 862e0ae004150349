"""`sparseforge evaluate`: perplexity of a model, and its accuracy on tasks, by one command."""

from __future__ import annotations

import argparse
import os
import time
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from sparseforge_ds.checkpoint.disk import measurements_text
from sparseforge_ds.cli.evaluate_tasks import FLAGS_OF_ANSWERS, check_flags_of_answers, measure_tasks
from sparseforge_ds.cli.export import DTYPES
from sparseforge_ds.cli.given_model import register_packed24, require_model
from sparseforge_ds.cli.imports import large_imports
from sparseforge_ds.cli.printing import require_json_file, write_report
from sparseforge_ds.evaluate.paper_accuracies import PAPER_ACCURACIES, SUITES

if TYPE_CHECKING:
    from sparseforge_ds.ranks import Ranks

BACKENDS = ("hf", "vllm")
"""Libraries that can run a model on tasks."""
_CODE_TASK = "humaneval"
"""Task of a suite that runs code which the model writes."""
_FLAGS_OF_TASKS = (*FLAGS_OF_ANSWERS, "include_path", "paper", "confirm_run_unsafe_code")
"""Flags that need --tasks or --suite."""
_FLAGS_OF_TEXT = ("protocol", "max_tokens", "seq_length", "stride", "text_field")
"""Flags that need --text."""
_BATCH_SIZE = 8
"""Default of --batch_size."""
_EPILOG = """\
--text measures perplexity, --tasks or --suite (extra zero_shot) accuracy; one command can do both. --dense compares
with the dense model: the KL divergence on the same tokens, in nats a token, and the share of items that both models
answer the same. KL needs both models in memory.
--suite generation is GSM8K, IFEval and HumanEval, whose answers the model writes: accuracy, length of answers, share of
answers that the limit of tokens cut, and with --dense the items that one model alone has right. HumanEval runs the
written code, and is left out without --confirm_run_unsafe_code.
On several GPUs each has a whole copy of the model and scores its share of a text; the result is the same:
  torchrun --nproc_per_node 8 -m sparseforge_ds evaluate MODEL --text wikitext2

protocols of perplexity, which give different results:
  windows    the papers' protocol on WikiText-2: documents are joined by two newlines and cut into windows of
             --seq_length. All tokens of a window but the first are scored. Default for .txt files, stdlib and wikitext2
  documents  each document by itself behind a BOS (or EOS), cut where the model's positions end. Default for files of
             records

examples:
  sparseforge evaluate models/qwen3_14b_2to4 --dense Qwen/Qwen3-14B --text wikitext2 c4.jsonl --seq_length 4096
  sparseforge evaluate models/qwen3_14b_2to4 --suite paper --dense Qwen/Qwen3-14B --json evaluation.json
  sparseforge evaluate models/qwen3_14b_2to4 --suite generation --dense Qwen/Qwen3-14B --apply_chat_template --limit 100
  sparseforge evaluate Qwen/Qwen3-14B --one_shot 2:4 --text wikitext2 --tasks arc_easy,boolq
"""


def register(commands: Any) -> None:
    """Add the parser of `sparseforge evaluate`."""
    parser = commands.add_parser(
        "evaluate",
        help="perplexity on a text and accuracy of a model",
        usage="sparseforge evaluate MODEL [flags]",  # flags of several values before MODEL would take it for one more
        description="Measure a dense or sparse Hugging Face model: its perplexity on texts, its accuracy on the tasks "
        "of lm-evaluation-harness, and how close it is to the dense model.",
        epilog=_EPILOG,
    )
    # Flags of both measurements.
    add = parser.add_argument
    add("model", metavar="MODEL", help="folder or hub id of a Hugging Face model")
    add("--one_shot", metavar="PATTERN", help="prune by magnitude in memory first, for example 2:4")
    add("--any_family", action="store_true", help="let --one_shot prune a family without rows, as training does")
    add(
        "--adapter",
        metavar="FOLDER",
        help="PEFT adapter to put on the model (needs peft); default: the one beside the model's own weights, "
        "like the low-rank branch that export writes; none: no adapter",
    )
    add("--dtype", default="auto", choices=DTYPES, help="dtype of the weights (default: as saved)")
    add("--batch_size", type=int, default=None, metavar="N", help="sequences of one forward (default: 8)")
    add("--limit", type=int, metavar="N", help="take the first N documents of a text and items of a task")
    add("--dense", metavar="MODEL", help="compare with the dense model, in the same dtype: KL on texts, same answers")
    add("--json", metavar="FILE", help="also write the result to a file")
    add("--local_rank", help=argparse.SUPPRESS)  # the deepspeed launcher adds it
    # Flags of perplexity.
    add = parser.add_argument_group("perplexity").add_argument
    add(
        "--text",
        metavar="TEXT",
        nargs="+",
        action="extend",
        help="files of any kind that training reads, stdlib:heldout, stdlib:train, wikitext2 (from the hub) or "
        "wikitext2:PATH (its rows)",
    )
    add("--text_field", metavar="NAME", help="field of a record that holds the text (default: text)")
    add("--protocol", choices=["documents", "windows"], help="default: by the kind of text")
    add(
        "--max_tokens",
        type=int,
        metavar="N",
        help="score the first windows or documents of a text, of N tokens together, at least one (default: all)",
    )
    add("--seq_length", type=int, metavar="N", help="tokens of a window, or limit of a document")
    add("--stride", type=int, metavar="N", help="distance of window starts (default: seq_length, no overlap)")
    # Flags of accuracy.
    group = parser.add_argument_group("accuracy")
    tasks = group.add_mutually_exclusive_group()
    tasks.add_argument("--tasks", metavar="NAMES", help="tasks of the harness, separated by commas")
    tasks.add_argument("--suite", choices=list(SUITES), help="a named list of tasks")
    add = group.add_argument
    add(
        "--include_path",
        metavar="DIR",
        help="folder of task files in the harness' format, or of benchmark data; they replace the harness' own",
    )
    add(
        "--paper",
        choices=list(PAPER_ACCURACIES),
        help="show the paper's accuracies of this model beside the measured ones",
    )
    add(
        "--backend",
        choices=BACKENDS,
        help="library that runs the model: transformers, or vLLM where it is installed (default: hf)",
    )
    add(
        "--model_args",
        metavar="ARGS",
        help="arguments of vLLM, like tensor_parallel_size=2,gpu_memory_utilization=0.8",
    )
    add(
        "--apply_chat_template",
        action="store_true",
        default=None,
        help="put prompts into the tokenizer's chat template",
    )
    # Flags of generated answers.
    add = parser.add_argument_group("generated answers").add_argument
    add(
        "--num_fewshot",
        type=int,
        metavar="N",
        help="examples in a prompt of tasks whose answers are generated (default: the task's own number; other tasks "
        "have none)",
    )
    add(
        "--gen_kwargs",
        metavar="ARGS",
        help="settings of generation instead of the task's, like max_gen_toks=2048,do_sample=true,temperature=0.6",
    )
    add(
        "--confirm_run_unsafe_code",
        action="store_true",
        default=None,
        help="allow tasks that run the code that the model writes, as HumanEval; best in a container",
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Measure perplexity, accuracy or both, print them, and write one JSON: `perplexity`, `zero_shot`, `generation`."""
    # Check flags now, and not after hours of measuring.
    has_tasks = args.tasks is not None or args.suite is not None
    if args.text is None and not has_tasks:
        raise ValueError("nothing to measure: give --text for perplexity, --tasks or --suite for accuracy, or both")
    values = vars(args)
    for flags, is_measured, measurement in (
        (_FLAGS_OF_TEXT, args.text is not None, "perplexity; give --text"),
        (_FLAGS_OF_TASKS, has_tasks, "accuracy; give --tasks or --suite"),
    ):
        if not is_measured and (unread := [flag for flag in flags if values[flag] is not None]):
            raise ValueError(f"--{unread[0]} {values[unread[0]]}: it belongs to {measurement}, or leave it out")
    _check_backend(args)
    least_values = {"num_fewshot": 0, "seq_length": 2}
    for flag in ("num_fewshot", "limit", "batch_size", "max_tokens", "seq_length", "stride"):
        least = least_values.get(flag, 1)
        if values[flag] is not None and values[flag] < least:
            raise ValueError(f"--{flag} {values[flag]}: use an integer >= {least}")
    require_json_file(args.json, [args.model, args.dense, args.adapter, *(args.text or ())])
    args.batch_size = args.batch_size or _BATCH_SIZE

    # Measure on all ranks. The first one prints an error that all raise.
    from sparseforge_ds.ranks import launched_ranks

    result: dict[str, Any] = {}
    is_first = os.environ.get("RANK", "0") == "0"
    try:
        with launched_ranks() as ranks:
            if has_tasks and ranks.world_size > 1:
                raise ValueError(f"--tasks and --suite run in one process, and there are {ranks.world_size}; use one")
            _measure(args, ranks, result)
    except ValueError:
        if is_first:
            raise
        return 2
    finally:
        # After an error too, since it may be hours of work; and before the file, of which the disk may be full.
        if is_first and any(part in result for part in ("texts", "zero_shot", "generation")):
            print(measurements_text(result))
    if is_first and args.json is not None:
        write_report(args.json, result)
    return 0


def _measure(args: argparse.Namespace, ranks: Ranks, record: dict[str, Any]) -> None:
    """Load the model once, measure what the flags say, and print it for people on the first rank.

    `record` gets every result as soon as it is there.
    """
    with large_imports():
        from sparseforge_ds.config import SparseForgeConfig
        from sparseforge_ds.evaluate import perplexity
        from sparseforge_ds.evaluate.finished_model import (
            find_adapter,
            load_model,
            load_tokenizer,
            prune_by_magnitude,
            share_of_zeros,
        )
        from sparseforge_ds.evaluate.harness import load_tasks
        from sparseforge_ds.evaluate.perplexity import require_same_tokens
        from sparseforge_ds.evaluate.scored_text import documents_belong_together, read_text, require_text_field
        from sparseforge_ds.mask.pattern import parse_pattern, require_removing
        from sparseforge_ds.model.any_family import any_family
        from sparseforge_ds.model.registration import load_config

    # Load everything; errors are agreed among the ranks.
    pattern = None if args.one_shot is None else require_removing(parse_pattern(args.one_shot))
    if args.any_family and pattern is None:
        raise ValueError("--any_family: it says what --one_shot prunes; give that too, or leave it out")

    def load() -> Any:
        names = _tasks(args)
        models = [name for name in (args.model, args.dense) if name is not None]
        for name in models:
            require_model(name)
        for name in models:
            register_packed24(name)
        adapter = find_adapter(args.model, args.adapter)
        dense_adapter = None if args.dense is None else find_adapter(args.dense, None)
        if pattern is not None and adapter is not None:
            raise ValueError(
                f"--one_shot {pattern}: {args.model} is measured with its adapter, which has no 2:4 weights; give "
                "--adapter none, or leave --one_shot out"
            )
        require_text_field(args.text, args.text_field)
        texts = {text: read_text(text, args.text_field or "text", args.limit) for text in args.text or ()}
        tokenizers = [load_tokenizer(name) for name in models]
        configs = [load_config(name, name) for name in models]
        if pattern is not None:
            _require_prunable(args, configs[0], ranks.first)
        tasks = None
        if names is not None:
            allows_code = bool(args.confirm_run_unsafe_code)
            tasks = load_tasks(names, args.include_path, args.limit, args.num_fewshot, allows_code)
            check_flags_of_answers(args, tasks, tokenizers, configs)
        if args.dense is not None:
            for documents in texts.values():
                require_same_tokens(models, tokenizers, documents)
        cut_texts = {}
        for text, documents in texts.items():
            protocol: perplexity.Protocol = "windows" if documents_belong_together(text) else "documents"
            lengths = (args.seq_length, args.stride, args.batch_size, args.max_tokens)
            scoring = perplexity.Scoring(args.protocol or protocol, *lengths)
            try:
                cut_texts[text] = perplexity.cut_text(tokenizers[0], documents, scoring, configs)
            except ValueError as error:
                raise ValueError(f"--text {text}: {error}") from None
        if args.backend == "vllm":
            if adapter is not None:
                raise ValueError(f"--backend vllm: {args.model} has an adapter; use --backend hf, or --adapter none")
            if dense_adapter is not None:
                raise ValueError(f"--backend vllm: {args.dense} has an adapter; use --backend hf")
            return cut_texts, tokenizers, tasks, None, None, adapter, dense_adapter
        model = load_model(args.model, args.dtype, adapter)
        if pattern is not None:
            config = SparseForgeConfig(pattern=str(pattern))
            prune_by_magnitude(model, pattern, any_family(model, config) if args.any_family else config)
        # KL needs both models at once; accuracies are measured one after the other.
        dense = None
        if args.dense and texts:
            dense = load_model(args.dense, str(model.dtype).removeprefix("torch."), dense_adapter)
        return cut_texts, tokenizers, tasks, model, dense, adapter, dense_adapter

    cut_texts, tokenizers, tasks, model, dense, adapter, dense_adapter = ranks.all_or_raise(load)

    # Score the texts.
    dtype = args.dtype if model is None else str(model.dtype).removeprefix("torch.")
    zeros = None if model is None else share_of_zeros(model)
    record |= {"model": args.model, "one_shot": args.one_shot, "adapter": adapter, "dtype": dtype, "zeros": zeros}
    title = f"{args.model}{f', one-shot magnitude {pattern}' if pattern else ''}, {dtype}"
    title += "" if zeros is None else f", {zeros:.1%} of the matrices 0"
    scores: list[dict[str, Any]] = []
    for text, cut_text in cut_texts.items():
        start_time = time.monotonic()
        score = perplexity.score_text(model, cut_text, ranks, dense)
        seconds = round(time.monotonic() - start_time, 2)
        flags = {"stride": args.stride, "limit": args.limit, "max_tokens": args.max_tokens, "ranks": ranks.world_size}
        scores.append({"text": text, **asdict(score), **flags, "seconds": seconds})
        # Tools that measure one text read `perplexity`.
        record |= {"dense": args.dense, "perplexity": scores[0], "texts": scores}
        if ranks.first:
            print(f"{title} on {text}\n{score}, {seconds} s")
    if ranks.first and scores and (len(scores) > 1 or dense is not None):
        print(perplexity.table(scores))

    # Measure accuracy.
    if tasks is not None:
        models = [dense, model]
        del model, dense
        measure_tasks(args, tasks, tokenizers, models, dtype, dense_adapter, record)


def _require_prunable(args: argparse.Namespace, model_config: Any, first: bool) -> None:
    """Reject a model that `--one_shot` cannot prune, by the shapes of its config.json, before weights are read.

    The first rank warns if only a small part of it will be pruned.
    """
    with large_imports():
        import torch

        from sparseforge_ds.config import SparseForgeConfig
        from sparseforge_ds.model.any_family import any_family, few_pruned
        from sparseforge_ds.model.families import PatternMisfitError, coverage, prunable_weights
        from sparseforge_ds.model.registration import build_model
        from sparseforge_ds.model.stored_config import is_packed_config

    where = f"--one_shot {args.one_shot}: {args.model}"
    if is_packed_config(vars(model_config)):
        raise ValueError(f"{where} is packed, and 2:4 already; leave --one_shot out")
    with torch.device("meta"):
        model = build_model(model_config)
    config = SparseForgeConfig(pattern=args.one_shot)
    try:
        pruned = prunable_weights(model, any_family(model, config) if args.any_family else config)
    except PatternMisfitError as error:
        raise ValueError(
            f"{where}: {error.fault}; choose another pattern, or make a model that keeps such weights dense by "
            "sparseforge prune, and evaluate that"
        ) from None
    if args.any_family and first and (warning := few_pruned(coverage(model, pruned))):
        print(f"warning: {warning}")


def _check_backend(args: argparse.Namespace) -> None:
    """Reject what vLLM cannot do, and vLLM where it is missing."""
    if args.backend != "vllm":
        if args.model_args is not None:
            raise ValueError(f"--model_args {args.model_args}: they are vLLM's; give --backend vllm, or leave it out")
        return
    for flag in ("text", "one_shot"):
        if getattr(args, flag) is not None:
            raise ValueError(f"--{flag}: transformers alone measures it; leave it out, or use --backend hf")
    if args.batch_size is not None:
        raise ValueError(
            f"--batch_size {args.batch_size}: vLLM forms its own batches; leave it out, or limit them by "
            "--model_args max_num_seqs=N"
        )
    from sparseforge_ds.evaluate.task_scores import require_vllm

    require_vllm()


def _tasks(args: argparse.Namespace) -> list[str] | None:
    """Return the names of the tasks to measure, or None for none."""
    if args.tasks is None:
        names = SUITES.get(args.suite)
        if names is None or args.confirm_run_unsafe_code or _CODE_TASK not in names:
            return None if names is None else list(names)
        print(f"{_CODE_TASK}: left out, since it runs code of the model's; --confirm_run_unsafe_code includes it")
        return [name for name in names if name != _CODE_TASK]
    if not (tasks := list(dict.fromkeys(filter(None, map(str.strip, args.tasks.split(",")))))):
        raise ValueError(f"--tasks {args.tasks!r}: name at least one task")
    return tasks
