"""Experts in lists: a gradient for each at one moment, and a word where nobody saw to it."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from sparseforge_ds.model.expert_modules import refuse_unprepared, sync_expert_gradients


class Block(nn.Module):
    """Calls the first expert only."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.experts[0](hidden)
        return result


def test_every_expert_has_a_gradient_and_those_of_the_called_do_not_change() -> None:
    torch.manual_seed(0)
    alone = Block()
    joined = Block()
    joined.load_state_dict(alone.state_dict())
    model = nn.Sequential(nn.Linear(4, 4), joined)
    sync_expert_gradients(model, {"1.experts": "1"})
    hidden = torch.randn(2, 4)
    model(hidden).sum().backward()
    alone(model[0](hidden).detach()).sum().backward()
    torch.testing.assert_close(joined.experts[0].weight.grad, alone.experts[0].weight.grad, rtol=0, atol=0)
    assert alone.experts[1].weight.grad is None
    assert all(parameter.grad is not None for parameter in joined.parameters())
    assert not any(parameter.grad.any() for expert in joined.experts[1:] for parameter in expert.parameters())


def test_a_model_that_was_not_prepared_is_refused() -> None:
    model = nn.Sequential(Block())
    lists = {"0.experts": "0"}
    with pytest.raises(ValueError, match=r"0\.experts: .*prepare\(model, config\) before"):
        refuse_unprepared(model, lists)
    sync_expert_gradients(model, lists)
    refuse_unprepared(model, lists)
