"""Answers that a model generates for the harness: their tokens, and where they end.

The harness keeps the text of an answer alone. Both of its classes, for transformers and for vLLM, generate in
`_model_generate` and then tell their cache hook each answer in the same order: this is where tokens are counted.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict, deque
from collections.abc import Sequence
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


def request_key(request: Sequence[Any]) -> str:
    """Return the key of a request in `AnswerLog`: its prompt and its settings, as two tasks may share prompts."""
    return repr(tuple(request))


class AnswerLog:
    """Log of the answers of a model that the harness runs; it takes the place of the model's cache hook.

    Args:
        wrapped: a model of the harness, `HFLM` or `VLLM`.
    """

    def __init__(self, wrapped: Any) -> None:
        self.by_request: dict[str, list[Answer]] = defaultdict(list)
        """Answers by `request_key`, in the order in which they were generated."""
        self._wrapped = wrapped
        self._generate = wrapped._model_generate
        self._untold: deque[Answer] = deque()
        wrapped._model_generate = self._model_generate
        wrapped.cache_hook = self

    def add_partial(self, kind: str, request: Sequence[Any], response: str) -> None:
        """Take the answer to a request, as the harness' cache hook."""
        if kind == "generate_until":
            self.by_request[request_key(request)].append(self._untold.popleft())

    def _model_generate(self, *args: Any, **kwargs: Any) -> Any:
        """Generate as the model does, and note the answers."""
        output = self._generate(*args, **kwargs)
        if isinstance(output, Tensor):
            self._untold.extend(self._padded_answers(output, kwargs))
        elif kwargs.get("generate"):  # vLLM takes this way for likelihoods too
            for request in output:
                completion = request.outputs[0]
                is_cut = completion.finish_reason == "length"
                self._untold.append(Answer(list(request.prompt_token_ids), list(completion.token_ids), is_cut))
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
