"""The same work on many things, by several threads: what the offline tools do is done outside of Python's lock."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

Item = TypeVar("Item")
Result = TypeVar("Result")


MOST = 8
"""Threads, unless more are asked for: by then it is the disk that matters."""


def each(function: Callable[[Item], Result], items: Iterable[Item], workers: int | None) -> list[Result]:
    """`[function(item) for item in items]`, begun in this order by `workers` threads, by default one per processor
    that this process may use. An error ends it: what is under way is finished, nothing else is begun, and the error is
    raised."""
    if workers is None:
        workers = min(MOST, len(os.sched_getaffinity(0)))
    if workers < 1:
        raise ValueError(f"workers {workers}: use 1 or more")
    threads = torch.get_num_threads()
    # One thread each inside of torch: its own pool would be shared by all workers, and each would wait for it.
    try:
        with ThreadPoolExecutor(workers, initializer=torch.set_num_threads, initargs=(1,)) as pool:
            return list(pool.map(function, items))
    finally:
        torch.set_num_threads(threads)
