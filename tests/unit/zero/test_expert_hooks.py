"""Modules whose experts can be hooked."""

from __future__ import annotations

from torch import nn

from sparseforge_ds.zero.expert_hooks import why_unhookable
from tests.tiny_models import BUILDERS


def test_experts_have_the_interface_of_transformers() -> None:
    experts = BUILDERS["mixtral"]().model.layers[0].mlp.experts
    assert why_unhookable(experts) is None
    message = "has no `gate_up_proj` and `_apply_gate`, the interface of transformers' fused experts"
    assert why_unhookable(nn.Linear(4, 4)) == message
