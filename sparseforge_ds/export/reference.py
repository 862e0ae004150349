"""The logits that an export must have, from a model that is filled from the source and never saw the exported files."""

from __future__ import annotations

import re
from collections import Counter
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from tqdm import tqdm

from sparseforge_ds.export.source import Source
from sparseforge_ds.model.families import LOW_RANK, PROJECTION
from sparseforge_ds.model.loading_error import reason
from sparseforge_ds.model.published_names import PublishedTensor, published_tensors
from sparseforge_ds.model.registration import build_model, load_config


def filled_model(source: Source) -> Any:
    """The source's model, in evaluation mode, on the CPU. Raises ValueError where transformers has no class for its
    config.json, or the tensors of the source are not exactly those of the model that config.json describes."""
    from sparseforge_ds.transformers_internals import no_init_weights

    config = load_config(source.model_folder, str(source.model_folder), cached=True)
    try:
        with no_init_weights():
            model = build_model(config, dtype=source.dtype)
    except ValueError as error:
        raise ValueError(f"{source.model_folder}/config.json: {reason(error)}") from None
    model.tie_weights()
    state = model.state_dict()
    filled: Counter[int] = Counter()
    shapes = {name: tuple(value.shape) for name, value in state.items()}
    places = published_tensors(source.model_config.get("model_type"), shapes)
    places |= {name: PublishedTensor(name, 0, shape) for name, shape in shapes.items()}
    inner = f"{model.base_model_prefix}."  # some folders leave it away, and transformers loads them
    places |= {name.removeprefix(inner): place for name, place in places.items() if name.startswith(inner)}
    about = f"{source.model_folder}/config.json: its {type(model).__name__}"
    bar = tqdm(total=sum(spec.nbytes for spec in source.specs.values()), unit="B", unit_scale=True, disable=None)
    bar.set_description("proof")
    for name, spec in source.specs.items():
        bar.update(spec.nbytes)
        if (place := places.get(name)) is None:
            if any(re.search(glob, name) for glob in model._keys_to_ignore_on_load_unexpected or ()):
                continue
            raise ValueError(f"{about} has no {name}")
        if place.shape != spec.shape:
            raise ValueError(f"{about} has {name} of shape {place.shape}, the source {spec.shape}")
        target = state[place.of]
        target.view(-1)[place.start : place.stop].view(spec.shape).copy_(source.read(name))
        filled[target.data_ptr()] += place.stop - place.start
    bar.close()
    missing = [name for name, tensor in state.items() if filled[tensor.data_ptr()] < tensor.numel()]
    if missing:
        raise ValueError(f"the source has no {missing[0]}, which the {type(model).__name__} of config.json needs")
    return model.eval()


def token_ids(model: Any, count: int) -> Tensor:
    """(1, count) fixed tokens from all over the vocabulary; fewer where the model has not that many positions."""
    count = min(count, getattr(model.config, "max_position_embeddings", count))
    return (torch.arange(count)[None] * 7919 + 3) % model.get_input_embeddings().weight.shape[0]


def logits_of(model: Any, ids: Tensor) -> Tensor:
    """Return the logits, or what else the head gives first. A decoder reads the same tokens as its encoder."""
    output = model(ids, **({"decoder_input_ids": ids} if model.config.is_encoder_decoder else {}))
    logits: Tensor = output.logits if "logits" in output else output[0]
    return logits


def add_branches(model: nn.Module, source: Source) -> list[RemovableHandle]:
    """Our low-rank branch (design eq. 13) as forward hooks, in the model's dtype."""

    def hook(b_OK: Tensor, p_KI: Tensor | None) -> Any:
        def add(layer: nn.Module, args: tuple[Tensor], output: Tensor) -> Tensor:
            if p_KI is None:
                projected = torch.stack([run.sum(-1) for run in args[0].split(k, dim=-1)], dim=-1)
            else:
                projected = nn.functional.linear(args[0], p_KI)
            return output + nn.functional.linear(projected, b_OK)

        return add

    dtype, k = next(model.parameters()).dtype, source.low_rank.k
    learned = {name: source.read_branch(name).to(dtype) for name in source.branch_specs}
    return [
        model.get_submodule(name).register_forward_hook(
            hook(learned[f"{name}.{LOW_RANK}"], learned.get(f"{name}.{PROJECTION}"))
        )
        for name in source.branches
    ]


@torch.no_grad()
def reference_logits(source: Source, tokens: int) -> dict[str, Tensor]:
    """`logits` of the weights alone for `ids`, (1, tokens); with low-rank branches also `branched`, the model's own.
    Then `without` and `ours` are the same two in fp32."""
    model = filled_model(source)
    answer = {"ids": token_ids(model, tokens)}
    run = partial(logits_of, model, answer["ids"])
    answer["logits"] = run()
    if source.branches:
        hooks = add_branches(model, source)
        answer["branched"] = run()
        for hook in hooks:
            hook.remove()
        model.float()  # so that only the order of sums differs between the two ways to write the branch
        answer["without"] = run()
        add_branches(model, source)
        answer["ours"] = run()
    return answer
