"""Names inside transformers that are not its documented interface, looked up when they are first used.

They come and go between its releases, so whatever is missing is an error that names the version. Two renames that our
code meets are settled here as well.
"""

from __future__ import annotations

import importlib
import importlib.metadata
from typing import Any

RANGE = ">=5.21,<6"
"""Releases of transformers that have all of this, as pyproject.toml has them."""

WHERE = {
    "ALL_EXPERTS_FUNCTIONS": "integrations.moe",
    "Concatenate": "core_model_loading",
    "ConversionOps": "core_model_loading",
    "GradientCheckpointingLayer": "modeling_layers",
    "MergeModulelist": "core_model_loading",
    "MoeCausalLMOutputWithPast": "modeling_outputs",
    "OutputRecorder": "utils.output_capturing",
    "WeightConverter": "core_model_loading",
    "WeightRenaming": "core_model_loading",
    "_IdentityOp": "core_model_loading",
    "_compile_jinja_template": "utils.chat_template_utils",
    "_grouped_linear": "integrations.moe",
    "can_return_tuple": "utils.generic",
    "get_checkpoint_conversion_mapping": "conversion_mapping",
    "get_model_conversion_mapping": "conversion_mapping",
    "no_init_weights": "initialization",
    "register_checkpoint_conversion_mapping": "conversion_mapping",
    "rename_source_key": "core_model_loading",
    "render_jinja_template": "utils.chat_template_utils",
}
"""Module of transformers that has a name."""


class TransformersVersionError(ImportError, ValueError):
    """A release of transformers that lacks what our code needs; a ValueError too, so that commands say it in a line."""


def __getattr__(name: str) -> Any:
    """Return a name of transformers, without importing more of it than has that name."""
    if name == "CACHE":
        return _cache_field()
    if name not in WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        return getattr(importlib.import_module(f"transformers.{WHERE[name]}"), name)
    except (AttributeError, ModuleNotFoundError) as error:
        if isinstance(error, ModuleNotFoundError) and not str(error.name).startswith("transformers."):
            raise  # something that transformers itself needs
        raise TransformersVersionError(
            f"transformers {importlib.metadata.version('transformers')} has no {WHERE[name]}.{name}, which "
            f"sparseforge_ds needs: pip install 'transformers{RANGE}'"
        ) from None


def _cache_field() -> str:
    """Return what a model's arguments and outputs call the cache: `cache` from 5.24 on, `past_key_values` in 5.23."""
    fields = __getattr__("MoeCausalLMOutputWithPast").__dataclass_fields__
    return "cache" if "cache" in fields else "past_key_values"


def checkpoint_activations(model: Any, use_reentrant: bool = False) -> None:
    """Have a model recompute its activations in the backward pass."""
    settings = {"use_reentrant": use_reentrant}
    if hasattr(model, "activation_checkpointing_enable"):  # releases that have it warn of the old name
        model.activation_checkpointing_enable(activation_checkpointing_kwargs=settings)
    else:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=settings)
