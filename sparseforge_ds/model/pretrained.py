"""Dense models: finding their folder, checking that they can be trained, and loading them under each ZeRO stage."""

from __future__ import annotations

import contextlib
import copy
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import torch
from transformers import (
    AutoModelForCausalLM,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.integrations import HfDeepSpeedConfig
from transformers.integrations import deepspeed as hf_deepspeed

from sparseforge_ds.checkpoint.model_files import LEGAL_FILES
from sparseforge_ds.checkpoint.tensors import TensorFolder
from sparseforge_ds.config.arguments import EMBEDDED_MODEL
from sparseforge_ds.model.hub_access import find_path, not_on_hub, why_unreachable
from sparseforge_ds.model.loading_error import check_loading_report, reason
from sparseforge_ds.model.model_config import require_causal
from sparseforge_ds.model.registration import load_config, positions_of
from sparseforge_ds.model.saved_names import Placement
from sparseforge_ds.model.sequence_parallel import check_divided
from sparseforge_ds.model.sound_weights import require_finite_weights, require_float_weights
from sparseforge_ds.model.stored_config import is_only_pruned, is_packed_config
from sparseforge_ds.model.tokenizer import check_vocabulary, read_tokenizer
from sparseforge_ds.ranks import AgreedError

_DOWNLOADED = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja", *LEGAL_FILES]
"""Files of a repository that a run needs."""


@dataclass(frozen=True)
class Pretrained:
    """Folder with a model that can be trained."""

    name: str
    """Name of the model as the user gave it."""
    folder: Path
    config: PretrainedConfig

    @property
    def hidden_size(self) -> int:
        """Width of the residual stream."""
        return int(self.config.get_text_config().hidden_size)

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """Tokenizer in the folder.

        Raises:
            ValueError: there is none, it cannot be read, or it has tokens that the model has no embedding for.
        """
        try:
            tokenizer = read_tokenizer(self.folder)
            check_vocabulary(tokenizer, self.config)
        except ValueError as error:
            raise ValueError(f"--model {self.name}: {error}") from None
        return tokenizer


def find_model(name: str, flag: str) -> Pretrained:
    """Find a model, download it if it is on the hub, and read everything of it except the weights.

    Args:
        name: a folder, a hub id, or the name of the embedded model.
        flag: that named it, for messages.

    Raises:
        ValueError: there is no such model, its folder is incomplete or damaged, a weight is no float, or it is no
            causal language model.
    """
    folder = _folder(name, flag)
    if not (folder / "config.json").is_file():
        raise ValueError(f"{flag} {name}: no config.json in {folder}; give a Hugging Face model folder")
    config = load_config(folder, f"{flag} {name}")
    require_causal(config, f"{flag} {name}")
    # Weights in another form than a dense model's are rejected by name.
    stored = getattr(config, "quantization_config", None) or {}
    if stored.get("low_rank"):
        raise ValueError(
            f"{flag} {name}: is packed, with low-rank branches, which are no part of a dense model; give the dense "
            "model that it was made of"
        )
    if (folder / "adapter_config.json").is_file():
        raise ValueError(
            f"{flag} {name}: has a PEFT adapter beside its weights (adapter_config.json), which transformers would "
            "load as further layers; merge it into the weights (merge_and_unload of peft), or take the file away"
        )
    if is_packed_config({"quantization_config": stored}):
        raise ValueError(
            f"{flag} {name}: its weights are packed 2:4, which cannot be trained; unpack it first: sparseforge export "
            f"{shlex.quote(name)} DENSE --format hf"
        )
    if stored and not is_only_pruned({"quantization_config": stored}):
        raise ValueError(
            f"{flag} {name}: its weights are quantized ({str(stored.get('quant_method'))[:50]}), which cannot be "
            "trained; give the model that it was made of"
        )
    try:
        tensors = TensorFolder(folder)
    except ValueError as error:
        raise ValueError(f"{flag} {name}: {error}") from None
    require_float_weights({key: spec.dtype for key, spec in tensors.specs.items()}, folder, f"{flag} {name}")
    return Pretrained(name, folder, config)


def check_shapes(model: Pretrained, flag: str, empty: PreTrainedModel) -> None:
    """Compare the shapes in a model's files with those of its config; does nothing if there are no files.

    Args:
        model: student or teacher.
        flag: that names it.
        empty: model of the config, on any device.

    Raises:
        ValueError: a tensor has another shape.
    """
    if not any(model.folder.glob("model*.safetensors*")):  # a dry run needs the config alone
        return
    shapes = {name: spec.shape for name, spec in TensorFolder(model.folder).specs.items()}
    placement = Placement(empty, model.config.model_type, shapes)
    if placement.misfit is not None:
        raise ValueError(f"{flag} {model.name}: {placement.misfit}")


def check_length(model: Pretrained, flag: str, seq_length: int, parts: int, attention: str | None) -> None:
    """Check that a model can take sequences of a length, and that ranks can share them.

    Args:
        model: student or teacher.
        flag: that names it.
        seq_length: tokens of a sequence.
        parts: ranks that share a sequence.
        attention: value of `--attn_implementation`; None for the one that transformers chooses.

    Raises:
        ValueError: the model cannot; the message has the cause and the cure.
    """
    positions = positions_of(model.config)
    if positions is not None and seq_length > positions:
        raise ValueError(
            f"--seq_length {seq_length}: {flag} {model.name} has {positions} positions; use at most {positions}"
        )
    if parts > 1:
        try:
            check_divided(model.config, parts, seq_length, attention)
        except ValueError as error:
            raise ValueError(f"--sequence_parallel {parts}: {flag} {model.name}: {error}") from None


def check_attention(model: Pretrained, implementation: str, elsewhere: bool) -> None:
    """Check that a model can compute attention by an implementation.

    Args:
        model: student or teacher.
        implementation: value of `--attn_implementation`.
        elsewhere: True for a run on another machine, which may have packages that this one lacks.

    Raises:
        ValueError: transformers does not know it, the model's family has none of that kind, or a package is missing.
    """
    try:
        with torch.device("meta"):
            AutoModelForCausalLM.from_config(
                copy.deepcopy(model.config), attn_implementation=implementation, trust_remote_code=False
            )
    except (ImportError, ValueError, OSError) as error:
        if not (elsewhere and isinstance(error, ImportError)):
            raise ValueError(
                f"--attn_implementation {implementation}: {model.name} cannot be computed with it ({reason(error)}); "
                "choose another one, or leave the flag out for the best that there is"
            ) from None


def load_pretrained(
    folder: str | Path,
    who: str,
    dtype: torch.dtype,
    partition: dict[str, Any] | None,
    model_class: Any = AutoModelForCausalLM,
    **options: Any,
) -> PreTrainedModel:
    """Load a model with its weights; collective if they are partitioned.

    A living `HfDeepSpeedConfig` has no effect on this load, and keeps its effect on later ones.

    Args:
        folder: of the model, or its hub id.
        who: its name in messages.
        dtype: of every weight.
        partition: a DeepSpeed configuration with ZeRO stage 3, to divide every weight over the ranks as it is loaded;
            None to load all of it here.
        model_class: whose `from_pretrained` loads it.
        **options: passed to `from_pretrained`.

    Raises:
        AgreedError: it cannot be loaded, weights are missing in the files, or one is not finite; every rank knows.
    """
    options["ignore_mismatched_sizes"] = True  # which the check below names
    try:
        with _loading_as(partition):
            model, report = model_class.from_pretrained(
                folder, dtype=dtype, output_loading_info=True, trust_remote_code=False, **options
            )
    except (ValueError, ImportError) as error:
        raise AgreedError(f"{who}: cannot be loaded ({reason(error)})") from None
    except RuntimeError as error:  # partitioned weights; others, such as too little memory on one rank, pass
        if "size mismatch" not in str(error):
            raise
        first = str(error).splitlines()[1].strip()
        raise AgreedError(f"{who}: config.json and weights do not belong together: {first}") from None
    try:
        check_loading_report(report, who, folder)
        require_finite_weights(model, who)
    except ValueError as error:
        raise AgreedError(str(error)) from None
    return cast(PreTrainedModel, model)


@contextlib.contextmanager
def _loading_as(ds_config: dict[str, Any] | None) -> Iterator[None]:
    """Make `from_pretrained` in the block partition the weights by `ds_config`, or load whole ones without it."""
    reference = hf_deepspeed._hf_deepspeed_config_weak_ref
    outer = None if reference is None else reference()
    # transformers looks for a config that is alive.
    inner = None if ds_config is None else HfDeepSpeedConfig(ds_config)
    if inner is None:
        hf_deepspeed.unset_hf_deepspeed_config()
    try:
        yield
    finally:
        del inner
        if outer is None:
            hf_deepspeed.unset_hf_deepspeed_config()
        else:
            hf_deepspeed.set_hf_deepspeed_config(outer)


def _folder(name: str, flag: str) -> Path:
    """Return the folder of a model, after downloading it if it is on the hub."""
    if name == EMBEDDED_MODEL:
        return Path(__file__).parents[1] / "assets" / EMBEDDED_MODEL
    path = find_path(name, f"{flag} {name}")
    if path is not None:
        if not path.is_dir():
            raise ValueError(f"{flag} {name}: a file; give the folder that holds config.json and the weights")
        return path
    # A hub id: take it from the network, or from the cache where there is no network.
    import huggingface_hub  # talks to the network, and only here
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    is_offline = why_unreachable() is not None
    try:
        return Path(huggingface_hub.snapshot_download(name, allow_patterns=_DOWNLOADED, local_files_only=is_offline))
    except (OSError, HfHubHTTPError, LocalEntryNotFoundError) as error:
        raise not_on_hub(f"{flag} {name}", error) from None
