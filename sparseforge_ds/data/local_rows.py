"""Files that lie here, or have an address of their own, by the builders of `datasets`."""

from __future__ import annotations

from typing import Any


def load_rows(builder: str, **options: Any) -> Any:
    """`datasets.load_dataset` by a builder of its own, without asking anybody.

    `datasets` counts every call, those of its text and parquet builders too, by a request to the hub, and waits for it:
    ten seconds a file where names cannot be resolved.

    Args:
        builder: text, json, parquet or arrow.
        **options: of `load_dataset`.
    """
    import datasets  # heavy

    before = datasets.config.HF_UPDATE_DOWNLOAD_COUNTS
    datasets.config.HF_UPDATE_DOWNLOAD_COUNTS = False
    try:
        return datasets.load_dataset(builder, **options)
    finally:
        datasets.config.HF_UPDATE_DOWNLOAD_COUNTS = before
