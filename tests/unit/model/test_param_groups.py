"""Parameter groups: every trainable parameter once, in the group that its decay and its mask ask for."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from sparseforge_ds.config import LowRankConfig, SparseForgeConfig
from sparseforge_ds.model.families import FAMILIES, prunable_weights
from sparseforge_ds.model.low_rank import prepare
from sparseforge_ds.model.param_groups import param_groups
from tests.tiny_models import tiny_llama, tiny_qwen3
from tests.unit.model.test_families import BUILDERS


def _names(model: nn.Module, group: dict[str, object]) -> list[str]:
    name_of = {id(parameter): name for name, parameter in model.named_parameters()}
    return [name_of[id(parameter)] for parameter in group["params"]]


@pytest.mark.parametrize("family", FAMILIES)
def test_every_parameter_is_in_one_group(family: str) -> None:
    model = BUILDERS[family]()
    groups = param_groups(model, SparseForgeConfig(), weight_decay=0.1)
    names = [name for group in groups for name in _names(model, group)]
    assert sorted(names) == sorted(name for name, _ in model.named_parameters())
    assert [group["name"] for group in groups] == ["prunable", "matrix", "vector"]
    assert [group["weight_decay"] for group in groups] == [0.1, 0.1, 0.0]
    assert [group.get("sparseforge") for group in groups] == ["prunable", None, None]
    assert _names(model, groups[0]) == [weight.name for weight in prunable_weights(model, SparseForgeConfig())]
    assert all(parameter.ndim > 1 for parameter in groups[1]["params"])
    # Biases of fused experts have two dimensions, and no decay either.
    assert not any(name.endswith("bias") for group in groups[:2] for name in _names(model, group))
    vectors = zip(_names(model, groups[2]), groups[2]["params"], strict=True)
    assert all(parameter.ndim == 1 or name.endswith("_bias") for name, parameter in vectors)


def test_decay_is_the_optimizers_own_unless_one_is_given() -> None:
    """Keep the decay of the DeepSpeed JSON, over which a 0 in the groups once won."""
    optimizer = torch.optim.SGD(param_groups(tiny_llama(), SparseForgeConfig()), lr=1.0, weight_decay=0.3)
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.3, 0.3, 0.0]


def test_what_is_excluded_stays_a_decayed_matrix() -> None:
    model = tiny_llama()
    groups = param_groups(model, SparseForgeConfig(exclude=("*.q_proj.*",)))
    assert [name for name in _names(model, groups[1]) if "q_proj" in name] == [
        f"model.layers.{i}.self_attn.q_proj.weight" for i in range(2)
    ]


def test_low_rank_has_no_decay_and_no_mask() -> None:
    config = SparseForgeConfig(low_rank=LowRankConfig(k=4))
    model = prepare(tiny_llama(), config)
    groups = param_groups(model, config, weight_decay=0.1)
    assert [group["name"] for group in groups] == ["prunable", "matrix", "vector", "low_rank"]
    assert all(name.endswith("low_rank_b") for name in _names(model, groups[3]))
    assert len(groups[3]["params"]) == len(groups[0]["params"]) == 14 and groups[3]["weight_decay"] == 0.0
    assert not any("low_rank_b" in name for group in groups[:3] for name in _names(model, group))


def test_tied_parameters_come_once() -> None:
    model = tiny_qwen3()
    parameters = [parameter for group in param_groups(model, SparseForgeConfig()) for parameter in group["params"]]
    assert len({id(parameter) for parameter in parameters}) == len(parameters)
    assert any(parameter is model.lm_head.weight for parameter in parameters)


def test_frozen_parameters_are_left_out_and_empty_groups_too() -> None:
    model = tiny_llama()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("_proj" in name)
    (group,) = param_groups(model, SparseForgeConfig())
    assert group["name"] == "prunable"


def test_a_frozen_prunable_weight_is_an_error() -> None:
    model = tiny_llama()
    model.model.layers[1].mlp.up_proj.weight.requires_grad_(False)
    with pytest.raises(ValueError, match=r"layers.1.mlp.up_proj.weight is to be pruned but .*\"exclude\""):
        param_groups(model, SparseForgeConfig())
    assert len(param_groups(model, SparseForgeConfig(exclude=("*.up_proj.*",)))[0]["params"]) == 12


def test_partitioned_parameters_are_placed_by_their_full_shape() -> None:
    model = tiny_llama()
    expected = [_names(model, group) for group in param_groups(model, SparseForgeConfig())]
    for parameter in model.parameters():
        parameter.ds_shape = parameter.shape
        parameter.data = torch.empty(0)
    assert [_names(model, group) for group in param_groups(model, SparseForgeConfig())] == expected
