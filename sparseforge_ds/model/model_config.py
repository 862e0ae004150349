"""Config of the model that a run names, and the check that such a model can be trained here."""

from __future__ import annotations

import os
from pathlib import Path

from transformers import PretrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from sparseforge_ds.config.arguments import EMBEDDED_MODEL
from sparseforge_ds.model.hub_access import find_path
from sparseforge_ds.model.registration import load_config

_ASSETS = Path(__file__).parents[1] / "assets"


def read_model_config(name: str, flag: str = "--model") -> PretrainedConfig:
    """Read the config of a model, without its weights.

    Configs of the models in the paper's tables are part of the package, so they can be planned without the hub.

    Args:
        name: a model folder, a config.json, a hub id, or the name of the embedded model.
        flag: that named it, for messages.

    Raises:
        ValueError: there is no such config, it cannot be used, or it is of no causal language model.
    """
    who = f"{flag} {name}"
    path = _ASSETS / name if name == EMBEDDED_MODEL else find_path(os.path.expanduser(name), who)
    if path is None and (shipped := _ASSETS / "hub_configs" / name / "config.json").is_file():
        path = shipped.parent
    if path is not None and path.is_dir() and not (path / "config.json").is_file():
        raise ValueError(f"{who}: no config.json in this folder")
    config = load_config(path or name, who)
    require_causal(config, who)
    return config


def require_causal(config: PretrainedConfig, who: str) -> None:
    """Raise ValueError, which begins with `who`, unless transformers has a causal language model for the config."""
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ValueError(
            f"{who}: a {config.model_type} model is no causal language model; what is trained here predicts the next "
            "token of a text, and transformers' AutoModelForCausalLM has a class for it (llama, qwen3, mixtral, ...)"
        )
    if not isinstance(getattr(config.get_text_config(), "vocab_size", None), int):
        raise ValueError(f"{who}: the config of this {config.model_type} model has no vocab_size; complete config.json")
