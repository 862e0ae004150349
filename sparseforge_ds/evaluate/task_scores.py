"""Scores of a model on tasks of lm-evaluation-harness, with its own prompts and metrics.

Papers report `acc`, unless they say `acc_norm`; the table has both, with the standard errors of the harness. Text of
these benchmarks in the training data makes the comparison worthless: some mixtures have it.
"""

from __future__ import annotations

import contextlib
import difflib
import gc
import importlib.util
import sys
from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from transformers import (
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from sparseforge_ds.evaluate.answers import Answer, AnswerLog
from sparseforge_ds.evaluate.finished_model import check_embeddings_for
from sparseforge_ds.evaluate.harness import LoadedTasks
from sparseforge_ds.evaluate.paper_accuracies import CUT, GAINED, KL, LOST, SAME, TOKENS, with_ending
from sparseforge_ds.evaluate.perplexity import Passage, max_positions, mean_scores

_ANSWER_LIMIT = 256
"""Most tokens of an answer where neither a task nor a user says how many: the harness' own number."""
_ALIASES_OF_LIMIT = {"max_new_tokens", "max_tokens", "max_completion_tokens", "max_length"}
"""Other names of `max_gen_toks`, which the harness would prefer or ignore without a word."""
_SETTINGS_OF_HARNESS = {"until", "max_gen_toks"}
"""Settings of generation that the harness has beside those of transformers."""
_SET_BY_HARNESS = {"pad_token_id", "use_cache", "return_dict_in_generate", "num_return_sequences"}
"""Settings of transformers that the harness gives itself, or whose result it cannot read."""
_DRAWS = 100
"""Draws for standard errors that have no formula, such as that of F1; those of a mean have one."""


@dataclass(frozen=True)
class TaskSettings:
    """Settings of a measurement, in the harness' words."""

    limit: int | None = None
    """Rows of each task; None for all."""
    gen_kwargs: Mapping[str, Any] | None = None
    """Settings of generation that replace those of the tasks."""
    apply_chat_template: bool = False
    confirm_run_unsafe_code: bool = False


class TaskScores(NamedTuple):
    """Result of a model on tasks, by the name of a task."""

    metrics: dict[str, dict[str, float]]
    """`acc`, `acc_stderr`, ..., `items`, and lengths of generated answers."""
    choices: dict[str, dict[Hashable, Any]]
    """The model's choices and texts, by item; empty for tasks that score likelihoods of texts."""
    is_right: dict[str, dict[str, dict[int, bool]]]
    """True for items that are right, by the metrics of a task that know right and wrong alone."""
    generated: dict[str, list[Answer]]
    """Generated answers."""


def wrap_model(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, batch_size: int = 8) -> Any:
    """Return the harness' wrapper of a model of transformers.

    Args:
        model: the model.
        tokenizer: its tokenizer.
        batch_size: rows that go through the model together.
    """
    from lm_eval.models.huggingface import HFLM  # an optional dependency, which load_tasks has found

    return HFLM(
        pretrained=model,
        tokenizer=tokenizer,
        batch_size=batch_size,
        max_length=max_positions(model.config),
        device=str(model.device),
        trust_remote_code=False,
    )


def require_vllm() -> None:
    """Raise ValueError if vLLM is not installed."""
    if importlib.util.find_spec("vllm") is None:
        raise ValueError("--backend vllm: vllm is not installed; pip install vllm, or leave the flag out")


def open_in_vllm(name: str, dtype: str, model_args: Mapping[str, Any]) -> Any:
    """Return the harness' wrapper of a model that vLLM loads and runs."""
    from lm_eval.models.vllm_causallms import VLLM

    gc.collect()  # the engine of a model before this one ends with its object
    return VLLM(pretrained=name, dtype=dtype, batch_size="auto", trust_remote_code=False, **model_args)


def parse_arguments(text: str | None) -> dict[str, Any]:
    """Return arguments in the harness' form, like `max_gen_toks=64,temperature=0.6`; none for None."""
    from lm_eval.utils import simple_parse_args_string

    return dict(simple_parse_args_string(text))


def measure(wrapped: Any, tasks: LoadedTasks, settings: TaskSettings | None = None) -> TaskScores:
    """Run the tasks on a model that the harness has wrapped.

    Call `check_task_settings` before the model is loaded.

    Raises:
        ValueError: the model does not know a token, or vLLM was given too few positions for the answers of a task.
    """
    from lm_eval import simple_evaluate

    settings = settings or TaskSettings()
    model = wrapped.model if isinstance(wrapped.model, PreTrainedModel) else None
    _require_positions(tasks, settings, wrapped.max_length, "the model")

    # The harness shows these bars in log files too.
    for ask in ("loglikelihood", "loglikelihood_rolling", "generate_until"):
        setattr(wrapped, ask, partial(getattr(wrapped, ask), disable_tqdm=not sys.stderr.isatty()))
    log = AnswerLog(wrapped)

    def check(module: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
        if inputs[0].shape[1] > 1:  # single tokens are the model's own
            assert model is not None
            check_embeddings_for(model, [int(inputs[0].max())])

    # Only a hook sees the tokens, which the harness makes itself.
    hook = None if model is None else model.get_input_embeddings().register_forward_pre_hook(check)
    scores = TaskScores({}, {}, {}, {})
    try:
        # Tasks run one after another, since two may have the same prompts.
        for name, task in tasks.by_name.items():
            with _without_environment():
                output = simple_evaluate(
                    wrapped,
                    tasks=[task],
                    limit=settings.limit,
                    bootstrap_iters=_DRAWS,
                    task_manager=tasks.manager,
                    gen_kwargs=dict(settings.gen_kwargs) if settings.gen_kwargs else None,
                    apply_chat_template=settings.apply_chat_template,
                    confirm_run_unsafe_code=settings.confirm_run_unsafe_code,
                )
            _add_scores(scores, name, task, output, log.take())
    finally:
        if hook is not None:
            hook.remove()
    return scores


@contextlib.contextmanager
def _without_environment() -> Iterator[None]:
    """Keep the harness from asking git, pip and other programs for versions, which we do not record.

    It would ask after every task. Outside of a repository git prints an error each time.
    """
    from lm_eval import evaluator

    find_commit = evaluator.get_git_commit_hash
    add_environment = evaluator.add_env_info
    evaluator.get_git_commit_hash = lambda: None
    evaluator.add_env_info = lambda results: None
    try:
        yield
    finally:
        evaluator.get_git_commit_hash = find_commit
        evaluator.add_env_info = add_environment


def _add_scores(scores: TaskScores, name: str, task: Any, output: dict[str, Any], answers: list[Answer]) -> None:
    """Add the metrics and answers of a task, from the harness' records of its run."""
    samples = output["samples"][name]
    metrics = {key.removesuffix(",none"): value for key, value in output["results"][name].items()}
    scores.metrics[name] = {key: float(value) for key, value in metrics.items() if isinstance(value, (int, float))}
    scores.metrics[name]["items"] = output["n-samples"][name]["effective"]
    scores.choices[name] = {
        sample["doc_id"]: _choice(task, sample) for sample in samples if task.OUTPUT_TYPE != "loglikelihood_rolling"
    }
    scores.is_right[name] = _right_items(samples)
    if task.OUTPUT_TYPE == "generate_until":
        scores.generated[name] = answers
        scores.metrics[name][TOKENS] = sum(len(answer.tokens) for answer in answers) / len(answers)
        scores.metrics[name][CUT] = sum(answer.is_cut for answer in answers) / len(answers)


def compare_answers(result: TaskScores, dense: TaskScores) -> None:
    """Add to a result's metrics how its answers differ from the dense model's.

    These are the share of items that both models answer the same, right or wrong. For each metric that is right or
    wrong they are also the shares of items that the dense model alone has right, and that it alone has wrong.
    """
    for task, choices in result.choices.items():
        metrics = result.metrics[task]
        if choices:
            same = sum(choice == dense.choices[task][item] for item, choice in choices.items())
            metrics[SAME] = same / len(choices)
        for key, is_right in result.is_right[task].items():
            dense_right = dense.is_right[task].get(key)
            if dense_right is None:  # the dense model's values are graded, which are not right or wrong
                continue
            pairs = [(right, dense_right[item]) for item, right in is_right.items()]
            metrics[with_ending(key, LOST)] = pairs.count((False, True)) / len(pairs)
            metrics[with_ending(key, GAINED)] = pairs.count((True, False)) / len(pairs)


def compare_next_tokens(
    result: TaskScores, dense_result: TaskScores, model: PreTrainedModel, dense: PreTrainedModel, batch_size: int
) -> None:
    """Add to a result's metrics the KL divergence to the dense model along the dense model's answers.

    Both models read the same prompts and answers. The KL is the mean over the tokens of all answers of a task.
    """
    for task, answers in dense_result.generated.items():
        passages = [Passage(answer.prompt + answer.tokens, len(answer.prompt)) for answer in answers if answer.tokens]
        if passages:
            _, (_, kl, _) = mean_scores(model, passages, batch_size, dense=dense)
            result.metrics[task][KL] = kl


def check_task_settings(
    tasks: LoadedTasks,
    settings: TaskSettings,
    model: str,
    tokenizer: PreTrainedTokenizerBase,
    positions: int,
    backend: str = "hf",
) -> None:
    """Reject settings under which a model cannot be measured on tasks, before it is loaded.

    Args:
        tasks: the tasks.
        settings: of the measurement.
        model: name of the model, for messages.
        tokenizer: its tokenizer.
        positions: tokens that it can read at once.
        backend: "hf" or "vllm".

    Raises:
        ValueError: generation cannot use a setting, answers do not fit the positions, or there is no chat template.
    """
    _require_generation_settings(tasks, settings, backend)
    _require_positions(tasks, settings, positions, model)
    if settings.apply_chat_template and not tokenizer.chat_template:
        raise ValueError(
            f"--apply_chat_template: the tokenizer of {model} has no chat template; leave the flag out, or put one "
            "into the model's folder (chat_template.jinja)"
        )


def require_generation(tasks: LoadedTasks, **flags: Any) -> None:
    """Reject flags that are not None, of tasks whose answers are generated, if there is no such task."""
    if any(task.OUTPUT_TYPE == "generate_until" for task in tasks.by_name.values()):
        return
    for flag, value in flags.items():
        if value is not None:
            raise ValueError(f"--{flag} {value}: none of these tasks has generated answers; leave it out")


def _require_positions(tasks: LoadedTasks, settings: TaskSettings, positions: int, model: str) -> None:
    """Reject answers that do not fit a model's positions.

    Args:
        tasks: the tasks.
        settings: of the measurement.
        positions: tokens that the model can read at once.
        model: its name, for messages.
    """
    for name, task in tasks.by_name.items():
        if task.OUTPUT_TYPE == "generate_until":
            generation = {**(task.config.generation_kwargs or {}), **(settings.gen_kwargs or {})}
            most = generation.get("max_gen_toks", _ANSWER_LIMIT)
            if not isinstance(most, int) or not 1 <= most < positions:
                raise ValueError(
                    f"--tasks {name}: its answers have up to {most} tokens, and prompt and answer share the "
                    f"{positions} positions of {model}; give fewer by --gen_kwargs max_gen_toks=N"
                )


def _require_generation_settings(tasks: LoadedTasks, settings: TaskSettings, backend: str) -> None:
    """Reject settings of `--gen_kwargs` that generation does not have, cannot use, or would ignore.

    Args:
        tasks: the tasks, whose own settings remain where `--gen_kwargs` has none.
        settings: of the measurement.
        backend: "hf" or "vllm", whose own settings are known to it alone.
    """
    gen_kwargs = dict(settings.gen_kwargs or {})
    if aliases := sorted(_ALIASES_OF_LIMIT & gen_kwargs.keys()):
        raise ValueError(f"--gen_kwargs {aliases[0]}: write max_gen_toks, the harness' name of that limit")
    until = gen_kwargs.get("until", [])
    if not all(isinstance(stop, str) and stop for stop in (until if isinstance(until, list) else [until])):
        raise ValueError(f"--gen_kwargs until: {until!r} is no text that ends an answer; write it in quotes")
    if backend != "hf":
        return
    known = GenerationConfig().to_dict().keys() | _SETTINGS_OF_HARNESS
    for key in gen_kwargs:
        if key in _SET_BY_HARNESS:
            raise ValueError(f"--gen_kwargs {key}: the harness sets it itself; leave it out")
        if key not in known:
            similar = difflib.get_close_matches(key, known, 1)
            cure = f"did you mean {similar[0]}?" if similar else "leave it out"
            raise ValueError(f"--gen_kwargs {key}: generation has no such setting; {cure}")
    of_transformers = {key: value for key, value in gen_kwargs.items() if key not in _SETTINGS_OF_HARNESS}
    for task in tasks.by_name.values():
        if task.OUTPUT_TYPE == "generate_until":
            own = task.config.generation_kwargs or {}
            _try_generation({k: v for k, v in own.items() if k not in _SETTINGS_OF_HARNESS}, of_transformers)


def _try_generation(own: Mapping[str, Any], given: Mapping[str, Any]) -> None:
    """Generate a token by a model of no size, with settings as the harness passes them on.

    Args:
        own: settings of the task itself that are transformers' own.
        given: those of `--gen_kwargs`, which replace them.

    Raises:
        ValueError: transformers refuses a given setting or ignores it; the message names it.
    """
    fault = _fault_of_settings({**own, **given})
    if fault is None or _fault_of_settings(own) is not None:
        return
    # Name the setting that is refused by itself, or that the message names.
    alone = [key for key in given if _fault_of_settings({**own, key: given[key]}) is not None]
    named = [key for key in given if f"`{key}`" in fault]
    key = next(iter([*alone, *named, ", ".join(given)]))
    raise ValueError(f"--gen_kwargs {key}: {fault.removeprefix(f'`{key}`: ')}")


_REFUSALS = (
    *(ValueError, TypeError, AttributeError, LookupError, ArithmeticError, RuntimeError, ImportError),
    AssertionError,
)
"""Errors that transformers raises for settings of generation that it cannot use."""


def _fault_of_settings(settings: Mapping[str, Any]) -> str | None:
    """Return why transformers refuses or ignores settings of generation, or None if it takes them."""
    from lm_eval.models.utils import normalize_gen_kwargs

    # A vocabulary as large as any, since settings may name its entries.
    config = LlamaConfig(
        vocab_size=2**18,
        hidden_size=4,
        intermediate_size=4,
        num_hidden_layers=1,
        num_attention_heads=1,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    try:
        do_sample = normalize_gen_kwargs(dict(settings))["do_sample"]
        if not isinstance(do_sample, bool):
            return f"do_sample is {do_sample!r}; use true or false"
        values = {**settings, "do_sample": do_sample}
        if not do_sample and values.get("temperature") == 0:  # the harness leaves it out
            del values["temperature"]
        GenerationConfig(**values).validate(strict=True)
        # Which caches work depends on the device of the real model.
        tried = {key: value for key, value in values.items() if not key.startswith("cache_")}
        LlamaForCausalLM(config).generate(torch.tensor([[1, 3]]), max_length=3, **tried)
    except _REFUSALS as error:
        lines = [line.removeprefix("- ") for line in str(error).splitlines() if not line.endswith("is invalid: ")]
        return next(iter(lines), type(error).__name__)[:300]
    return None


def _choice(task: Any, sample: Mapping[str, Any]) -> Any:
    """Return the index of the chosen answer, the generated text, or booleans that say if a text is the likeliest."""
    if task.OUTPUT_TYPE == "generate_until":  # a filter makes one text of all answers that it cannot parse
        return sample["resps"]
    responses = sample["filtered_resps"]
    if task.OUTPUT_TYPE == "multiple_choice":  # behind the choices there may be their unconditional likelihoods
        likelihoods = [likelihood for likelihood, _ in responses[: len(task.doc_to_choice(sample["doc"]))]]
        return likelihoods.index(max(likelihoods))
    return [response[1] for response in responses]


def _right_items(samples: Iterable[Mapping[str, Any]]) -> dict[str, dict[int, bool]]:
    """Return which items are right, by the name of a metric; metrics that grade items are left out."""
    values: dict[str, dict[int, Any]] = defaultdict(dict)
    for sample in samples:
        for metric in sample["metrics"]:
            values[f"{metric},{sample['filter']}".removesuffix(",none")][sample["doc_id"]] = sample[metric]
    return {
        key: {item: bool(value) for item, value in by_item.items()}
        for key, by_item in values.items()
        if all(isinstance(value, (bool, int, float)) and value in (0, 1) for value in by_item.values())
    }
