"""Zero-shot accuracy by lm-evaluation-harness, with its own prompts, beside the paper's numbers.

The metric to compare with papers is `acc`, unless they say `acc_norm`; both are shown, with the standard errors of the
harness. Text of these benchmarks in the training data makes the comparison worthless: some mixtures have it.
"""

from __future__ import annotations

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from sparseforge_ds.evaluate.harness import LoadedTasks
from sparseforge_ds.evaluate.perplexity import positions_of
from sparseforge_ds.evaluate.pretrained import check_known


def measure(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    tasks: LoadedTasks,
    limit: int | None = None,
    batch_size: int = 8,
    max_length: int | None = None,
) -> dict[str, dict[str, float]]:
    """Run the tasks without examples in the prompt; metrics by task: `acc`, `acc_stderr`, ..., and `items`.

    Raises ValueError for tokens that the model does not know.
    """
    from lm_eval import simple_evaluate  # an extra, which load_tasks has found
    from lm_eval.models.huggingface import HFLM

    length = positions_of(model.config) if max_length is None else max_length
    wrapped = HFLM(
        pretrained=model,
        tokenizer=tokenizer,
        batch_size=batch_size,
        max_length=length,
        device=str(model.device),
        trust_remote_code=False,
    )

    def check(module: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
        check_known(model, [int(inputs[0].max())])

    hook = model.get_input_embeddings().register_forward_pre_hook(check)  # the harness has the tokens to itself
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
    results: dict[str, dict[str, float]] = {}
    for task in tasks.by_name:
        metrics = {key.removesuffix(",none"): value for key, value in output["results"][task].items()}
        results[task] = {key: value for key, value in metrics.items() if isinstance(value, (int, float))}
        results[task]["items"] = output["n-samples"][task]["effective"]
    return results
