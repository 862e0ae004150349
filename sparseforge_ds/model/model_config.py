"""Config of the model that a run names, and the check that such a model can be trained here."""

from __future__ import annotations

import os
from pathlib import Path

from transformers import PretrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from sparseforge_ds.config.arguments import EMBEDDED_MODEL
from sparseforge_ds.model.hub_access import why_unreachable
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
    path = _ASSETS / name if name == EMBEDDED_MODEL else Path(os.path.expanduser(name))
    if not path.exists() and name.count("/") == 1 and ".." not in name:
        hub_config = _ASSETS / "hub_configs" / name
        path = hub_config if hub_config.is_dir() else path
    if path.is_dir() and not (path / "config.json").is_file():
        raise ValueError(f"{flag} {name}: no config.json in this folder")
    # A name that is no path may be a hub id.
    remote = not path.exists()
    if remote and (name.startswith((".", "/", "~")) or name.count("/") > 1 or name.endswith(".json")):
        raise ValueError(f"{flag} {name}: no such folder or file; give a model folder, a config.json or a hub id")
    try:
        config = load_config(name if remote else path, f"{flag} {name}")
    except ValueError as error:
        if not remote:
            raise
        cause = str(error)
        if (unreachable := why_unreachable()) is not None:
            cause = f"{flag} {name}: neither a folder nor in the cache; {unreachable}"
        raise ValueError(
            f"{cause}; check the name and the network, or give a model folder or its config.json"
        ) from None
    require_causal(config, f"{flag} {name}")
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
