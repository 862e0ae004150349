"""Held-out text of `--eval_dataset`: consecutive windows of tokens, in the order of the text."""

from __future__ import annotations

import contextlib
import hashlib
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
from transformers import PreTrainedTokenizerBase

from sparseforge_ds.config.arguments import EMBEDDED_TEXT, HELD_OUT_TEXT, RunArguments
from sparseforge_ds.data.mixture import find_source, require_splits
from sparseforge_ds.data.splits import find_files
from sparseforge_ds.data.stdlib_text import stdlib_file
from sparseforge_ds.data.text_files import LocalText, TextOptions, TextSource
from sparseforge_ds.data.tokenization import no_text_error, token_batches, unknown_token_error
from sparseforge_ds.data.windows import ids_of_tokens, trained_flags


@dataclass(frozen=True)
class HeldOut:
    """First windows of a held-out text, which do not overlap."""

    name: str
    """Name of the text, as in `--eval_dataset`."""
    token_NS: np.ndarray
    """(N, S) tokens of `tokenization.token_dtype`."""

    @property
    def key(self) -> str:
        """Return a hash of the windows. Perplexities are comparable only where it is the same."""
        content = f"{self.token_NS.dtype} {self.token_NS.shape}".encode() + self.token_NS.tobytes()
        return hashlib.sha256(content).hexdigest()[:16]


def find_held_out(arguments: RunArguments) -> TextSource | None:
    """Return the source of `--eval_dataset`, or None without the flag. Reads no more than `find_source`.

    Raises:
        ValueError: as `find_source`; or `--eval_split` names a split that the one file is not of.
    """
    name = arguments.eval_dataset
    if name is None:
        return None
    options = TextOptions.from_arguments(arguments, arguments.eval_split)
    with _rename_flags_in_errors():
        if name == HELD_OUT_TEXT:
            source: TextSource = LocalText(
                name, find_files(stdlib_file("heldout")), replace(options, text_field="text")
            )
        else:
            source = find_source(name, options)
        require_splits([source], options.split, default=RunArguments.eval_split)
        return source


def read_held_out(
    source: TextSource, tokenizer: PreTrainedTokenizerBase, vocabulary: int, arguments: RunArguments
) -> HeldOut:
    """Tokenize the windows that are scored, framed and joined as in training.

    Raises:
        ValueError: the text cannot be read, is shorter than a window, or the model lacks some of its tokens.
    """
    length = arguments.seq_length
    limit = arguments.eval_sequences
    # 1. Read no more text than is scored.
    batches: list[np.ndarray] = []
    tokens = skipped = 0
    with _rename_flags_in_errors():
        for batch in token_batches(source.read(), tokenizer, arguments.document_frame, *source.flags):
            batches.append(batch.token)
            tokens += len(batch.token)
            skipped += batch.skipped
            if limit and tokens >= limit * length:
                break
        if not tokens:
            raise no_text_error(source.name, skipped)
    # 2. Cut it into windows.
    windows = min(tokens // length, limit or tokens)
    if not windows:
        raise ValueError(
            f"--eval_dataset {source.name}: has {tokens:,} tokens, less than one window of --seq_length {length}; give "
            "more text"
        )
    token_NS = np.concatenate(batches)[: windows * length].reshape(windows, length)
    # 3. Check that the model can score them.
    if (largest := int(ids_of_tokens(token_NS).max())) >= vocabulary:
        raise unknown_token_error(largest, vocabulary)
    if token_NS.dtype.names is not None and not trained_flags(token_NS)[:, 1:].any():
        raise ValueError(
            f"--eval_dataset {source.name}: none of its first {windows:,} windows has a token that is scored (of a "
            "completion, or behind the first of a document); raise --eval_sequences"
        )
    return HeldOut(source.name, token_NS)


@contextlib.contextmanager
def _rename_flags_in_errors() -> Iterator[None]:
    """Name the flags of evaluation in errors about sources, which name those of training."""
    try:
        yield
    except ValueError as error:
        message = re.sub(r"--(dataset|split)\b", r"--eval_\1", str(error))
        message = message.replace(f"or {EMBEDDED_TEXT}; in a mixture with =SHARE", f"or {HELD_OUT_TEXT}")
        raise ValueError(message) from None
