"""Rotating a whole model: what it returns, and what it refuses to call the same function."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from typing_extensions import override

from sparseforge_ds.config import SparseForgeConfig
from sparseforge_ds.extras.basis.permutation.channels import Dimension
from sparseforge_ds.extras.basis.rotation.rotate import rotate
from sparseforge_ds.extras.basis.rotation.stream import subtracts_mean
from tests.tiny_models import token_batch
from tests.unit.extras.basis.permutation.test_channels import logits
from tests.unit.extras.basis.rotation.test_transform import built


class OffsetNorm(nn.Module):
    """A norm whose gain is one more than its weight, as Gemma's; no family that can be rotated has it."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight)

    @override
    def forward(self, hidden: Tensor) -> Tensor:
        return hidden * torch.rsqrt(hidden.square().mean(-1, keepdim=True) + 1e-6) * (1 + self.weight)


def test_a_model_that_computes_something_else_afterwards_is_refused() -> None:
    model = built("llama")
    model.model.layers[1].input_layernorm = OffsetNorm(torch.linspace(-0.5, 0.5, 32))
    with pytest.raises(ValueError, match=r"the rotated 'llama' model computes something else \(KL divergence"):
        rotate(model, [token_batch()["input_ids"]], SparseForgeConfig(), steps=5)


def test_a_model_of_nan_is_refused_before_the_search() -> None:
    model = built("llama")
    name = "model.layers.1.mlp.down_proj.weight"
    model.get_parameter(name).data[0, 0] = float("nan")
    with pytest.raises(ValueError, match=f"rotate: the 'llama' model computes NaN; {name} is not finite, give a sound"):
        rotate(model, [token_batch()["input_ids"]], SparseForgeConfig(), steps=5)


def test_gradients_that_leave_float16_are_named_before_the_search() -> None:
    """Its passes forward are sound; behind a norm of small inputs gradients are large."""
    model = built("llama").half()
    model.lm_head.weight.data *= 100
    for name, weight in model.named_parameters():
        if name.endswith(("embed_tokens.weight", "o_proj.weight", "down_proj.weight")):
            weight.data *= 1e-5
    for module in model.modules():
        if hasattr(module, "variance_epsilon"):
            module.variance_epsilon = 1e-12
    with pytest.raises(ValueError, match=r"rotate: the inputs of model\.layers\.0\..* are not finite; store a float16"):
        rotate(model, [token_batch()["input_ids"]], SparseForgeConfig(), steps=5)


@pytest.mark.parametrize(
    ("pattern", "dtype"),
    [("2:4", torch.float32), ("2:4", torch.float64), ("4:8", torch.float32), ("1:4", torch.float32)],
)
def test_a_model_is_rotated_for_any_pattern_in_a_row(pattern: str, dtype: torch.dtype) -> None:
    model = built("llama").to(dtype)
    before = logits(model)
    facts = rotate(model, [token_batch()["input_ids"]], SparseForgeConfig(pattern=pattern), steps=30)
    torch.testing.assert_close(logits(model), before, rtol=1e-3, atol=1e-4)
    assert facts["removed"] < 0.95 and facts["pattern"] == pattern


def test_weights_that_stay_dense_do_not_count() -> None:
    config = SparseForgeConfig(exclude=("*mlp*",))
    facts = [rotate(built("llama"), [token_batch()["input_ids"]], c, steps=30) for c in (config, SparseForgeConfig())]
    assert facts[0]["sha256"] != facts[1]["sha256"] and facts[0]["removed"] < facts[1]["removed"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("gain", [0.02, 1.0, 60.0])
def test_whether_a_norm_subtracts_the_mean_depends_on_no_gain_and_no_rounding(dtype: torch.dtype, gain: float) -> None:
    residual = Dimension("residual", "residual", 1, 768)
    for kind, subtracts in ((nn.LayerNorm, True), (nn.RMSNorm, False)):
        norm = kind(768).to(dtype)
        norm.weight.data.fill_(gain)
        assert subtracts_mean(norm, residual) == subtracts
        assert norm.weight.dtype == dtype and norm.weight[0] == torch.tensor(gain, dtype=dtype)


def test_weights_of_which_nothing_turns_are_refused_before_they_are_measured() -> None:
    config = SparseForgeConfig(exclude=("*mlp*", "*o_proj*", "*kv*", "*q_a*"))
    with pytest.raises(ValueError, match=r"none of the 2 weights .*layers\.0\.self_attn\.q_b_proj.* has an axis"):
        rotate(built("deepseek_v2"), [token_batch()["input_ids"]], config, steps=1)
