"""Mean squares of the inputs of prunable weights, for Wanda's score (arXiv 2306.11695)."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import nullcontext

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from sparseforge_ds.config import SparseForgeConfig
from sparseforge_ds.extras.basis.permutation.find import SearchSettings, find_permutation
from sparseforge_ds.extras.basis.permutation.record import Permutation
from sparseforge_ds.model.families import PrunableWeight, prunable_weights
from sparseforge_ds.zero.expert_hooks import expert_tokens, why_unhookable
from sparseforge_ds.zero.layer_hooks import layer_inputs


@torch.no_grad()
def input_squares(
    model: PreTrainedModel, weights: Iterable[PrunableWeight], batches: Iterable[Tensor]
) -> dict[str, Tensor]:
    """Measure the mean square of every input of every weight.

    Args:
        model: the dense model.
        weights: its prunable weights.
        batches: (B, S) token ids, one forward pass each.

    Returns:
        fp32 on the CPU by weight: (in,), or (experts, in) of fused experts. An expert without tokens gets the mean
        square over its layer's tokens.

    Raises:
        ValueError: the inputs of a weight cannot be observed.
    """
    device = model.device
    modules: dict[str, nn.Module] = {}
    fused: dict[str, nn.Module] = {}
    sums: dict[str, Tensor] = {}  # (experts or 1, inputs + 1): sums of squares, then the number of tokens
    for weight in weights:
        module = model.get_submodule(weight.module)
        sums[weight.name] = torch.zeros(
            weight.shape[0] if len(weight.shape) == 3 else 1, weight.shape[weight.input_axis] + 1, device=device
        )
        if len(weight.shape) == 2:
            modules[weight.name] = module
        elif (why := why_unhookable(module)) is None:
            fused[weight.module] = module
        else:
            raise ValueError(f"permute: the inputs of {weight.name} cannot be observed: it {why}; score by magnitude")

    def on_layer(name: str, input_TI: Tensor) -> None:
        sums[name][0, :-1] += input_TI.float().square().sum(0)
        sums[name][0, -1] += len(input_TI)

    def on_experts(
        layer: str, parameter: str, _grad: Tensor | None, input_SI: Tensor, stop_E: Tensor, _tokens: int
    ) -> None:
        if (total := sums.get(f"{layer}.{parameter}")) is None:
            return
        row_S = torch.arange(len(input_SI), device=stop_E.device, dtype=stop_E.dtype)
        expert_S = torch.searchsorted(stop_E, row_S, right=True)
        total[:, :-1].index_add_(0, expert_S, input_SI.float().square())
        total[:, -1].index_add_(0, expert_S, torch.ones(len(input_SI), device=device))

    # The hooks sum over all passes.
    training = model.training
    model.eval()
    with layer_inputs(modules, on_layer), expert_tokens(fused, on_experts, gradients=False) if fused else nullcontext():
        for batch_BS in batches:
            model(input_ids=batch_BS.to(device), use_cache=False)
    model.train(training)
    return {name: _mean(total).cpu() for name, total in sums.items()}


def find_by_activations(
    model: PreTrainedModel, batches: Iterable[Tensor], config: SparseForgeConfig, settings: SearchSettings
) -> Permutation:
    """Find the permutation of a model in memory by Wanda's score; see `find_permutation`."""
    weights = prunable_weights(model, config)
    squares = input_squares(model, weights, batches)
    parameters = dict(model.named_parameters())
    return find_permutation(
        lambda name: parameters[name].detach(),
        {name: tuple(parameter.shape) for name, parameter in parameters.items()},
        weights,
        model.config.model_type,
        model.config.get_text_config(),
        settings,
        squares,
        model.device,
    )


def _mean(total: Tensor) -> Tensor:
    """Divide (experts or 1, inputs + 1) sums by their last column, the number of tokens."""
    layer = total.sum(0)
    mean = torch.where(total[:, -1:] > 0, total[:, :-1] / total[:, -1:].clamp(min=1), layer[:-1] / layer[-1])
    return mean if len(mean) > 1 else mean[0]
