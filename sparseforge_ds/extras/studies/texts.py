"""The held-out texts of a comparison: read once, counted, and checked against each other."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

from sparseforge_ds.config.arguments import EMBEDDED_TEXT
from sparseforge_ds.data.text_formats import is_readable
from sparseforge_ds.evaluate.scored_text import STDLIB, read_documents, records
from sparseforge_ds.extras.studies.settings import CompareConfig, HeldOut


@dataclass(frozen=True)
class Texts:
    """What is measured on."""

    validation: list[str]
    test: list[str]
    others: dict[str, list[str]]
    """More that results are measured on, by name."""
    notes: list[str]
    """What a reader of the result should know about them."""

    @property
    def identity(self) -> str:
        """Changes when a text does."""
        texts = [self.validation, self.test, *([self.others] if self.others else [])]
        return identity(texts)


def identity(content: object) -> str:
    """Changes when something that JSON can say does."""
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:16]


def read_texts(config: CompareConfig) -> Texts:
    """Read all. Raises ValueError where the validation text and the test text have documents in common."""
    validation = _documents("validation_text", config.validation_text, config.text_field)
    test = _documents("test_text", config.test_text, config.text_field)
    others = {
        name: _documents(f"other_texts.{name}", text, config.text_field) for name, text in config.other_texts.items()
    }
    if common := set(validation) & set(test):
        raise ValueError(
            f"validation_text and test_text have {len(common)} documents in common, first {min(common)[:60]!r}; "
            "nothing may be chosen on the test text: give parts that do not overlap"
        )
    held_out = {"validation": validation, "test": test, **others}
    return Texts(validation, test, others, _also_in_training(config, held_out))


def _documents(where: str, text: HeldOut, field: str) -> list[str]:
    """Read the documents of a held-out text, and name it by `where` in errors."""
    first, end = text.documents
    try:
        documents = read_documents(text.path, field, end)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None
    chosen = documents[first:end]
    if not chosen or (end is not None and len(documents) < end):
        raise ValueError(f"{where} = {text.path}, documents {first} to {end}: there are {len(documents)}")
    return chosen


def _also_in_training(config: CompareConfig, held_out: dict[str, list[str]]) -> list[str]:
    """A sentence for each text whose documents are also trained on, letter by letter."""
    text = "stdlib:train" if config.train_text == EMBEDDED_TEXT else config.train_text
    file = Path(text)
    if text not in STDLIB and not (file.is_file() and is_readable(file.name)):
        return [f"Whether held-out documents stand in {config.train_text} too was not checked."]
    wanted = {document for documents in held_out.values() for document in documents}
    training = wanted.intersection(x for x in records(text, config.text_field) if isinstance(x, str))
    shared = {name: sum(document in training for document in documents) for name, documents in held_out.items()}
    return [
        f"{count} of {len(held_out[name])} documents of the {name} text stand in the training text too."
        for name, count in shared.items()
        if count
    ]
