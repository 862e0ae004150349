"""Search for the texts of a run, before any of them is read."""

from __future__ import annotations

from sparseforge_ds.config.arguments import RunArguments
from sparseforge_ds.data.held_out import find_held_out
from sparseforge_ds.data.mixture import Mixture, find_text
from sparseforge_ds.data.text_files import LocalText, Source, TextOptions
from sparseforge_ds.data.tokenization import check_trained
from sparseforge_ds.model.pretrained import Pretrained


def find_texts(arguments: RunArguments, model: Pretrained) -> tuple[Mixture, Source | None]:
    """Return the text to train on, and that of `--eval_dataset`, if any.

    Raises:
        ValueError: one cannot be found, used or told apart into prompts and completions, or its files are empty.
    """
    text = find_text(arguments.dataset, TextOptions.from_arguments(arguments))
    held_out = find_held_out(arguments)
    for source in text.sources:
        _check_not_empty("--dataset", source)
    if held_out is not None:
        _check_not_empty("--eval_dataset", held_out)
    # A dry run of a model on the hub has no tokenizer to try.
    if arguments.loss_on == "completion" and model.folder.is_dir():
        for source in text.sources:
            if isinstance(source, LocalText):
                check_trained(source, model.tokenizer, arguments.document_frame)
    return text, held_out


def _check_not_empty(flag: str, source: Source) -> None:
    """Reject a text whose files are all empty; one shard of many may be."""
    if isinstance(source, LocalText) and not any(path.stat().st_size for path in source.files.paths):
        raise ValueError(f"{flag} {source.name}: {source.files.describe()}: there is no text in it; give another text")
