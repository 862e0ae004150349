"""Fine-tuning of a sparse model that stays sparse, in any PyTorch loop; needs no DeepSpeed.

The mask is the set of zeros that the weights have at the start. Gradients lose their pruned entries before anything
sums, averages or clips them, and once more before the optimizer's step. After the step the zeros are put back.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from sparseforge_ds.mask.pattern import Pattern, parse_pattern, require_removing
from sparseforge_ds.model.family_table import FAMILIES, Row
from sparseforge_ds.model.rules import contracting, matches, table_rule
from sparseforge_ds.packed_format.packing import has_packed_weights

_LOG = logging.getLogger(__name__)
_TRIED = ("2:4", "4:8")
"""Patterns that weights are searched for where none is given; 1:4 is 2:4 too, and keeps all its zeros."""
_UNDER_DEEPSPEED = (
    'train it with SparseForge or SparseForgeTrainer and {"method": "naive_retrain", "importance": "magnitude"}, with '
    'the "pattern" of the model, and "exclude" for weights that it has dense: the weights that are not 0 are kept then'
)
"""Cure where DeepSpeed owns the weights."""


@dataclass(frozen=True)
class SparseZeros:
    """Zeros of a sparse model, as they are at the start of a fine-tuning."""

    pattern: Pattern
    pruned: dict[str, Tensor]
    """True where a weight is pruned, in the weight's shape, by the name of the parameter."""


def find_zeros(model: nn.Module, pattern: str | None = None, names: str | Sequence[str] | None = None) -> SparseZeros:
    """Find the weights that are in a pattern, and their zeros; arguments and errors are those of `keep_mask`."""
    if not isinstance(pattern, str | None):
        raise ValueError(f"pattern {pattern!r}: give a text like '2:4'")
    # Candidates: weights of layers that say which axis they contract, or those among them that are named.
    model = _unwrapped(model)
    refuse_sharded(model)
    parameters = {name: parameter.detach() for name, parameter in model.named_parameters()}
    rows = _rows(model, parameters)
    globs = [names] if isinstance(names, str) else names
    for glob in globs or ():
        if not any(matches(name, [glob]) for name in rows):
            raise ValueError(
                f"names: {glob} names no weight of a linear layer; give a glob over names like "
                f"{next(iter(rows), 'none')}"
            )
    chosen = {name: row for name, row in rows.items() if globs is None or matches(name, globs)}
    # All zeros: a fresh layer, such as an adapter's second matrix, or a fully pruned one. The user must say which.
    empty_names = [name for name in chosen if not bool((parameters[name] != 0).any())]
    if globs is None and empty_names:
        others = f" and {len(empty_names) - 1} more" if len(empty_names) > 1 else ""
        _LOG.warning(
            "%s%s: zeros alone, and not kept; to keep them, name all weights to keep by names=", empty_names[0], others
        )
        chosen = {name: row for name, row in chosen.items() if name not in empty_names}
    # Zeros alone are in every pattern, so the other weights choose it.
    deciding_names = chosen.keys() - empty_names or chosen.keys()

    # Take the first pattern that one of them is in.
    share: dict[str, float] = {}
    for text in _TRIED if pattern is None else (pattern,):
        parsed = require_removing(parse_pattern(text))
        share = {name: _share_in_pattern(parameters[name], parsed, row) for name, row in chosen.items()}
        sparse_names = [name for name in chosen if share[name] == 1]
        if deciding_names.isdisjoint(sparse_names):
            continue
        # Dense weights have nearly no group in a pattern, so that a weight with most of them was damaged.
        least = -1.0 if globs is not None else 0.5
        for name, part in share.items():
            if least <= part < 1:
                raise ValueError(
                    f"{name} is not {parsed} in all groups ({max(0.0, part):.2%} of them are): prune the model again, "
                    "or choose the weights that are by names="
                )
        if pattern is not None and len(sparse_names) < len(chosen):
            _LOG.info("not %s, and not kept: %s", parsed, ", ".join(name for name in chosen if share[name] < 1))
        return SparseZeros(parsed, {name: parameters[name] == 0 for name in sparse_names})
    adapted = ", or leave out an adapter's start that changes its base" if any("lora_" in n for n in parameters) else ""
    nearest = max(share, key=lambda name: share[name], default=None)
    raise ValueError(
        f"no weight of {type(model).__name__} is {pattern or ' or '.join(_TRIED)}"
        + (f" (nearest is {nearest}, in {max(0.0, share[nearest]):.2%} of its groups)" if nearest else "")
        + "; give a sparse model, as sparseforge prune and export write it, or its pattern by pattern="
        + adapted
    )


def refuse_sharded(model: nn.Module) -> None:
    """Reject weights of which this process does not hold all, or that cannot be trained.

    Raises:
        ValueError: weights are sharded by ZeRO-3 or FSDP, packed, or on the meta device.
    """
    for name, module in model.named_modules():
        if has_packed_weights(module):
            raise ValueError(
                f"{name} is packed 2:4, which cannot be trained; call model.dequantize() first, or leave out "
                "keep_mask and the callback under an adapter: nothing there can lose a zero"
            )
        if type(module).__name__ == "FullyShardedDataParallel":
            raise ValueError(f"{name or 'the model'} is sharded by FSDP; {_sharded_cure()}")
    for name, parameter in model.named_parameters():
        if hasattr(parameter, "ds_shape"):
            raise ValueError(f"{name} is partitioned by ZeRO-3; {_UNDER_DEEPSPEED}")
        if hasattr(parameter, "device_mesh"):
            raise ValueError(f"{name} is a DTensor, of which this process holds a part; {_sharded_cure()}")
        if parameter.is_meta:
            raise ValueError(f"{name} is on the meta device and has no values; load the model's weights first")


def _sharded_cure() -> str:
    return f"use DistributedDataParallel, or {_UNDER_DEEPSPEED}"


class MaskKeeper:
    """Handle of `keep_mask`: the zeros of a model's weights, and the hooks that keep them.

    A weight that is kept may become 0 and leave it again. The mask stays that of the start.
    """

    def __init__(self, model: nn.Module, optimizers: Sequence[Optimizer], zeros: SparseZeros) -> None:
        """Hang the hooks into weights and optimizers; `zeros` are those of this model."""
        self.pattern = zeros.pattern
        self.pruned = zeros.pruned
        """True where a weight is pruned, in the weight's shape, by the name of the parameter."""
        self._model = _unwrapped(model)
        refuse_sharded(self._model)
        parameters = dict(self._model.named_parameters())
        self._weights = {name: parameters[name] for name in zeros.pruned}
        # Gradients, as they come: before they are accumulated, averaged over ranks, or clipped.
        self._hooks: list[Any] = [
            parameter.register_hook(partial(self._masked, name))
            for name, parameter in self._weights.items()
            if parameter.requires_grad
        ]
        for optimizer in optimizers:
            self._hooks.append(optimizer.register_step_pre_hook(self._mask_gradients))
            self._hooks.append(optimizer.register_step_post_hook(self._put_zeros_back))

    def __str__(self) -> str:
        """Describe what is kept."""
        zeros = sum(int(pruned.sum()) for pruned in self.pruned.values())
        return f"{self.pattern} kept in {len(self.pruned)} weights, with {zeros:,} zeros"

    def check(self) -> None:
        """Check that all pruned entries are 0.

        Raises:
            ValueError: some are not, or the model has got another parameter in the place of a kept one; the message
                names the first weight.
        """
        present = {id(parameter) for parameter in self._model.parameters()}
        for name, weight in self._weights.items():
            if id(weight) not in present:
                raise ValueError(
                    f"{name}: the model has another parameter in its place, as load_state_dict(assign=True) puts "
                    "there, and its zeros are not kept; load a checkpoint without assign"
                )
        lost = {}
        for name, weight in self._weights.items():
            if count := int((weight.detach() != 0)[self._pruned(name, weight)].sum()):
                lost[name] = count
        if lost:
            name, count = next(iter(lost.items()))
            raise ValueError(
                f"{name}: {count:,} pruned entries are not 0 (and {len(lost) - 1} more such weights): another "
                "optimizer, a checkpoint or a merged adapter has changed them; give keep_mask all optimizers, or "
                "call project()"
            )

    def project(self) -> dict[str, float]:
        """Set all pruned entries to 0, as after an adapter was merged into the weights.

        Returns:
            Relative error of each weight: the norm of what is lost by the norm of the weight before.
        """
        errors = {}
        with torch.no_grad():
            for name, weight in self._weights.items():
                pruned = self._pruned(name, weight)
                before = torch.linalg.vector_norm(weight, dtype=torch.float32)
                lost = torch.linalg.vector_norm(weight[pruned], dtype=torch.float32)
                weight.masked_fill_(pruned, 0)
                errors[name] = float(lost / before) if before else 0.0
        return errors

    def remove(self) -> None:
        """Take the hooks away; weights may become dense from now on."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def _pruned(self, name: str, weight: Tensor) -> Tensor:
        """Return the mask of pruned entries on the device of `weight`, to which the model may have moved."""
        if self.pruned[name].device != weight.device:
            self.pruned[name] = self.pruned[name].to(weight.device)
        return self.pruned[name]

    def _masked(self, name: str, gradient: Tensor) -> Tensor:
        return gradient.masked_fill(self._pruned(name, gradient), 0)

    def _mask_gradients(self, *_: Any) -> None:
        """Mask gradients that were there before the hooks, or were written by hand."""
        for name, weight in self._weights.items():
            if weight.grad is not None:
                weight.grad.masked_fill_(self._pruned(name, weight.grad), 0)

    @torch.no_grad()
    def _put_zeros_back(self, *_: Any) -> None:
        """Undo what decay and moments of the optimizer did to pruned entries; frozen weights do not move."""
        for name, weight in self._weights.items():
            if weight.requires_grad:
                weight.masked_fill_(self._pruned(name, weight), 0)


def keep_mask(
    model: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer],
    *,
    pattern: str | None = None,
    names: str | Sequence[str] | None = None,
) -> MaskKeeper:
    """Keep the zeros of a sparse model while it is fine-tuned by any PyTorch loop.

    Call it when the sparse weights are loaded, and before a checkpoint of the fine-tuning is: the mask is the set of
    zeros at the call. Weights of linear layers and of fused experts are looked at.

    Args:
        model: the model, with or without `DistributedDataParallel`, `torch.compile` or a PEFT adapter around it.
        optimizer: the optimizer, or all of them.
        pattern: that of the weights, like 2:4; None searches for 2:4 and 4:8.
        names: globs of the weights to keep, as in `named_parameters`; all of them must be in the pattern. None takes
            every weight that is.

    Returns:
        A handle with `check`, `project` and `remove`.

    Raises:
        ValueError: no weight is in the pattern, or a weight is nearly in it; weights are sharded, packed, or on the
            meta device; an optimizer is not one of torch's kind.
    """
    if not isinstance(model, nn.Module):
        raise ValueError(f"model is {type(model).__name__}; give the model itself, and the optimizer second")
    entries = optimizer if isinstance(optimizer, Sequence) else [optimizer]
    zeros = find_zeros(model, pattern, names)
    keeper = MaskKeeper(model, [torch_optimizer(entry, model) for entry in entries], zeros)
    _LOG.info("%s", keeper)
    return keeper


def torch_optimizer(optimizer: Any, model: nn.Module) -> Optimizer:
    """Return torch's optimizer inside accelerate's wrapper, or the optimizer itself.

    Raises:
        ValueError: it is of another kind, or trains copies of the weights, as DeepSpeed's do.
    """
    inner = getattr(optimizer, "optimizer", optimizer) if isinstance(optimizer, Optimizer) else optimizer
    if not isinstance(inner, Optimizer):
        raise ValueError(
            f"optimizer is {type(inner).__name__}, and masks are kept in the step of a torch.optim.Optimizer; give "
            f"that, or under DeepSpeed {_UNDER_DEEPSPEED}"
        )
    ids = {id(parameter) for parameter in model.parameters()}
    if not any(id(parameter) in ids for group in inner.param_groups for parameter in group["params"]):
        raise ValueError(
            f"{type(inner).__name__} trains no parameter of this {type(model).__name__}, but copies or another model; "
            f"make it from model.parameters(), or under DeepSpeed {_UNDER_DEEPSPEED}"
        )
    return inner


def _unwrapped(model: Any) -> Any:
    """Return the model inside `DistributedDataParallel` and `torch.compile`."""
    while isinstance(model, DistributedDataParallel) or hasattr(model, "_orig_mod"):
        model = model.module if isinstance(model, DistributedDataParallel) else model._orig_mod
    return model


def _rows(model: nn.Module, names: Iterable[str]) -> dict[str, Row]:
    """Return rows of all weights that can be in a pattern: those of the model's family, and of layers that say so."""
    model_type = getattr(getattr(model, "config", None), "model_type", None)
    by_table = table_rule(FAMILIES[model_type]) if model_type in FAMILIES else lambda name: None
    by_layer = contracting(model, ungated=True)
    base_names = [name for name in names if ".lora_" not in name]  # an adapter's matrices are dense
    rows = {name: row if isinstance(row := by_table(name), Row) else by_layer.get(name) for name in base_names}
    return {name: row for name, row in rows.items() if row is not None}


def _share_in_pattern(weight: Tensor, pattern: Pattern, row: Row) -> float:
    """Return the share of groups of a weight that are in the pattern; -1 where it cannot be in it."""
    shape = tuple(weight.shape)
    fits = weight.is_floating_point() and len(shape) in (2, 3)
    if not fits or pattern.misfit((shape[-2] // row.stacked, shape[-1]), row.input_axis) is not None:
        return -1.0
    nonzero_GM = pattern.to_groups((weight != 0).reshape(-1).to(torch.uint8), shape, row.input_axis)
    kept_G = pattern.pooled(nonzero_GM).count_nonzero(1)
    return float((kept_G <= pattern.kept_count).double().mean())
