"""Logits that an export must have, from a model that is filled from the source without the exported files."""

from __future__ import annotations

import re
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from tqdm import tqdm

from sparseforge_ds.export.model_folder import read_rounded
from sparseforge_ds.export.source import Source
from sparseforge_ds.model.families import LOW_RANK, PROJECTION
from sparseforge_ds.model.loading_error import reason
from sparseforge_ds.model.registration import build_model, load_config, positions_of
from sparseforge_ds.model.saved_names import Placement
from sparseforge_ds.packed_format.packed_values import Grid


def filled_model(source: Source, grid: Grid | None = None) -> Any:
    """Build the source's model, in evaluation mode, on the CPU; with `grid` its 2:4 weights are rounded to it.

    Raises:
        ValueError: transformers has no class for config.json, or the tensors of the source are not exactly those of the
            model that config.json describes.
    """
    from sparseforge_ds.transformers_internals import no_init_weights

    config = load_config(source.model_folder, str(source.model_folder))
    try:
        with no_init_weights():
            model = build_model(config, dtype=source.dtype)
    except ValueError as error:
        raise ValueError(f"{source.model_folder}/config.json: {reason(error)}") from None
    model.tie_weights()
    state = model.state_dict()
    shapes = {name: spec.shape for name, spec in source.specs.items()}
    placement = Placement(model, source.model_config.get("model_type"), shapes)
    if placement.misfit is not None:
        raise ValueError(f"{source.model_folder}: {placement.misfit}")
    # Each tensor is copied to its place.
    name_at: dict[tuple[int, int], str] = {}
    about = f"{source.model_folder}/config.json: its {type(model).__name__}"
    bar = tqdm(total=sum(spec.nbytes for spec in source.specs.values()), unit="B", unit_scale=True, disable=None)
    bar.set_description("proof")
    for name, spec in source.specs.items():
        bar.update(spec.nbytes)
        if (place := placement.places.get(name)) is None:
            if any(re.search(glob, name) for glob in model._keys_to_ignore_on_load_unexpected or ()):
                continue
            raise ValueError(f"{about} has no {name}")
        value = source.read(name) if grid is None else read_rounded(source, name, grid)
        target_part = state[place.memory_name].view(-1)[place.start : place.stop].view(spec.shape)
        # Of tied weights one is stored, or both with the same values.
        first = name_at.setdefault((target_part.data_ptr(), target_part.numel()), name)
        if first != name and not torch.equal(target_part, value.to(target_part.dtype)):
            raise ValueError(
                f"{about} ties {name} to {first}, and the source has other values for each; set tie_word_embeddings "
                "to false there, or remove the one that the model was not trained with"
            )
        target_part.copy_(value)
    bar.close()
    if missing := placement.missing():
        raise ValueError(f"the source has no {missing[0]}, which the {type(model).__name__} of config.json needs")
    return model.eval()


def sample_tokens(model: Any, count: int) -> Tensor:
    """Return fixed tokens from all over the vocabulary, (1, count), or fewer if the model has fewer positions."""
    count = min(count, positions_of(model.config) or count)
    return (torch.arange(count)[None] * 7919 + 3) % model.get_input_embeddings().weight.shape[0]


def logits_of(model: Any, ids: Tensor) -> Tensor:
    """Return the logits, or the first output of another head. A decoder reads the same tokens as its encoder."""
    output = model(ids, **({"decoder_input_ids": ids} if model.config.is_encoder_decoder else {}))
    logits: Tensor = output.logits if "logits" in output else output[0]
    return logits


def add_branches(model: nn.Module, source: Source) -> list[RemovableHandle]:
    """Add the source's low-rank branches (eq. 13) as forward hooks, in the model's dtype."""

    def hook(b_OK: Tensor, p_KI: Tensor | None) -> Any:
        """Return a hook that adds one branch; P is None if it is fixed."""

        def add(layer: nn.Module, args: tuple[Tensor], output: Tensor) -> Tensor:
            if p_KI is None:
                projected = torch.stack([run.sum(-1) for run in args[0].split(k, dim=-1)], dim=-1)
            else:
                projected = nn.functional.linear(args[0], p_KI)
            return output + nn.functional.linear(projected, b_OK)

        return add

    # Read the learned matrices once, where and in the dtype in which the model computes.
    like = next(model.parameters())
    k = source.low_rank.k
    learned = {name: source.read_branch(name).to(like.device, like.dtype) for name in source.branch_specs}
    return [
        model.get_submodule(name).register_forward_hook(
            hook(learned[f"{name}.{LOW_RANK}"], learned.get(f"{name}.{PROJECTION}"))
        )
        for name in source.branches
    ]


@torch.no_grad()
def reference_logits(source: Source, tokens: int, grid: Grid | None = None) -> dict[str, Tensor]:
    """Compute the logits of a source's model for fixed tokens; with `grid` its 2:4 weights are rounded to it.

    Returns:
        `ids`, (1, tokens), and `logits` of the weights alone. With low-rank branches also `branched`, the logits of
        weights and branches, and both in fp32: `logits_fp32` and `branched_fp32`.
    """
    model = filled_model(source, grid)
    result = {"ids": sample_tokens(model, tokens)}
    run = partial(logits_of, model, result["ids"])
    result["logits"] = run()
    if source.branches:
        hooks = add_branches(model, source)
        result["branched"] = run()
        for hook in hooks:
            hook.remove()
        model.float()  # in fp32 the order of sums is all that differs between a branch and peft's adapter
        result["logits_fp32"] = run()
        add_branches(model, source)
        result["branched_fp32"] = run()
    return result
