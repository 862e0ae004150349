"""Dense model in a folder, with weights in memory for some of its parts only."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
from accelerate import init_empty_weights
from torch import Tensor, nn

from sparseforge_ds.checkpoint.tensors import fingerprint_weights
from sparseforge_ds.export.source import DTYPES, read_config_json
from sparseforge_ds.export.stored import open_dense_files
from sparseforge_ds.model.loading_error import reason
from sparseforge_ds.model.registration import build_model, load_config
from sparseforge_ds.model.saved_names import Placement, SavedTensor
from sparseforge_ds.model.stored_config import config_sha256, configured_dtype
from sparseforge_ds.transformers_internals import no_init_weights

Reader = Callable[[str], Tensor]
"""Function that reads a tensor by its name in the files."""


class DenseModel:
    """Model of transformers whose parameters are on the meta device until `load` fills them."""

    def __init__(self, folder: str | Path) -> None:
        """Read config and headers, but no weights.

        Raises:
            ValueError: the folder cannot be read, is sparse already, has an adapter or a weight that is no float, or
                lacks a tensor of the model of its config.json or has it in another shape.
        """
        self.folder = Path(folder)
        self.stored_config = read_config_json(self.folder)
        self.tensors, self.specs, self.unused = open_dense_files(self.folder, self.stored_config)
        self.config = load_config(self.folder, str(folder))
        try:
            with no_init_weights(), init_empty_weights(include_buffers=False):
                self.module = build_model(self.config, dtype=torch.float32)
        except ValueError as error:
            raise ValueError(f"{folder}/config.json: {reason(error)}") from None
        # Each tensor of the files is a part of one in memory.
        self.module.config.use_cache = False
        self.module.eval().requires_grad_(False)
        self._shapes = {name: tuple(value.shape) for name, value in self.module.state_dict().items()}
        self.parts = self._match()
        self._parts_of: dict[str, dict[str, SavedTensor]] = {}
        for name, part in self.parts.items():
            self._parts_of.setdefault(part.memory_name, {})[name] = part
        # Of two tied parameters, the files may have either.
        for name, other in self.module.all_tied_weights_keys.items():
            if name in self._parts_of:
                self._parts_of.setdefault(other, self._parts_of[name])

    @property
    def hidden(self) -> int:
        """Channels of a hidden state."""
        return int(self.config.get_text_config().hidden_size)

    def load(self, prefix: str, device: torch.device, but: str | None = None, read: Reader | None = None) -> None:
        """Fill all parameters and buffers whose names begin with `prefix`, and not with `but`, in fp32.

        Args:
            prefix: of names in memory, with its dot.
            device: of the values.
            but: prefix of names that are left as they are.
            read: reads a tensor; by default from the dense files.

        Raises:
            ValueError: the files lack a tensor, or one is not finite.
        """
        read = read or self.tensors.read
        # Parameters and saved buffers are put together from their parts in the files.
        for name in self.names(prefix, but):
            value = torch.empty(self._shapes[name])
            filled = 0
            for stored_name, part in self._parts_of.get(name, {}).items():
                stored = read(stored_name)
                if not stored.isfinite().all():
                    raise ValueError(f"{self.folder}: {stored_name} is not finite; give a sound model")
                value.view(-1)[part.start : part.stop] = stored.view(-1)
                filled += stored.numel()
            if filled < value.numel():
                raise ValueError(f"{self.folder}: holds no {name}, which the model of its config.json needs")
            self._put(name, value.to(device))
        # Buffers that no file has, such as frequencies, were computed when the model was built.
        for owner, module in self.module.named_modules():
            if f"{owner}.".startswith(prefix) and not (but and f"{owner}.".startswith(but)):
                for name, buffer in module.named_buffers(recurse=False):
                    setattr(module, name, buffer.to(device))

    def unload(self, prefix: str) -> None:
        """Free the parameters whose names begin with `prefix`."""
        for name, parameter in self.module.named_parameters():
            if name.startswith(prefix):
                self._put(name, torch.empty_like(parameter, device="meta"))

    def stored(self, prefix: str) -> dict[str, Tensor]:
        """Return the parameters below a prefix with the names, shapes and dtypes of the files."""
        parameters = {name: value for name, value in self.module.named_parameters() if name.startswith(prefix)}
        stored = {}
        for name, value in parameters.items():
            for stored_name, part in self._parts_of[name].items():
                flat = value.detach().reshape(-1)[part.start : part.stop]
                stored[stored_name] = flat.view(part.shape).to("cpu", self.specs[stored_name].dtype).contiguous()
        return stored

    def stored_dtypes(self, prefix: str) -> dict[str, torch.dtype]:
        """Return the dtype that the files have of each parameter below a prefix, by its name without it."""
        names = [name for name, _ in self.module.named_parameters() if name.startswith(prefix)]
        return {name.removeprefix(prefix): self._narrowest([name]) for name in names}

    def names(self, prefix: str, but: str | None = None) -> list[str]:
        """Return the names in memory that begin with `prefix`, and not with `but`."""
        return [name for name in self._shapes if name.startswith(prefix) and not (but and name.startswith(but))]

    def _put(self, name: str, value: Tensor) -> None:
        owner, _, leaf = name.rpartition(".")
        module = self.module.get_submodule(owner)
        if leaf in module._parameters:
            module._parameters[leaf] = nn.Parameter(value, requires_grad=False)
        else:
            module._buffers[leaf] = value

    def dtype(self, names: Iterable[str]) -> torch.dtype:
        """Return the dtype of config.json; without one, the narrowest that the files have of these names in memory.

        Raises:
            ValueError: a dtype that no export has.
        """
        narrowest = self._narrowest(names)
        if (configured := configured_dtype(self.stored_config)) is None:
            return narrowest
        if configured not in DTYPES:
            raise ValueError(f"{self.folder}/config.json: dtype {configured!r}; use one of {', '.join(DTYPES)}")
        return DTYPES[configured]

    def nbytes(self, prefix: str) -> int:
        """Return the bytes that the files have below a prefix in memory."""
        return sum(self.specs[name].nbytes for name, part in self.parts.items() if part.memory_name.startswith(prefix))

    def _narrowest(self, names: Iterable[str]) -> torch.dtype:
        """Return the narrowest dtype that the files have of these names in memory; ValueError as of `dtype`."""
        stored_dtypes = {
            self.specs[stored_name].dtype for name in names for stored_name in self._parts_of.get(name, ())
        }
        narrowest = min(stored_dtypes, key=lambda dtype: (dtype.itemsize, str(dtype)))
        if narrowest not in DTYPES.values():
            raise ValueError(f"{self.folder}: its weights are stored in {narrowest}; use bf16, fp16 or fp32 weights")
        return narrowest

    def identity(self) -> str:
        """Return a hash of config.json, and of the names, shapes, dtypes and samples of all tensors."""
        content = config_sha256(self.stored_config) + fingerprint_weights(self.folder)
        return hashlib.sha256(content.encode()).hexdigest()

    def require_finite(self) -> None:
        """Raise ValueError for a tensor of the model that is not finite, in one read of the files."""
        for name in self.parts:
            if not self.tensors.read(name).isfinite().all():
                raise ValueError(f"{self.folder}: {name} is not finite; give a sound model")

    def _match(self) -> dict[str, SavedTensor]:
        """Return the part of the model that each tensor of the files is, by its name there.

        Raises:
            ValueError: a tensor has another shape than the model of config.json gives it, or a parameter is missing.
        """
        shapes = {name: spec.shape for name, spec in self.specs.items()}
        placement = Placement(self.module, self.stored_config.get("model_type"), shapes)
        if placement.misfit is not None:
            raise ValueError(f"{self.folder}: {placement.misfit}")
        missing = set(placement.missing())
        for name, _ in self.module.named_parameters():
            if name in missing:
                raise ValueError(f"{self.folder}: holds no {name}, which the model of its config.json needs")
        return placement.places
