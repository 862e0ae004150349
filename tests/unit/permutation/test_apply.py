"""A permutation on a model in memory, and what refuses a model that should have had one."""

from __future__ import annotations

import pytest
import torch

from sparseforge_ds.config import SparseForgeConfig
from sparseforge_ds.model.groups import param_groups
from sparseforge_ds.permutation.apply import permute_model
from tests.tiny_models import BUILDERS
from tests.unit.permutation.test_channels import logits, randomized
from tests.unit.permutation.test_find import find


def test_parameters_move_in_place_and_logits_stay() -> None:
    model = randomized(BUILDERS["mixtral"]())
    before, experts = logits(model), model.model.layers[0].mlp.experts.down_proj
    held = experts.detach().clone()
    permute_model(model, find(model))
    assert model.model.layers[0].mlp.experts.down_proj is experts and not torch.equal(experts, held)
    torch.testing.assert_close(logits(model), before, rtol=1e-4, atol=2e-5)


def test_a_model_that_was_to_be_permuted_is_refused_until_it_is() -> None:
    model, config = BUILDERS["llama"](), SparseForgeConfig.from_dict({"permute": {}})
    with pytest.raises(ValueError, match=r"sparseforge\.permute: .*this one is not permuted"):
        param_groups(model, config)
    permute_model(model, find(model))
    assert param_groups(model, config)


def test_another_model_is_refused_before_anything_moves() -> None:
    found, other = find(BUILDERS["llama"]()), BUILDERS["llama"](num_hidden_layers=1)
    before = {name: parameter.clone() for name, parameter in other.named_parameters()}
    with pytest.raises(ValueError, match="of another model"):
        permute_model(other, found)
    assert all(torch.equal(parameter, before[name]) for name, parameter in other.named_parameters())


@pytest.mark.parametrize(
    ("block", "message"),
    [
        ({"pattern": "block16", "permute": {}}, "n:m patterns only"),
        ({"permute": {"rows": 0}}, "permute.rows = 0"),
        ({"permute": {"dimensions": "heads"}}, "permute.dimensions"),
    ],
)
def test_a_block_that_cannot_be_is_refused(block: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SparseForgeConfig.from_dict(block)
