"""Text that a run is not trained on: what `--eval_dataset` names, as windows of tokens in the order of the text."""

from __future__ import annotations

import contextlib
import hashlib
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
from transformers import PreTrainedTokenizerBase

from sparseforge_ds.config.arguments import EMBEDDED_TEXT, HELD_OUT_TEXT, RunArguments
from sparseforge_ds.data.mixture import find_source
from sparseforge_ds.data.splits import find_files
from sparseforge_ds.data.stdlib_text import stdlib_file
from sparseforge_ds.data.text_files import LocalText, Source, TextOptions
from sparseforge_ds.data.tokenization import no_text_error, tokenise, unknown_token_error
from sparseforge_ds.data.windows import token_ids, trained_flags


@dataclass(frozen=True)
class HeldOut:
    """Windows that do not overlap, the first of a text."""

    name: str
    """What users call the text."""
    token_NS: np.ndarray
    """(N, S) tokens, see `tokenization.token_dtype`."""

    @property
    def key(self) -> str:
        """Of the windows: perplexities of other ones cannot be compared."""
        content = f"{self.token_NS.dtype} {self.token_NS.shape}".encode() + self.token_NS.tobytes()
        return hashlib.sha256(content).hexdigest()[:16]


def find_held_out(arguments: RunArguments) -> Source | None:
    """The source of `--eval_dataset`, None where there is none. Looks, but reads no more than `find_source`.

    Raises:
        ValueError: as `find_source`.
    """
    name, options = arguments.eval_dataset, TextOptions.from_arguments(arguments, arguments.eval_split)
    if name is None:
        return None
    with _naming_our_flags():
        if name == HELD_OUT_TEXT:
            return LocalText(name, find_files(stdlib_file("heldout")), replace(options, text_field="text"))
        return find_source(name, options)


def read_held_out(
    source: Source, tokenizer: PreTrainedTokenizerBase, vocabulary: int, arguments: RunArguments
) -> HeldOut:
    """Tokenise as much of a text as is scored, framed and joined as in training.

    Raises:
        ValueError: it cannot be read, is shorter than a window, or the model has not all of its tokens.
    """
    length, limit = arguments.seq_length, arguments.eval_sequences
    parts: list[np.ndarray] = []
    tokens = skipped = 0
    with _naming_our_flags():
        for batch in tokenise(source.read(), tokenizer, arguments.document_frame, *source.marks):
            parts.append(batch.token)
            tokens, skipped = tokens + len(batch.token), skipped + batch.skipped
            if limit and tokens >= limit * length:
                break
        if not tokens:
            raise no_text_error(source.name, skipped)
    windows = min(tokens // length, limit or tokens)
    if not windows:
        raise ValueError(
            f"--eval_dataset {source.name}: has {tokens:,} tokens, less than one window of --seq_length {length}; give "
            "more text"
        )
    token_NS = np.concatenate(parts)[: windows * length].reshape(windows, length)
    if (largest := int(token_ids(token_NS).max())) >= vocabulary:
        raise unknown_token_error(largest, vocabulary)
    if token_NS.dtype.names is not None and not trained_flags(token_NS)[:, 1:].any():
        raise ValueError(
            f"--eval_dataset {source.name}: none of its first {windows:,} windows has a token that is scored (of a "
            "completion, or behind the first of a document); raise --eval_sequences"
        )
    return HeldOut(source.name, token_NS)


@contextlib.contextmanager
def _naming_our_flags() -> Iterator[None]:
    """Sources are found and read by the names of training's flags."""
    try:
        yield
    except ValueError as error:
        said = re.sub(r"--(dataset|split)\b", r"--eval_\1", str(error))
        said = said.replace(f"or {EMBEDDED_TEXT}; in a mixture with =WEIGHT", f"or {HELD_OUT_TEXT}")
        raise ValueError(said) from None
