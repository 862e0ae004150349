"""Every variant of transformers' experts, against its own way to compute them densely."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.integrations.moe import use_experts_implementation

from sparseforge_ds.extras.packed24.packed_experts import Packed24Experts, pack_experts, packed_kind
from sparseforge_ds.packed_format.packing import POSITIONS, has_packed_weights, pack24

EXPERTS, HIDDEN, INNER = 5, 20, 12
VARIANTS: dict[str, dict[str, bool]] = {
    "plain": {},
    "transposed, biased, interleaved": {"is_transposed": True, "has_bias": True, "is_concatenated": False},
    "no gate": {"has_gate": False},
    "norm behind": {"has_post_expert_norm": True},
}


def experts_of(flags: dict[str, bool]) -> Any:
    """Return an experts module of transformers with 2:4 weights."""

    @use_experts_implementation(**flags)
    class Experts(nn.Module):
        def __init__(self, config: Any) -> None:
            super().__init__()
            self.num_experts = EXPERTS
            self.act_fn = nn.functional.silu
            first = "gate_up_proj" if flags.get("has_gate", True) else "up_proj"
            shapes = {first: (EXPERTS, INNER * (1 + flags.get("has_gate", True)), HIDDEN)}
            for name, shape in (shapes | {"down_proj": (EXPERTS, HIDDEN, INNER)}).items():
                weight = torch.randn(shape)
                weight.view(*shape[:2], -1, 4)[..., 1:3] = 0
                turned = weight.transpose(1, 2).contiguous() if flags.get("is_transposed") else weight
                setattr(self, name, nn.Parameter(turned))
                setattr(self, f"{name}_bias", nn.Parameter(torch.randn(shape[:2])))
            self.post_expert_norm = nn.LayerNorm(HIDDEN)

        def _apply_gate(self, gate_up: Tensor) -> Tensor:
            gate, up = (
                gate_up.chunk(2, -1) if flags.get("is_concatenated", True) else (gate_up[..., ::2], gate_up[..., 1::2])
            )
            return (up + 1) * gate.sigmoid()

        def forward(self, *args: Tensor) -> Tensor:
            raise AssertionError("batched_mm is what is compared with")

    return Experts(SimpleNamespace(_experts_implementation="batched_mm"))


@pytest.mark.parametrize("variant", VARIANTS)
def test_packed_experts_compute_as_those_of_transformers(variant: str) -> None:
    experts = experts_of(VARIANTS[variant])
    x = torch.randn(9, HIDDEN)
    shares = torch.rand(9, 2)
    chosen = torch.rand(9, EXPERTS - 1).argsort(-1)[:, :2]  # nobody chooses the last
    expected = experts(x, chosen, shares)
    kind = type(experts)
    before = {name: value.clone() for name, value in experts.state_dict().items()}
    names = [name for name, value in before.items() if value.ndim == 3]
    packed = packed_kind(experts)
    assert packed is Packed24Experts and not has_packed_weights(experts)
    pack_experts(experts, packed, names)
    assert has_packed_weights(experts) and isinstance(experts, kind)
    for name in names:
        values, positions = pack24(before[name], -2 if experts.is_transposed else -1)
        assert values.shape == getattr(experts, name).shape
        getattr(experts, name).data = values
        getattr(experts, name + POSITIONS).copy_(positions)
    torch.testing.assert_close(experts(x, chosen, shares), expected)
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(experts(x, chosen, shares), expected, rtol=0.1, atol=0.3)
    experts.make_dense()
    assert type(experts) is kind and not has_packed_weights(experts)
    assert all(torch.equal(value, before[name]) for name, value in experts.state_dict().items())


def test_a_class_that_says_nothing_has_no_kind() -> None:
    assert packed_kind(nn.Linear(4, 4)) is None
