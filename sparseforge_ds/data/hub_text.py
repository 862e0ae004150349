"""Datasets of the hub, read over the network while the run goes on, at the revision that the run began with.

`datasets` lists the files of a dataset, and we read them as local files. So shards may differ in fields without text.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from typing_extensions import override

from sparseforge_ds.data.splits import choose_split, describe_files, read_card_patterns, split_named_in
from sparseforge_ds.data.text_files import DEFAULTS, Reader, TextOptions, TextSource
from sparseforge_ds.data.text_formats import KINDS, is_indexed, is_readable
from sparseforge_ds.model.hub_access import why_unreachable

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class HubText(TextSource):
    """Split of `owner/name`, `owner/name:config` or `owner/name:folder/subfolder`."""

    name: str
    options: TextOptions = DEFAULTS
    streamed = True

    @property
    @override
    def facts(self) -> dict[str, Any]:
        """See `TextSource`. The revision is not among them: the reader's state has it."""
        return {"hub dataset": self.name, **{f"--{name}": value for name, value in vars(self.options).items()}}

    @override
    def read(self, state: Mapping[str, Any] | None = None) -> Reader:
        """See `TextSource`. Reads the revision of `state`, or today's without one."""
        if state is None or state["revision"] is None:
            state = {**(state or {}), "revision": self._latest_revision()}
        files = self._find_files(state["revision"])
        _log.info("%s: %s", self.name, describe_files(files, self.options.split))
        return Reader(files, self.options, state)

    def _find_files(self, revision: str | None) -> list[str]:
        """Return the addresses of the split's files, sorted by name."""
        import datasets  # heavy, and needed for the hub only

        who = f"--dataset {self.name}"
        name, _, part = self.name.partition(":")
        # 1. List the files. All of a folder: `datasets` would guess at splits by names, and leave files out.
        is_folder = "/" in part
        options: dict[str, Any] = {"data_files": {"train": f"{part}/**"}} if is_folder else {"name": part or None}
        if not Path(name).exists():
            self._check_card(name, revision)
        try:
            builder = datasets.load_dataset_builder(name, **options, revision=revision)
        except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
            raise self._unreachable(error) from error
        # 2. Choose those of the split.
        splits: dict[str, frozenset[str]] = {}
        for split, files in (builder.config.data_files or {}).items():
            for file in map(str, files):
                if is_folder and is_readable(file) and not is_indexed(file):
                    splits[file] = split_named_in(file.partition(f"/{part}/")[2])
                elif not is_folder:
                    splits[file] = splits.get(file, frozenset()) | {str(split)}
        chosen, _ = choose_split(splits, self.options.split, who)
        for file in chosen:
            if not is_readable(file):
                raise ValueError(
                    f"{who}: {file} is none of {KINDS}; name a configuration or folder without such files as "
                    "owner/name:config or owner/name:folder/subfolder"
                )
        return chosen

    def _check_card(self, name: str, revision: str | None) -> None:
        """Refuse a dataset card whose patterns leave the dataset: `datasets` would look for them on this machine."""
        import huggingface_hub

        try:
            card = huggingface_hub.hf_hub_download(
                name,
                "README.md",
                repo_type="dataset",
                revision=revision,
                local_files_only=why_unreachable() is not None,
            )
        except (OSError, ValueError, huggingface_hub.errors.HTTPError):
            return  # there is no card; if the dataset cannot be reached at all, `datasets` says why
        read_card_patterns(Path(card), f"--dataset {self.name}")

    def _latest_revision(self) -> str | None:
        """Return today's revision on the hub, or None for a local folder of that name."""
        import huggingface_hub

        name = self.name.partition(":")[0]
        if Path(name).exists():  # `datasets` takes a folder of that name first, which has no revisions
            return None
        try:
            return str(huggingface_hub.HfApi().dataset_info(name).sha)
        except (OSError, ValueError, huggingface_hub.errors.HTTPError) as error:
            raise self._unreachable(error) from error

    def _unreachable(self, error: Exception) -> ValueError:
        return ValueError(
            f"--dataset {self.name}: neither a local file or folder nor a readable hub dataset ({error}); "
            "check the name and the network, name one of its configurations as owner/name:config, "
            "or download it and give the files"
        )
