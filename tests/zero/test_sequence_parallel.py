"""Divided models against whole ones, on ranks; what is not the same is refused."""

from __future__ import annotations

from typing import Any

import deepspeed
import pytest
import torch
import torch.distributed as dist
from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF
from torch import Tensor
from torch.nn import functional as F

import sparseforge_ds as sf
from sparseforge_ds.ranks import AgreedError
from sparseforge_ds.train.ulysses import SequenceParallel
from tests.distributed import run_distributed
from tests.tiny_models import BUILDERS, tiny_llama, token_batch
from tests.unit.model.test_sequence_parallel import DIVIDED
from tests.zero.case import Case, states


def counts_tokens(_module: Any, _given: Any, output: Tensor) -> Tensor:
    """Put the mean of a sequence into every token, as a model might."""
    return output + output.mean(1, keepdim=True)


def body() -> dict[str, Any]:
    sequence = SequenceParallel(2)
    # Every family that can be divided, and fewer heads of keys than ranks.
    for family in DIVIDED:
        model = BUILDERS[family]()
        sequence.divide(model)
        sequence.check_division(model, family)
    one_group = tiny_llama(num_key_value_heads=1)
    sequence.divide(one_group)
    sequence.check_division(one_group, "keys and values of one head")
    # A model that sees how many tokens there are computes something else in parts.
    mixing = tiny_llama()
    mixing.get_input_embeddings().register_forward_hook(counts_tokens)
    sequence.divide(mixing)
    with pytest.raises(AgreedError) as differs:
        sequence.check_division(mixing, "--model mean")

    # DeepSpeed's own mesh is refused.
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
    for messages in run_distributed(body, 2):
        assert messages["differs"].startswith("--model mean gives other logits when 2 ranks share its sequences")
        assert "sequence_parallel_size = 2 by a device mesh" in messages["mesh"]


BATCH, LENGTH = 2, 16


def own_loop(source: str) -> dict[str, dict[str, Tensor]]:
    """Train by a loop around DeepSpeed's own mpu, with loss and curvature in the step or by labels of a probe."""
    parts = dist.get_world_size()
    rank = dist.get_rank()
    block = {"curvature": {"source": source}}
    case = Case(stage=3, config=block)
    model = sf.prepare(tiny_llama(), case.sparseforge)
    mpu = UlyssesSPAttentionHF.register_with_transformers(
        model, "sdpa", sequence_parallel_size=parts, micro_batch_size=BATCH, seq_length=LENGTH
    )
    engine, *_ = deepspeed.initialize(
        model=model,
        model_parameters=sf.param_groups(model, case.sparseforge),
        config={**case.deepspeed(), "train_micro_batch_size_per_gpu": BATCH},
        mpu=mpu,
    )
    forge = sf.SparseForge(engine, case.sparseforge)
    # Each rank has a part of every sequence, and labels that were shifted before it was divided.
    part = slice(rank * LENGTH // parts, (rank + 1) * LENGTH // parts)
    inputs: dict[str, Any] = {}

    # The loss is divided so that its mean over ranks is that of the batch.
    def loss() -> Tensor:
        trained = BATCH * (LENGTH - 1) / parts
        shifted = {"shifted": True}
        return sf.loss_in_head(engine, inputs["next"], None, None, trained, **shifted, **inputs["model"])[0].total

    def whole_logits() -> Tensor:
        return engine(**inputs["model"]).logits.float().square().mean()  # labels are drawn from what it returns

    for step in range(case.steps):
        token_BS = token_batch(BATCH, LENGTH, seed=step)["input_ids"]
        position_BS = torch.arange(LENGTH).repeat(BATCH, 1)
        inputs["model"] = {"input_ids": token_BS[:, part], "position_ids": position_BS[:, part]}
        inputs["next"] = F.pad(token_BS[:, 1:], (0, 1), value=-100)[:, part]
        engine.backward(loss())
        engine.step()
        forge.step(whole_logits)
    return states(forge, "mask", "dense")


@pytest.mark.parametrize("source", ["training", "probe"])
def test_engines_with_an_mpu_share_sequences(source: str) -> None:
    (full,), (parts, _) = (run_distributed(own_loop, ranks, source) for ranks in (1, 2))
    for name, mask in full["mask"].items():
        assert (parts["mask"][name] - mask).abs().max() < 1e-5, name
        assert (parts["dense"][name] - full["dense"][name]).abs().max() < 1e-6, name
