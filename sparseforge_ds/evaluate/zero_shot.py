"""Zero-shot accuracy by lm-evaluation-harness, with its own prompts, beside the paper's numbers.

Papers report `acc`, unless they say `acc_norm`; the table has both, with the standard errors of the harness. Text of
these benchmarks in the training data makes the comparison worthless: some mixtures have it.
"""

from __future__ import annotations

import sys
from collections.abc import Hashable, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from sparseforge_ds.evaluate.finished_model import check_embeddings_for
from sparseforge_ds.evaluate.harness import LoadedTasks
from sparseforge_ds.evaluate.perplexity import max_positions
from sparseforge_ds.evaluate.published import SAME


class ZeroShot(NamedTuple):
    """Result of a model on tasks, by the name of a task."""

    metrics: dict[str, dict[str, float]]
    """`acc`, `acc_stderr`, ..., and `items`."""
    answers: dict[str, dict[Hashable, Any]]
    """The model's answers, by item; empty for tasks that score likelihoods of texts."""


def measure(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    tasks: LoadedTasks,
    limit: int | None = None,
    batch_size: int = 8,
    max_length: int | None = None,
) -> ZeroShot:
    """Run the tasks without examples in the prompt.

    Args:
        model: the model.
        tokenizer: its tokenizer.
        tasks: the tasks with their rows.
        limit: number of rows of each task; None for all.
        batch_size: rows that go through the model together.
        max_length: tokens of a prompt; None takes the model's positions.

    Raises:
        ValueError: the model does not know a token.
    """
    from lm_eval import simple_evaluate  # an optional dependency, which load_tasks has found
    from lm_eval.models.huggingface import HFLM

    # Wrap the model for the harness.
    length = max_positions(model.config) if max_length is None else max_length
    wrapped = HFLM(
        pretrained=model,
        tokenizer=tokenizer,
        batch_size=batch_size,
        max_length=length,
        device=str(model.device),
        trust_remote_code=False,
    )

    # The harness shows these bars in log files too.
    for ask in ("loglikelihood", "loglikelihood_rolling", "generate_until"):
        setattr(wrapped, ask, partial(getattr(wrapped, ask), disable_tqdm=not sys.stderr.isatty()))

    def check(module: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
        check_embeddings_for(model, [int(inputs[0].max())])

    # Run. Only a hook sees the tokens, which the harness makes itself.
    hook = model.get_input_embeddings().register_forward_pre_hook(check)
    try:
        output = simple_evaluate(
            wrapped,
            tasks=list(tasks.by_name.values()),
            num_fewshot=0,
            limit=limit,
            bootstrap_iters=1,  # switches standard errors on; those of a mean have a formula
            task_manager=tasks.manager,
        )
    finally:
        hook.remove()

    # Take metrics and answers out of the harness' records.
    results: dict[str, dict[str, float]] = {}
    answers: dict[str, dict[Hashable, Any]] = {}
    for name, task in tasks.by_name.items():
        metrics = {key.removesuffix(",none"): value for key, value in output["results"][name].items()}
        results[name] = {key: value for key, value in metrics.items() if isinstance(value, (int, float))}
        results[name]["items"] = output["n-samples"][name]["effective"]
        answers[name] = {
            (sample["doc_id"], sample["filter"]): _answer(task, sample)
            for sample in output["samples"][name]
            if task.OUTPUT_TYPE != "loglikelihood_rolling"
        }
    return ZeroShot(results, answers)


def compare_answers(result: ZeroShot, dense: ZeroShot) -> None:
    """Add to a result's metrics the share of items that both models answer the same, right or wrong."""
    for task, answers in result.answers.items():
        if answers:
            same = sum(answer == dense.answers[task][item] for item, answer in answers.items())
            result.metrics[task][SAME] = same / len(answers)


def _answer(task: Any, sample: Mapping[str, Any]) -> Any:
    """Return the index of the chosen answer, the generated text, or booleans that say if a text is the likeliest."""
    responses = sample["filtered_resps"]
    if task.OUTPUT_TYPE == "multiple_choice":  # behind the choices there may be their unconditional likelihoods
        likelihoods = [likelihood for likelihood, _ in responses[: len(task.doc_to_choice(sample["doc"]))]]
        return likelihoods.index(max(likelihoods))
    return [response[1] for response in responses] if task.OUTPUT_TYPE == "loglikelihood" else responses
