"""Classes of transformers for a model's config, and those that are ours because transformers has none."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

from sparseforge_ds.checkpoint.model_files import check_config, check_model_folder
from sparseforge_ds.model.loading_error import reason

BUILD_ERRORS = (ArithmeticError, AssertionError, AttributeError, ImportError, LookupError, RuntimeError, TypeError)
"""Errors that transformers raises where a size or a name of a config makes no model."""

OWN_FAMILIES = ("deepseek",)
"""Values of `model_type` whose classes are ours, since transformers has none."""


def register_model_classes() -> None:
    """Register `OWN_FAMILIES` with transformers' Auto classes; a second call does nothing.

    `import sparseforge_ds` does not do it: our classes are made of Llama's, whose files import the Auto classes.
    """
    import_module("sparseforge_ds.model.deepseek_moe").register()


def load_config(name: str | Path, who: str) -> Any:
    """Load a model's config as `AutoModelForCausalLM` takes it.

    For some vision-language models (Qwen3.5, Llama 4) that is the config of the text model alone.

    Args:
        name: a folder, a config.json, or a model on the hub; its cache answers where the hub does not.
        who: beginning of error messages.

    Raises:
        ValueError: the config cannot be used.
    """
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoConfig, PretrainedConfig

    from sparseforge_ds.model.hub_access import find_path, not_on_hub, why_unreachable

    # Whatever transformers raises for a strange config.json becomes one message.
    register_model_classes()
    errors = (OSError, ValueError, *BUILD_ERRORS)
    path = find_path(name, who)
    is_folder = path is not None and path.is_dir()
    try:
        if is_folder:
            check_model_folder(name)
    except ValueError as error:
        raise ValueError(f"{who}: {error}") from None
    # Sizes and names of code are checked before anything of them is built.
    cached = why_unreachable(name) is not None
    try:
        if not is_folder:
            check_config(PretrainedConfig.get_config_dict(name, local_files_only=cached)[0], name)
        config = AutoConfig.from_pretrained(name, local_files_only=cached, trust_remote_code=False)
    except (*errors, StrictDataclassError) as error:
        if path is None and isinstance(error, OSError):
            raise not_on_hub(who, error) from None
        raise ValueError(f"{who}: its config.json cannot be used ({reason(error)})") from None
    return _text_config(config)


def positions_of(config: Any) -> int | None:
    """Return the number of tokens that a model can read at once, or None if its config does not say it."""
    positions = getattr(config.get_text_config(), "max_position_embeddings", None)
    return None if positions is None else int(positions)


def model_class(config: Any) -> Any:
    """Return the class of transformers that loads the model of a config.

    It is the class that `architectures` names, if that has a head without text generation, or an encoder and a decoder.
    Else it is the Auto class of causal models, or that of vision-language models if there is no causal class.
    """
    import transformers
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoModelForCausalLM, AutoModelForImageTextToText
    from transformers.models.auto.modeling_auto import MODEL_MAPPING_NAMES

    name = (config.architectures or [""])[0]
    architecture: Any = getattr(transformers, name, None)
    is_model = isinstance(architecture, type) and issubclass(architecture, transformers.PreTrainedModel)
    if is_model:
        is_causal = architecture.can_generate() and not getattr(config, "is_encoder_decoder", False)
        if not is_causal and name not in MODEL_MAPPING_NAMES.values():  # bare models are part of causal ones
            return architecture
    return AutoModelForCausalLM if type(config) in MODEL_FOR_CAUSAL_LM_MAPPING else AutoModelForImageTextToText


def build_model(config: Any, **options: Any) -> Any:
    """Build the model of a config without the weights of any file.

    Args:
        config: of transformers.
        **options: passed to `from_config`.

    Raises:
        ValueError: transformers has no class for it, or can make no model of it.
    """
    loader = model_class(config)
    try:
        if hasattr(loader, "from_config"):
            return loader.from_config(config, trust_remote_code=False, **options)
        return loader._from_config(config, **options)
    except BUILD_ERRORS as error:
        raise not_built(config, error) from error


def not_built(config: Any, error: Exception) -> ValueError:
    """Return the error that says why no model could be made of a config."""
    return ValueError(
        f"no {config.model_type} model can be made of this config.json ({reason(error)}); a size or a name in it is "
        "wrong"
    )


def _text_config(config: Any) -> Any:
    """Return the text model's part of a config, if the causal class for the whole config takes that part alone."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    text = config.get_text_config()
    causal_class = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    if text is config or getattr(causal_class, "config_class", None) is not type(text):
        return config
    # Entries that the files have beside the text model's part belong to it now.
    text.architectures = [causal_class.__name__]
    text.name_or_path = config.name_or_path
    for name in ("dtype", "quantization_config"):
        if getattr(text, name, None) is None and getattr(config, name, None) is not None:
            setattr(text, name, getattr(config, name))
    return text
