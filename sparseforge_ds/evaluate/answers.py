"""Answers that a model generates for the harness: their tokens, and where they end.

The harness keeps the text of an answer alone. Both of its classes, for transformers and for vLLM, generate in
`_model_generate`: tokens are counted there.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import Any, NamedTuple

from torch import Tensor


class Answer(NamedTuple):
    """One generated answer."""

    prompt: list[int]
    """Tokens of the prompt as the model read it."""
    tokens: list[int]
    """Generated tokens, with the end of text or the last one of a stop sequence, whichever comes first."""
    is_cut: bool
    """True if neither came, so that the limit ended the answer."""


class AnswerLog:
    """Log of the answers that a model of the harness generates from now on.

    Args:
        wrapped: a model of the harness, `HFLM` or `VLLM`.
    """

    def __init__(self, wrapped: Any) -> None:
        self._answers: list[Answer] = []
        self._wrapped = wrapped
        self._generate = wrapped._model_generate
        wrapped._model_generate = self._model_generate

    def take(self) -> list[Answer]:
        """Return the answers since the last call, in the order in which they were generated."""
        answers = self._answers
        self._answers = []
        return answers

    def _model_generate(self, *args: Any, **kwargs: Any) -> Any:
        """Generate as the model does, and note the answers."""
        output = self._generate(*args, **kwargs)
        if isinstance(output, Tensor):
            self._answers.extend(self._padded_answers(output, kwargs))
        elif kwargs.get("generate"):  # vLLM takes this way for likelihoods too
            for request in output:
                completion = request.outputs[0]
                is_cut = completion.finish_reason == "length"
                self._answers.append(Answer(list(request.prompt_token_ids), list(completion.token_ids), is_cut))
        return output

    def _padded_answers(self, output_BS: Tensor, inputs: dict[str, Any]) -> list[Answer]:
        """Return the answers of a batch of transformers, which pads prompts on the left and answers on the right."""
        start = inputs["context"].shape[1]
        prompts = [row[mask.bool()] for row, mask in zip(inputs["context"], inputs["attention_mask"], strict=True)]
        tokenizer = self._wrapped.tokenizer
        configured = self._wrapped.model.generation_config.eos_token_id
        ends = {tokenizer.eos_token_id, *(configured if isinstance(configured, list) else [configured])}
        answers = []
        for prompt_S, tokens in zip(prompts, output_BS[:, start:].tolist(), strict=True):
            # The end of text comes first, or one of the stop sequences, behind which others of the batch went on.
            end = next((place for place, token in enumerate(tokens, start=1) if token in ends), None)
            tokens = tokens[:end]

            def has_stop(length: int, tokens: list[int] = tokens) -> bool:
                text = tokenizer.decode(tokens[:length])
                return any(stop in text for stop in inputs["stop"])

            stopped = has_stop(len(tokens))
            if stopped:
                tokens = tokens[: bisect_left(range(len(tokens)), True, key=has_stop)]
            answers.append(Answer(prompt_S.tolist(), tokens, end is None and not stopped))
        return answers
