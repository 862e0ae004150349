"""Why transformers cannot load something, in one line that says what to do about it."""

from __future__ import annotations

import pickle

_OWN_CODE = "trust_remote_code"
"""What every refusal of transformers to run a folder's own code mentions."""


def reason(error: BaseException) -> str:
    """The first line of what was raised; where that advises to run code, that none is run.

    Every load of a config, tokenizer or model passes `trust_remote_code=False`: transformers would otherwise ask on the
    terminal, and run Python files of the model's folder or repository for a `y`.
    """
    if _OWN_CODE in str(error):
        return (
            "it needs Python code of its own (auto_map in its JSON files), which transformers has no class for, and no "
            "remote code is run here; give a model of a family that transformers has, or, if this is one of those "
            "under another name, write its model_type (or tokenizer_class) there and delete auto_map"
        )
    if isinstance(error, pickle.UnpicklingError):
        return (
            "a file of it is a pickle of more than tensors, which could run any code and is not opened here; give its "
            "weights in safetensors files"
        )
    if isinstance(error, KeyError):  # which says the key alone
        return f"KeyError: {error}"[:300]
    lines = str(error).strip().splitlines() or [type(error).__name__]
    if lines[0].endswith(":"):  # a headline: huggingface_hub's, of a value in a config
        lines[0] = " ".join(" ".join(lines).split())
    return lines[0][:300]
