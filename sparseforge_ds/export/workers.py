"""The same work on many items by several threads: the offline tools work outside of Python's lock."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar, cast

import torch

Item = TypeVar("Item")
Result = TypeVar("Result")


MOST = 8
"""Most threads by default: with more, the disk is the limit."""


def require_workers(workers: int | None) -> None:
    """Reject a value of `--workers` that is no number of threads; None passes."""
    if workers is not None and workers < 1:
        raise ValueError(f"--workers {workers}: use 1 or more")


def each(function: Callable[[Item], Result], items: Iterable[Item], workers: int | None) -> list[Result]:
    """Apply a function to all items, which are begun in their order, and return the results in that order.

    After an error the items under way are finished, no other is begun, and the error is raised.

    Args:
        function: may be called by several threads at once.
        items: its arguments.
        workers: threads; None for one per processor that this process may use, and at most `MOST`.
    """
    require_workers(workers)
    if workers is None:
        workers = min(MOST, len(os.sched_getaffinity(0)))
    # Each worker has one thread inside of torch: they would wait for each other in torch's own pool.
    threads = torch.get_num_threads()
    failed = threading.Event()

    def begin(item: Item) -> Result | None:
        """Apply the function to an item, or do nothing after an error."""
        if failed.is_set():
            return None
        try:
            return function(item)
        except BaseException:
            failed.set()
            raise

    try:
        with ThreadPoolExecutor(workers, initializer=torch.set_num_threads, initargs=(1,)) as pool:
            results = list(pool.map(begin, items))  # raises the first error
        return cast(list[Result], results)
    finally:
        torch.set_num_threads(threads)
