"""A finished model for evaluation: plain transformers, optionally pruned in memory or with its low-rank adapter."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerBase
from transformers.pytorch_utils import Conv1D
from transformers.quantizers.auto import AUTO_QUANTIZER_MAPPING
from transformers.utils import cached_file

from sparseforge_ds.checkpoint.folder import read_json_object
from sparseforge_ds.checkpoint.tensors import TensorFolder
from sparseforge_ds.config import SparseForgeConfig
from sparseforge_ds.mask.pattern import Pattern
from sparseforge_ds.model.families import prunable_weights
from sparseforge_ds.model.hub_access import find_path, why_unreachable
from sparseforge_ds.model.loading_error import check_loading_report, reason
from sparseforge_ds.model.registration import BUILD_ERRORS, load_config, register_model_classes
from sparseforge_ds.model.sound_weights import require_float_weights
from sparseforge_ds.model.stored_config import is_packed_config
from sparseforge_ds.model.tokenizer import check_tokens
from sparseforge_ds.model.tokenizer import read_tokenizer as tokenizer_of
from sparseforge_ds.packed_format.packing import PACKED24, PACKED24_MODULE
from sparseforge_ds.start.first_mask import choose_by_score

NO_ADAPTER = "none"
"""Value of `--adapter` for no adapter."""
_CONFIG = "adapter_config.json"
_UNUSABLE = (
    *(OSError, ValueError, UnpicklingError, SafetensorError),  # files
    *(*BUILD_ERRORS, StrictDataclassError),  # values of a config
    ImportError,  # the library of a quantized format is missing
)
"""Errors that `from_pretrained` raises for a damaged model."""


def find_adapter(name: str, flag_value: str | None) -> str | None:
    """Return the adapter to measure a model with: the flag's, or the one that export wrote beside the weights.

    Args:
        name: the model's folder or hub id.
        flag_value: value of `--adapter`, if it was given.

    Raises:
        ValueError: the flag names no adapter, or it is missing and the model was exported with one that is not there.
    """
    if flag_value == NO_ADAPTER:
        return None
    if flag_value is not None:
        find_path(flag_value, f"--adapter {flag_value}")
        if _beside(flag_value, _CONFIG) is None:
            raise ValueError(f"--adapter {flag_value}: has no {_CONFIG}; give the folder or the hub id of an adapter")
        return flag_value
    if _beside(name, _CONFIG) is not None:
        return name
    record = _beside(name, "sparsity.json")
    if record is not None and read_json_object(record).get("adapter"):
        raise ValueError(
            f"{name}: its low-rank adapter is missing ({_CONFIG}), without which the weights compute nonsense; export "
            f"again, give --adapter FOLDER, or --adapter {NO_ADAPTER} to measure the weights alone"
        )
    return None


def load_model(name: str, dtype: str = "auto", adapter: str | None = None) -> PreTrainedModel:
    """Load a causal language model for inference, on the GPU where there is one, with no adapter but `adapter`.

    Raises:
        ValueError: there is no such model, its files cannot be read or do not fit together, or peft is missing.
    """
    # Check what can be checked without loading; an offline machine looks into the hub's cache.
    if adapter is not None and importlib.util.find_spec("peft") is None:
        raise ValueError(f"--adapter {adapter}: peft is missing, which loads it; in the checkout pip install '.[peft]'")
    _require_known_format(name, load_config(name, name))
    _require_floats(name)

    # Load the weights.
    unreachable = why_unreachable(name)
    try:
        model, report = AutoModelForCausalLM.from_pretrained(
            name,
            dtype=dtype if dtype == "auto" else getattr(torch, dtype),
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # which the check below names
            trust_remote_code=False,
            local_files_only=unreachable is not None,
            **_without_adapter(name),
        )
    except _UNUSABLE as error:
        why = reason(error) if unreachable is None else f"{reason(error)}; {unreachable}"
        raise ValueError(f"{name}: cannot be loaded as a causal language model ({why})") from None
    check_loading_report(report, name, name)

    # Put the adapter on it.
    if adapter is not None:
        try:
            cached = why_unreachable(adapter) is not None
            model.load_adapter(adapter, adapter_kwargs={"local_files_only": True} if cached else {})
        except _UNUSABLE as error:
            raise ValueError(f"--adapter {adapter}: cannot be put on {name} ({reason(error)})") from None
    model.eval()
    return model.to("cuda" if torch.cuda.is_available() else "cpu")


def _require_known_format(name: str, config: Any) -> None:
    """Reject a packed model if nothing has made transformers know the format."""
    if is_packed_config(vars(config)) and PACKED24 not in AUTO_QUANTIZER_MAPPING:
        raise ValueError(f"{name}: is stored as packed24; `import {PACKED24_MODULE}` before it is loaded")


def _require_floats(name: str) -> None:
    """Reject a folder of a dense model that stores a weight as no float; it would be cast in silence."""
    folder = Path(name)
    stored = any((folder / file).is_file() for file in ("model.safetensors", "model.safetensors.index.json"))
    if stored and "quantization_config" not in read_json_object(folder / "config.json"):
        dtypes = {key: spec.dtype for key, spec in TensorFolder(folder).specs.items()}
        require_float_weights(dtypes, folder, name)


def _without_adapter(name: str) -> dict[str, Any]:
    """Return arguments by which `from_pretrained` ignores an adapter beside the model's weights.

    It looks for one elsewhere then. Otherwise its report would list the adapter's missing weights, and not the model's.
    Of a model on the hub it would even load the weights that the adapter's config names.
    """
    has_model_and_adapter = all(_beside(name, file) is not None for file in (_CONFIG, "config.json"))
    return {"adapter_kwargs": {"subfolder": "no adapter"}} if has_model_and_adapter else {}


def _beside(name: str, file: str) -> Path | None:
    """Return a file in a model's folder, or in its repository on the hub, if it is there.

    Where the hub cannot be reached, its cache answers.
    """
    if Path(name).exists():
        path = Path(name) / file
        return path if path.is_file() else None
    is_reachable = why_unreachable() is None
    try:
        path_in_cache = cached_file(
            name,
            file,
            local_files_only=not is_reachable,
            _raise_exceptions_for_missing_entries=False,
            _raise_exceptions_for_connection_errors=is_reachable,
        )
    except OSError as error:
        raise ValueError(f"{name}: whether it has a {file} cannot be found out ({reason(error)})") from None
    return None if path_in_cache is None else Path(path_in_cache)


def load_tokenizer(name: str) -> PreTrainedTokenizerBase:
    """Load the tokenizer beside a model."""
    register_model_classes()
    try:
        return tokenizer_of(name)
    except ValueError as error:
        raise ValueError(f"{name}: {reason(error)}") from None


def check_embeddings_for(model: PreTrainedModel, ids: Iterable[int]) -> None:
    """Reject tokens that a model has no embedding for."""
    weight: torch.Tensor = model.get_input_embeddings().weight  # type: ignore[assignment]  # an adapter's layer too
    check_tokens(ids, weight.shape[0], model.name_or_path)


@torch.no_grad()
def share_of_zeros(model: PreTrainedModel) -> float | None:
    """Return the share of exact zeros in the matrices between embedding and head; None where none is stored plainly.

    It tells a 2:4 model (0.5) from one whose masks were still soft when it was saved. Matrices of a packed model are
    not stored plainly.
    """
    if getattr(model, "hf_quantizer", None) is not None:
        return None
    outside = {id(layer) for layer in (model.get_input_embeddings(), model.get_output_embeddings())}
    zeros = total = 0
    for name, module in model.named_modules():
        is_outside = id(module) in outside or ".lora_" in name
        for parameter in () if is_outside else module.parameters(recurse=False):
            is_matrix = isinstance(module, (nn.Linear, Conv1D)) and parameter.dim() == 2
            if (is_matrix or parameter.dim() == 3) and parameter.is_floating_point():
                zeros += parameter.numel() - int(parameter.count_nonzero())
                total += parameter.numel()
    return zeros / total if total else None


@torch.no_grad()
def prune_by_magnitude(model: PreTrainedModel, pattern: Pattern, config: SparseForgeConfig | None = None) -> int:
    """Prune a model in memory, as `sparseforge prune --mask magnitude --epochs 0` does in a folder.

    Returns:
        The number of weights.
    """
    weights = prunable_weights(model, config or SparseForgeConfig(pattern=str(pattern)))
    parameters = dict(model.named_parameters())
    for weight in weights:
        parameter = parameters[weight.name]
        kept = choose_by_score(weight, parameter, pattern, None)
        parameter.copy_(torch.where(kept, parameter, 0.0))
    return len(weights)
