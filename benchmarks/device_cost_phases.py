"""The phases of a run whose device cost is counted: each is the package's own code, called as a training loop does."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode

import sparseforge_ds as sf
from benchmarks.fake_cuda.counting import Cost, Counter
from benchmarks.fake_cuda.engine import CUDA, Rank, attach, model_of, process_group
from sparseforge_ds.model.head import Head, Target, loss_in_head
from sparseforge_ds.model.model_config import read_model_config

BLOCK: dict[str, Any] = {"max_steps": 10, "method": {"update_every": 2, "hardening": [0.0, 0.5]}}
"""Masks move after steps 2 and 4 and are frozen after 5; x falls from the first step on."""


@dataclass(frozen=True)
class Setting:
    """Settings of a count."""

    model: str
    rank: Rank
    tokens: int
    source: str
    layers: int | None = None
    fused: bool = True


def costs(setting: Setting) -> tuple[int, int, dict[str, Cost]]:
    """Weights and matrices under a mask that this rank has a part of, and the cost of every phase."""
    model_config = copy.deepcopy(read_model_config(setting.model))
    if setting.layers is not None:
        model_config.num_hidden_layers = setting.layers
        if getattr(model_config, "layer_types", None):
            model_config.layer_types = model_config.layer_types[: setting.layers]
    config = sf.SparseForgeConfig.from_dict({**BLOCK, "curvature": {"source": setting.source}})
    with process_group(setting.rank), FakeTensorMode():
        model = sf.prepare(model_of(model_config, torch.bfloat16), config)
        with Counter() as counter:
            weights, matrices, phases = _steps(setting, config, model, counter)
        del model
        with Counter() as counter:
            phases |= _loss(setting, config, model_config, counter)
    return weights, matrices, phases


def _steps(
    setting: Setting, config: sf.SparseForgeConfig, model: nn.Module, counter: Counter
) -> tuple[int, int, dict[str, Cost]]:
    forge, engine = attach(model, config, setting.rank, counter, setting.fused)
    ids = torch.zeros((1, setting.tokens), dtype=torch.int64, device=CUDA)
    phases: dict[str, Cost] = {}

    def train() -> Cost:
        """Run the passes of a step, and measure the curvature in them if an update follows."""
        with counter.phase() as cost:
            engine.backward(model(input_ids=ids).logits.sum())
        return cost

    def step(name: str | None = None, update: str | None = None) -> None:
        """`name`: of the optimizer's step, `update`: of what follows it; one phase if both are the same."""
        with counter.phase() as stepped:
            engine.step()
            if name == update:
                forge.step(probe)
        if name is not None:
            phases[name] = stepped
        if name != update:
            with counter.phase() as updated:
                forge.step(probe)
            if update is not None:
                phases[update] = updated

    probe = partial(lambda: model(input_ids=ids).logits.sum())
    train()
    step("first step", "first step")
    first = train()
    step(None, "first mask update")
    plain = train()
    step("soft step, hardening", "soft step, hardening")
    measured = train()
    step(None, "mask update")
    train()
    step(None, "freeze")
    frozen = train()
    step("frozen step", "frozen step")
    phases = {
        "curvature hooks beside the passes": measured.less(plain),
        **phases,
        "frozen gradient hooks beside the passes": frozen.less(plain),
    }
    del first
    return sum(forge.sharded.shards[w.name].numel for w in forge.weights), len(forge.sharded.matrices.names), phases


def _loss(setting: Setting, config: sf.SparseForgeConfig, model_config: Any, counter: Counter) -> dict[str, Cost]:
    """Head, loss and gradient of one micro-batch, teacher and student, from final hidden states; heads do not train."""
    with counter.paused():
        sizes = (1, setting.tokens, model_config.hidden_size)
        student, teacher = (torch.zeros(sizes, dtype=torch.bfloat16, device=CUDA) for _ in range(2))
        model = _OnlyHead(sizes[-1], model_config.vocab_size)
        target = Target(teacher, Head(torch.zeros_like(model.head.weight), None))
        labels = torch.zeros(sizes[:2], dtype=torch.int64, device=CUDA)
        student.requires_grad_()
    with counter.phase() as cost:
        loss, _ = loss_in_head(model, labels, config.distillation, target, hidden=student)
        loss.total.backward()
        del loss
    return {"loss": cost}


class _OnlyHead(nn.Module):
    """A causal language model from its final hidden states on; the head does not train."""

    def __init__(self, hidden: int, vocabulary: int) -> None:
        super().__init__()
        self.head = nn.Linear(hidden, vocabulary, bias=False, device=CUDA, dtype=torch.bfloat16)
        self.head.requires_grad_(False)

    def get_output_embeddings(self) -> nn.Module:
        """Return the head."""
        return self.head

    def forward(self, hidden: Tensor, use_cache: bool) -> Any:
        """Return logits as transformers' models do."""
        return SimpleNamespace(logits=self.head(hidden))
