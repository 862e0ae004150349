"""The places to which transformers brings the tensors of a model's files."""

from __future__ import annotations

from typing import Any

from sparseforge_ds.transformers_internals import WeightConverter, WeightRenaming, rename_source_key


class Targets:
    """Map the tensors of a model's files to where transformers brings them.

    Args:
        model: as `from_pretrained` has built it.
        conversions: by which transformers would load the dense model.
    """

    def __init__(self, model: Any, conversions: list[Any]) -> None:
        self._model = model
        self._shapes = model.state_dict()
        self._renamings = [conversion for conversion in conversions if isinstance(conversion, WeightRenaming)]
        self._converters = [conversion for conversion in conversions if isinstance(conversion, WeightConverter)]

    def find(self, key: str) -> tuple[str, str | None]:
        """Return the name in the model, and the pattern of the conversion that brings a tensor there, if any."""
        name, pattern = rename_source_key(
            key, self._renamings, self._converters, self._model.base_model_prefix, self._shapes
        )
        return name, pattern

    def converter(self, pattern: str) -> Any:
        """Return the conversion that has a pattern."""
        return next(converter for converter in self._converters if pattern in converter.source_patterns)
