"""The held-out texts of a comparison: read once, counted, and checked against each other."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

from sparseforge_ds.config.arguments import EMBEDDED_TEXT
from sparseforge_ds.data.text_formats import is_readable
from sparseforge_ds.evaluate.scored_text import STDLIB, read_documents, records
from sparseforge_ds.extras.studies.settings import CompareConfig, HeldOutText


@dataclass(frozen=True)
class Texts:
    """Documents that models are measured on."""

    validation: list[str]
    test: list[str]
    other_texts: dict[str, list[str]]
    """Further texts that results are measured on, by name."""
    notes: list[str]
    """Sentences about the texts for the readers of a result."""

    @property
    def identity(self) -> str:
        """Hash of all documents."""
        texts = [self.validation, self.test, *([self.other_texts] if self.other_texts else [])]
        return content_hash(texts)


def content_hash(content: object) -> str:
    """Return a short hash of anything that JSON can express."""
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:16]


def read_texts(config: CompareConfig, with_notes: bool = True) -> Texts:
    """Read all held-out texts.

    Args:
        config: the comparison.
        with_notes: False to leave out the notes, for which the whole training text is read.

    Raises:
        ValueError: the validation text and the test text have documents in common, or a text cannot be read.
    """
    validation = _documents("validation_text", config.validation_text, config.text_field)
    test = _documents("test_text", config.test_text, config.text_field)
    other_texts = {
        name: _documents(f"other_texts.{name}", text, config.text_field) for name, text in config.other_texts.items()
    }
    if common := set(validation) & set(test):
        raise ValueError(
            f"validation_text and test_text have {len(common)} documents in common, first {min(common)[:60]!r}; "
            "nothing may be chosen on the test text: give parts that do not overlap"
        )
    held_out = {"validation": validation, "test": test, **other_texts}
    return Texts(validation, test, other_texts, _also_in_training(config, held_out) if with_notes else [])


def _documents(key: str, text: HeldOutText, field: str) -> list[str]:
    """Read the documents of a held-out text; `key` names it in errors."""
    first, end = text.documents
    try:
        documents = read_documents(text.path, field, end)
    except ValueError as error:
        raise ValueError(f"{key}: {error}") from None
    chosen = documents[first:end]
    if not chosen or (end is not None and len(documents) < end):
        raise ValueError(
            f"{key} = {text.path}, documents {first} to {end}: there are {len(documents)}; give a range within them"
        )
    return chosen


def _also_in_training(config: CompareConfig, held_out: dict[str, list[str]]) -> list[str]:
    """Return a sentence for each held-out text of which documents are, letter by letter, in the training text."""
    # Only local files are read through; a stream or a hub data set may be without end.
    text = "stdlib:train" if config.train_text == EMBEDDED_TEXT else config.train_text
    file = Path(text)
    if text not in STDLIB and not (file.is_file() and is_readable(file.name)):
        return [f"Whether {config.train_text} contains held-out documents was not checked."]
    # One pass over the training text looks for all held-out documents.
    documents_to_find = {document for documents in held_out.values() for document in documents}
    training = documents_to_find.intersection(x for x in records(text, config.text_field) if isinstance(x, str))
    shared = {name: sum(document in training for document in documents) for name, documents in held_out.items()}
    return [
        f"{count} of {len(held_out[name])} documents of the {name} text are in the training text too."
        for name, count in shared.items()
        if count
    ]
