"""Work of several threads on many items."""

from __future__ import annotations

import threading

import pytest

from sparseforge_ds.export.workers import each


def test_results_are_in_the_order_of_the_items() -> None:
    assert each(lambda item: -item, range(20), 3) == [-item for item in range(20)]
    with pytest.raises(ValueError, match="^--workers 0: use 1 or more"):
        each(str, range(2), 0)


def test_after_an_error_no_other_item_is_begun() -> None:
    """The first item ends long after the second one has failed."""
    begun: list[int] = []
    failed = threading.Event()

    def work(item: int) -> None:
        begun.append(item)
        if item == 0:
            assert failed.wait(60)
            threading.Event().wait(0.2)
        if item == 1:
            failed.set()
            raise ValueError("as it should")

    with pytest.raises(ValueError, match="as it should"):
        each(work, range(50), 2)
    assert sorted(begun) == [0, 1]
