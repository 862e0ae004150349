"""Datasets of the hub, read over the network while the run goes on, always at the revision that the run began with."""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sparseforge_ds.train.text_files import text_of


@dataclass(frozen=True)
class HubStream:
    """The train split of `owner/name` or `owner/name:config`."""

    name: str
    text_field: str

    @property
    def identity(self) -> str:
        """Two streams with equal identity give the same documents, at the same revision."""
        return json.dumps(["hub", self.name, self.text_field])

    def read(self, state: dict[str, Any] | None = None) -> HubReader:
        """The documents of today's revision from the start, or from where a reader's `state` was taken.

        Raises:
            ValueError: there is no such dataset, or it cannot be reached.
        """
        return HubReader(self, state)


class HubReader:
    """An iterator over the documents of a hub dataset that knows where it is."""

    def __init__(self, stream: HubStream, state: dict[str, Any] | None) -> None:
        self._stream = stream
        self._row = 0
        # Kept here: before its first record, a dataset does not say where it is.
        self._position: dict[str, Any] | None = None
        self._revision = self._latest_revision() if state is None else state["revision"]
        self._open(state)

    def __iter__(self) -> HubReader:
        return self

    def __next__(self) -> str:
        import datasets

        try:
            record = next(self._records)
        except (OSError, EOFError, zlib.error, ValueError, datasets.exceptions.DatasetsError) as error:
            raise ValueError(
                f"--dataset {self._stream.name}, row {self._row}: cannot be read any further ({error}); check the "
                "network and continue with --resume"
            ) from error
        text = text_of(record, self._stream.text_field, f"{self._stream.name}, row {self._row}")
        self._row += 1
        self._position = self._dataset.state_dict()
        return text

    def state(self) -> dict[str, Any]:
        """Where the next document is, as JSON types: the revision, and the position that `datasets` has in it."""
        return {"revision": self._revision, "row": self._row, "position": self._position}

    def rewind(self) -> None:
        """Go back to the first document, of the same revision."""
        self._open(None)

    def _open(self, state: dict[str, Any] | None) -> None:
        import datasets  # heavy, and needed for the hub only

        name, _, config = self._stream.name.partition(":")
        try:
            self._dataset: Any = datasets.load_dataset(
                name, config or None, split="train", streaming=True, revision=self._revision
            )
        except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
            raise self._unreachable(error) from error
        self._position = None if state is None else state["position"]
        if self._position is not None:
            self._dataset.load_state_dict(self._position)
        self._row = 0 if state is None else state["row"]
        self._records: Iterator[dict[str, Any]] = iter(self._dataset)

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
