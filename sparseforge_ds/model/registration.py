"""Classes of transformers for a model's config, and those that are ours because transformers has none."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

from sparseforge_ds.checkpoint.model_files import check_model_folder, check_sizes
from sparseforge_ds.model.loading_error import reason

OWN_FAMILIES = ("deepseek",)
"""Values of `model_type` whose classes are ours, since transformers has none."""


def register_model_classes() -> None:
    """Make transformers' Auto classes know `OWN_FAMILIES`; a second call does nothing. Not at `import
    sparseforge_ds`: our classes are made of Llama's, whose files import the Auto classes themselves."""
    import_module("sparseforge_ds.model.deepseek_moe").register()


def load_config(name: str | Path, who: str, cached: bool = False) -> Any:
    """transformers' config of a folder, a config.json, or a model on the hub (`cached`: without asking it), as
    `AutoModelForCausalLM` takes it: of the text model alone where it leaves out what sees (Qwen3.5, Llama 4).

    Raises ValueError, which begins with `who`, where it cannot be used.
    """
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoConfig, PretrainedConfig

    register_model_classes()
    errors = (OSError, ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RuntimeError)
    try:
        if is_folder := Path(name).is_dir():
            check_model_folder(name)
    except ValueError as error:
        raise ValueError(f"{who}: {error}") from None
    try:
        if not is_folder:
            check_sizes(PretrainedConfig.get_config_dict(name, local_files_only=cached)[0], name)
        config = AutoConfig.from_pretrained(name, local_files_only=cached, trust_remote_code=False)
    except (*errors, StrictDataclassError) as error:
        raise ValueError(f"{who}: its config.json cannot be used ({reason(error)})") from None
    return _of_text_alone(config)


def model_class(config: Any) -> Any:
    """Return the class of transformers that loads the model of a config: that which `architectures` names where it is a
    head that generates no text or is of an encoder and a decoder, else the Auto class of causal models, or where there
    is none for it, that of models that also see."""
    import transformers
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoModelForCausalLM, AutoModelForImageTextToText
    from transformers.models.auto.modeling_auto import MODEL_MAPPING_NAMES

    name = (config.architectures or [""])[0]
    named: Any = getattr(transformers, name, None)
    is_model = isinstance(named, type) and issubclass(named, transformers.PreTrainedModel)
    if is_model:
        other = not named.can_generate() or getattr(config, "is_encoder_decoder", False)
        if other and name not in MODEL_MAPPING_NAMES.values():  # bare models are part of causal ones
            return named
    return AutoModelForCausalLM if type(config) in MODEL_FOR_CAUSAL_LM_MAPPING else AutoModelForImageTextToText


def empty_model(config: Any, **how: Any) -> Any:
    """Return the model of a config, without the weights of any file; `how`: of `from_config`. Raises ValueError where
    transformers has no class for it."""
    loader = model_class(config)
    if hasattr(loader, "from_config"):
        return loader.from_config(config, trust_remote_code=False, **how)
    return loader._from_config(config, **how)


def _of_text_alone(config: Any) -> Any:
    """The text model's part of a config, where the causal class that transformers has for the whole is made of that."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    text, found = config.get_text_config(), MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    if text is config or getattr(found, "config_class", None) is not type(text):
        return config
    text.architectures, text.name_or_path = [found.__name__], config.name_or_path
    for name in ("dtype", "quantization_config"):
        if getattr(text, name, None) is None and getattr(config, name, None) is not None:
            setattr(text, name, getattr(config, name))
    return text
