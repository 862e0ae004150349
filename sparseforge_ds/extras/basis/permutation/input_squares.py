"""Mean squares of the inputs of prunable weights, for Wanda's score (arXiv 2306.11695)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor
from transformers import PreTrainedModel

from sparseforge_ds.config import SparseForgeConfig
from sparseforge_ds.extras.basis.permutation.find import SearchSettings, find_permutation
from sparseforge_ds.extras.basis.permutation.record import Permutation
from sparseforge_ds.model.families import PrunableWeight, prunable_weights
from sparseforge_ds.start.first_mask import InputMoments
from sparseforge_ds.start.solve import no_reduce


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
    try:
        sums = InputMoments(model, list(weights), full=False)
    except ValueError as error:
        raise ValueError(f"permute: {error}; score by magnitude, without --text") from None
    training = model.training
    model.eval()
    sums.measure(_passes(model, batches), no_reduce)
    model.train(training)
    return {name: _mean(square_EI, sums.tokens[name]).cpu() for name, square_EI in sums.moments.items()}


def _passes(model: PreTrainedModel, batches: Iterable[Tensor]) -> Iterator[None]:
    for batch_BS in batches:
        model(input_ids=batch_BS.to(model.device), use_cache=False)
        yield


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


def _mean(square_EI: Tensor, count_E: Tensor) -> Tensor:
    """Return mean squares per input, (E, I), or (I,) where E is 1; experts without a token get their layer's mean."""
    layer_I = square_EI.sum(0) / count_E.sum()
    mean_EI = torch.where(count_E[:, None] > 0, square_EI / count_E[:, None].clamp(min=1), layer_I)
    return mean_EI if len(mean_EI) > 1 else mean_EI[0]
