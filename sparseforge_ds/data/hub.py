"""Datasets of the hub, read over the network while the run goes on, always at the revision that the run began with.

`datasets` says which files a dataset has; they are read line by line as local files are, and of a record nothing but
its text. So shards of one dataset may differ in all their other fields (`datasets` would cast them to those of the
first shard, and fail), and every kind of compression that local files have is readable.
"""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from sparseforge_ds.config.arguments import SampleBy
from sparseforge_ds.data.formats import DAMAGED, KINDS, documents_of, is_readable
from sparseforge_ds.data.splits import choose, split_of
from sparseforge_ds.data.text_files import FileReader

_WAITS = (1.0, 5.0, 30.0, 120.0, 300.0)
"""Seconds before each new attempt at a file, after the attempts that huggingface_hub makes by itself."""


@dataclass(frozen=True)
class HubStream:
    """A split of `owner/name`, `owner/name:config` or `owner/name:folder/of/it`."""

    name: str
    text_field: str
    split: str = "train"
    sample_by: SampleBy = "document"

    @property
    def facts(self) -> dict[str, Any]:
        """What decides the documents, besides the revision."""
        how = {"--text_field": self.text_field, "--split": self.split, "--sample_by": self.sample_by}
        return {"hub dataset": self.name, **how}

    @property
    def identity(self) -> str:
        """Two streams with equal identity give the same documents, at the same revision."""
        # Streams once had no other split and division, and are named without these.
        unusual = [self.split, self.sample_by] if (self.split, self.sample_by) != ("train", "document") else []
        return json.dumps(["hub files", self.name, self.text_field, *unusual])

    def read(self, state: dict[str, Any] | None = None) -> HubReader:
        """The documents of today's revision from the start, or from where a reader's `state` was taken.

        Raises:
            ValueError: there is no such dataset, it cannot be reached, or its files are of a kind that is not readable.
        """
        return HubReader(self, state)


class HubReader:
    """An iterator over the documents of a hub dataset that knows where it is."""

    def __init__(self, stream: HubStream, state: dict[str, Any] | None) -> None:
        self._stream = stream
        self._revision = self._latest_revision() if state is None else state["revision"]

        def read(file: str) -> Iterator[str]:
            open_documents = partial(documents_of, sample_by=stream.sample_by)
            return read_url(file, stream.text_field, f"--dataset {stream.name}", open_documents)

        files = self._find_files()
        what = f"1 file of split {stream.split}: {files[0]}"
        if len(files) > 1:
            what = f"{len(files):,} files of split {stream.split}: {files[0]} to {files[-1]}"
        print(f"--dataset {stream.name}: {what}", flush=True)
        self._documents = FileReader(files, read, state)

    def __iter__(self) -> HubReader:
        return self

    def __next__(self) -> str:
        return next(self._documents)

    def state(self) -> dict[str, Any]:
        """Where the next document is, as JSON types: the revision, which file, and which record of it."""
        return {"revision": self._revision, **self._documents.state()}

    def rewind(self) -> None:
        """Go back to the first document, of the same revision."""
        self._documents.rewind()

    def _find_files(self) -> tuple[str, ...]:
        """Addresses of the split's files, in the order of their names."""
        import datasets  # heavy, and needed for the hub only

        who = f"--dataset {self._stream.name}"
        name, _, part = self._stream.name.partition(":")
        is_folder = "/" in part  # all of it: by names of files, `datasets` would guess at splits and leave some out
        which: dict[str, Any] = {"data_files": {"train": f"{part}/**"}} if is_folder else {"name": part or None}
        try:
            builder = datasets.load_dataset_builder(name, **which, revision=self._revision)
        except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
            raise self._unreachable(error) from error
        splits: dict[str, frozenset[str]]
        found = {str(split): list(map(str, files)) for split, files in (builder.config.data_files or {}).items()}
        if is_folder:
            everything = found.get("train", [])
            readable = [file for file in everything if is_readable(file)] or everything
            splits = {file: split_of(file.partition(f"/{part}/")[2]) for file in readable}
        else:
            splits = {}
            for split, file in ((split, file) for split, own in found.items() for file in own):
                splits[file] = splits.get(file, frozenset()) | {split}
        files, _ = choose(splits, self._stream.split, who)
        for file in files:
            if not is_readable(file):
                raise ValueError(
                    f"{who}: {file} is none of {KINDS}; name a configuration or folder without such files as "
                    "owner/name:config or owner/name:folder/subfolder"
                )
        return tuple(files)

    def _latest_revision(self) -> str | None:
        import huggingface_hub

        name = self._stream.name.partition(":")[0]
        if Path(name).exists():  # `datasets` takes a folder of that name first, which has no revisions
            return None
        try:
            return str(huggingface_hub.HfApi().dataset_info(name).sha)
        except (OSError, ValueError, huggingface_hub.errors.HTTPError) as error:
            raise self._unreachable(error) from error

    def _unreachable(self, error: Exception) -> ValueError:
        return ValueError(
            f"--dataset {self._stream.name}: neither a local file or folder nor a readable hub dataset ({error}); "
            "check the name and the network, name one of its configurations as owner/name:config, "
            "or download it and give the files"
        )


def read_url(
    file: str, text_field: str, who: str, open_documents: Callable[[str, str], Iterator[str]] = documents_of
) -> Iterator[str]:
    """The documents of a file behind an address. After a failure of the network it goes on with the next document.

    Raises:
        ValueError: the file is damaged, a record has no text, or the network fails again and again.
    """
    import huggingface_hub

    done, failures = 0, 0
    while True:
        try:
            for text in itertools.islice(open_documents(file, text_field), done, None):
                yield text
                done, failures = done + 1, 0
            return
        except DAMAGED as error:
            raise ValueError(
                f"{who}: {file}, document {done}: not readable ({error}); the file is damaged on the hub, or was cut "
                "off on the way: continue with --resume"
            ) from error
        except (OSError, huggingface_hub.errors.HTTPError) as error:
            gone = (
                FileNotFoundError,
                PermissionError,
                huggingface_hub.errors.RepositoryNotFoundError,
            )  # gated ones too
            if isinstance(error, (*gone, huggingface_hub.errors.EntryNotFoundError)) or failures == len(_WAITS):
                raise ValueError(
                    f"{who}: {file}, document {done}: cannot be read any further ({error}); check the network and "
                    "continue with --resume"
                ) from error
            print(f"note: {who}: {file}, document {done}: {error}; trying again", flush=True)
            time.sleep(_WAITS[failures])
            failures += 1
