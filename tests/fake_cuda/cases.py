"""Cases that run on fake CUDA tensors, their limits on waits for the device, and known excesses."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

ALLOWED = {"attach": 2, "start": 10, "first": 0, "ordinary": 0, "update": 2, "probed update": 3, "projection": 2}
"""Values that the host may wait for, by moment of a run. `start` chooses a first mask; `update` moves masks or reports
on them; a probed one also asks whether its passes were finite; `first` and `ordinary` are steps that do neither."""
OFFLOADED = {**ALLOWED, "attach": 3, "start": 20, "update": 4, "probed update": 5}
"""Limits with shards on the host: factors and scalings come down from the device as well, each in one copy."""
EXCHANGE = "zero/halo.py:exchange (copy to the host)"
"""Copy of the missing members of cut groups: with shards on the host every exchange ends in one."""
UPLOADS = {"first": 1, "ordinary": 0}
"""Copies from the host in a moment, with the states on the device: the host waits for these as well. The
first step may be heard, and its numbers of tokens are one."""

SCHEDULE = {
    "update_every": 2,
    "blend": [0.0, 0.4],
    "mid_penalty_ramp": [0.0, 0.4],
    "hardening": [0.15, 0.86],
    "mask_rate": 0.4,
}
"""Seven steps: updates at 2 and 4, hardening from 1, projected at 6, frozen at 7."""
SHORTER = {**SCHEDULE, "hardening": [0.2, 0.8]}
"""Five steps: an update at 2, hardening from 1, projected at 4, frozen at 5."""


@dataclass(frozen=True)
class Case:
    """One short run on one rank of three."""

    block: dict[str, Any]
    """The `sparseforge` block, `max_steps` aside."""
    steps: int
    model: str = "llama"
    weights: str = "float32"
    master: str = "float32"
    offload: bool = False
    stage: int = 3
    loss_scale: float = 1.0
    fault: str | None = None
    """Seeded into every step of the optimizer."""


def _ours(more: dict[str, Any] | None = None, **case: Any) -> Case:
    more = more or {}
    steps = case.pop("steps", 5)
    method = {**(SCHEDULE if steps == 7 else SHORTER), **more.get("method", {})}
    return Case({**more, "method": method}, steps=steps, **case)


def _other(method: str, importance: str = "magnitude", own: dict[str, Any] | None = None, **case: Any) -> Case:
    return Case({"method": {"name": method, **(own or {})}, "importance": importance}, **{"steps": 4, **case})


_ELEMENTS = {"factored": False}
_PROBE = {"source": "probe"}
_EVERY = {"every": 2, "decay": 2e-4, "frozen": 0.25}

CASES: dict[str, Case] = {
    "ours": _ours(steps=7),
    "ours, probe": _ours({"curvature": _PROBE}, steps=7),
    "ours, all weights": _ours({"include": []}),
    "ours, shards of whole bytes of bits": _ours({"include": []}, model="llama_24"),
    "ours, bf16": _ours(weights="bfloat16"),
    "ours, bf16 masters": _ours(weights="bfloat16", master="bfloat16"),
    "ours, fp16": _ours(weights="float16", loss_scale=1024.0),
    "ours, fp16, probe": _ours({"curvature": _PROBE}, weights="float16", loss_scale=1024.0),
    "ours, offload": _ours(offload=True, steps=7),
    "ours, stage 0": _ours(stage=0),
    "ours, stage 2": _ours(stage=2),
    "ours, tiles": _ours({"pattern": "block4"}),
    "ours, branches": _ours({"low_rank": {"k": 4}}),
    "ours, learned branches": _ours({"low_rank": {"k": 4, "learned": True}}),
    "ours, learned branches, offload": _ours({"low_rank": {"k": 4, "learned": True}}, offload=True),
    "ours, straight through": _ours({"method": {"straight_through": True}}),
    "ours, fixed": _ours({"method": {"hardening": [0, 0]}}, steps=3),
    "ours, elements": _ours({"curvature": _ELEMENTS}),
    "ours, elements, offload": _ours({"curvature": _ELEMENTS}, offload=True),
    "ours, hutchinson": _ours({"importance": "hutchinson"}),
    "ours, hutchinson, weights": _ours({"importance": "hutchinson", "curvature": {"per_token": False, **_ELEMENTS}}),
    "ours, hutchinson, weights, offload": _ours(
        {"importance": "hutchinson", "curvature": {"per_token": False, **_ELEMENTS}}, offload=True
    ),
    "ours, magnitude": _ours({"importance": "magnitude"}),
    "ours, magnitude, offload": _ours({"importance": "magnitude"}, offload=True),
    "ours, wanda": _ours({"importance": "wanda"}),
    "ours, fused experts": _ours({"include": ["*mlp.experts*"]}, model="qwen3_moe", weights="bfloat16"),
    "ours, fused experts, probe": _ours(
        {"include": ["*mlp.experts*"], "curvature": _PROBE}, model="qwen3_moe", weights="bfloat16"
    ),
    "ours, fused experts, elements": _ours(
        {"include": ["*mlp.experts*"], "curvature": _ELEMENTS}, model="qwen3_moe", weights="bfloat16"
    ),
    "ours, Conv1D": _ours({"include": []}, model="gpt2"),
    "naive_retrain": _other("naive_retrain"),
    "naive_retrain, wanda": _other("naive_retrain", "wanda"),
    "naive_retrain, wanda, offload": _other("naive_retrain", "wanda", offload=True),
    "naive_retrain, fisher": _other("naive_retrain", "fisher"),
    "naive_retrain, fisher, offload": _other("naive_retrain", "fisher", offload=True),
    "naive_retrain, sparsegpt": _other("naive_retrain", "sparsegpt"),
    "naive_retrain, sparsegpt, offload": _other("naive_retrain", "sparsegpt", offload=True),
    "naive_retrain, bf16": _other("naive_retrain", weights="bfloat16", master="bfloat16"),
    "sr_ste": _other("sr_ste", own=_EVERY),
    "sr_ste, bf16 masters": _other("sr_ste", own=_EVERY, weights="bfloat16", master="bfloat16"),
    "sr_ste, offload": _other("sr_ste", own=_EVERY, offload=True),
    "ast": _other("ast", own=_EVERY),
    "ast, offload": _other("ast", own=_EVERY, offload=True),
    "cast": _other("cast", own=_EVERY),
    "cast, scaling": _other("cast", own={**_EVERY, "scaling": True}),
    "cast, offload": _other("cast", own=_EVERY, offload=True),
    "elsa": _other("elsa", own=_EVERY),
    "elsa, offload": _other("elsa", own=_EVERY, offload=True),
    "pat": _other("pat", own={"warmup": 0.25, "frozen": 0.25}),
    "maskllm": _other("maskllm", own={"frozen": 0.25}),
    "maskllm, offload": _other("maskllm", own={"frozen": 0.25}, offload=True),
}
"""Cases by name; weights of two layers are under the mask unless `include` says otherwise."""

EXCEEDS: dict[str, str] = {
    "ours, elements, offload": "a refresh copies the squares of each layer and pass to the host, where their mean lies",
    "cast, offload": "the fold copies the factors of every layer to the host, once in a run",
    **dict.fromkeys(
        ("naive_retrain, sparsegpt", "naive_retrain, sparsegpt, offload"),
        "a block-wise start counts the tokens of its batches and compares their arguments, once in a run",
    ),
    "ours, fused experts, elements": "a bincount and 2 tolist (expert_fisher) for every layer and pass",
}
"""Moments at which today's code waits more often than it may. Whoever mends it must take the entry out."""

FAULTS: dict[str, Case] = {
    fault: _other("naive_retrain", steps=2, fault=fault)
    for fault in (
        *("a CPU tensor into a CUDA operation", "a CPU tensor into a collective", "bool", "not contiguous"),
        *("item", "upload"),
    )
}
"""Runs that must be found faulty."""
