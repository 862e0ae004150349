"""Text that the loop reads beside the steps themselves."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from sparseforge_ds.config import SparseForgeConfig
from sparseforge_ds.train.loop import log_masks


def test_the_gap_is_measured_on_what_was_just_read() -> None:
    """Measure on the last batch: a stream may have no more, or would have to make a chunk that the run never needs."""
    read: list[range] = []

    def micro_batches(sequences: range, with_logits: bool) -> list[Any]:
        assert not with_logits
        read.append(sequences)
        return [SimpleNamespace(to=lambda _: None)]

    config = SparseForgeConfig.from_dict({"max_steps": 40, "method": {"update_every": 3}})
    forge: Any = SimpleNamespace(soft_to_hard_gap=lambda _: 0.5, config=config, schedule=config.soft.schedule(40))
    context: Any = SimpleNamespace(
        spec=SimpleNamespace(config=SimpleNamespace(monitor=SimpleNamespace(histograms_every=0, gap_every=2))),
        batches=SimpleNamespace(layout=SimpleNamespace(sequences_at_once=4), position=24, micro_batches=micro_batches),
        forge=forge,
        device="cpu",
    )
    written: list[dict[str, float]] = []
    monitor: Any = SimpleNamespace(write=lambda _, scalars: written.append(scalars))
    for step in (1, 2, 3, 4):  # masks move after step 3
        log_masks(context, monitor, step)
    assert read == [range(20, 24)] and written == [{"mask/soft_to_hard_gap": 0.5}]
