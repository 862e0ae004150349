"""Labels drawn from the model: for the tokens that are trained on, and by their places."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from sparseforge_ds.curvature.sampled_labels import SampledLabels
from sparseforge_ds.data.micro_batch import IGNORED
from tests.tiny_models import tiny_llama, token_batch


@dataclass
class Batches:
    """One micro-batch, some of whose tokens are trained on."""

    run: Any
    labels: Tensor

    def passes(self, batch: int) -> list[Any]:
        return [self.run]

    def divisor(self, batch: int) -> float:
        return 7.0

    def predicted(self, batch: int) -> list[Tensor]:
        return [self.labels]


def test_tokens_that_are_not_trained_on_have_no_loss() -> None:
    model = tiny_llama().eval()
    ids = token_batch()["input_ids"]
    context: Any = SimpleNamespace(
        layout=SimpleNamespace(engine=SimpleNamespace(module=model)), tokens_of=lambda _number, rows: [range(rows)]
    )
    drawn = SampledLabels(context, 0)

    def loss(chosen_T: Tensor) -> Tensor:
        labels = torch.where(chosen_T, 5, IGNORED)
        (closure,) = drawn.drawn(Batches(lambda: model(input_ids=ids), labels), 1, 0)
        return closure()

    first = torch.arange(ids.numel()) % 3 == 0
    all_of_them = torch.ones_like(first)
    torch.testing.assert_close(loss(first) + loss(~first), loss(all_of_them))
    assert loss(~all_of_them) == 0 < loss(first)
