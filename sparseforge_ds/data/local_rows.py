"""Rows of files by the builders of `datasets`, without requests to the hub."""

from __future__ import annotations

from typing import Any


def load_rows(builder: str, **options: Any) -> Any:
    """Call `datasets.load_dataset` with a builder that it has itself, without a request to the hub.

    `datasets` counts every call by a request to the hub, even calls of its text and parquet builders. It waits for the
    answer: ten seconds a file where names cannot be resolved.

    Args:
        builder: text, json, parquet or arrow.
        **options: passed on to `load_dataset`.
    """
    import datasets  # heavy

    before = datasets.config.HF_UPDATE_DOWNLOAD_COUNTS
    datasets.config.HF_UPDATE_DOWNLOAD_COUNTS = False
    try:
        return datasets.load_dataset(builder, **options)
    finally:
        datasets.config.HF_UPDATE_DOWNLOAD_COUNTS = before
