"""A weight that two layers share cannot have something beside one of them."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

import sparseforge_ds as sf
from tests.tiny_models import tiny_llama


def sharing() -> Any:
    model: Any = tiny_llama()
    first, second = (layer.self_attn for layer in model.model.layers[:2])
    second.q_proj.weight = first.q_proj.weight
    return model


@pytest.mark.parametrize("block", [{"low_rank": {"k": 4}}, {"method": {"name": "cast", "scaling": True}}])
def test_a_branch_or_a_scale_of_one_layer_would_change_the_function(block: dict[str, Any]) -> None:
    config = sf.SparseForgeConfig.from_dict(block)
    pair = r"layers\.0\.self_attn\.q_proj\.weight and .*layers\.1\.self_attn\.q_proj\.weight are one weight"
    with pytest.raises(ValueError, match=f'{pair}.*; set .*, or keep it dense with "exclude"'):
        sf.prepare(sharing(), config)
    dense = sf.SparseForgeConfig.from_dict({**block, "exclude": ["*.0.self_attn.q_proj.*"]})
    assert isinstance(sf.prepare(sharing(), dense), nn.Module)
    assert isinstance(sf.prepare(sharing(), sf.SparseForgeConfig()), nn.Module)
