"""Divided models against whole ones, on ranks; what is not the same is refused."""

from __future__ import annotations

from typing import Any

import deepspeed
import pytest
from torch import Tensor

import sparseforge_ds as sf
from sparseforge_ds.ranks import AgreedError
from sparseforge_ds.train.sequence_parallel import SequenceParallel
from tests.distributed import run_distributed
from tests.tiny_models import BUILDERS, tiny_llama
from tests.unit.planning.test_divided import DIVIDED
from tests.zero.case import Case


def counts_tokens(_module: Any, _given: Any, output: Tensor) -> Tensor:
    """As if a model put the mean of its sequence into every token."""
    return output + output.mean(1, keepdim=True)


def body() -> dict[str, Any]:
    sequence = SequenceParallel(2)
    for family in DIVIDED:
        model = BUILDERS[family]()
        sequence.divide(model)
        sequence.prove(model, family)
    one_group = tiny_llama(num_key_value_heads=1)
    sequence.divide(one_group)
    sequence.prove(one_group, "keys and values of one head")
    mean = tiny_llama()
    mean.get_input_embeddings().register_forward_hook(counts_tokens)
    sequence.divide(mean)
    with pytest.raises(AgreedError) as differs:
        sequence.prove(mean, "--model mean")

    case = Case(stage=1, config={"importance": "magnitude"})
    model = sf.prepare(BUILDERS["llama"](), case.sparseforge)
    engine, *_ = deepspeed.initialize(
        model=model,
        model_parameters=sf.param_groups(model, case.sparseforge),
        config=case.deepspeed(),
        mesh_param=(1, 2),
    )
    with pytest.raises(ValueError) as refused:
        sf.SparseForge(engine, case.sparseforge)
    return {"differs": str(differs.value), "mesh": str(refused.value)}


def test_families_are_the_same_divided_and_others_are_refused() -> None:
    for said in run_distributed(body, 2):
        assert said["differs"].startswith("--model mean gives other logits when 2 ranks share its sequences")
        assert "sequence_parallel_size = 2 by a device mesh" in said["mesh"]
