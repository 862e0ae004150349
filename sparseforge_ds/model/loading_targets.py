"""Names in the model to which transformers loads the tensors of a model's files."""

from __future__ import annotations

from typing import Any

from sparseforge_ds.transformers_internals import WeightConverter, WeightRenaming, rename_source_key


class Targets:
    """Map from names in a model's files to names in the model."""

    def __init__(self, model: Any, conversions: list[Any]) -> None:
        """Sort the conversions.

        Args:
            model: as `from_pretrained` has built it.
            conversions: by which transformers would load the dense model.
        """
        self._model = model
        self._shapes = model.state_dict()
        self._renamings = [conversion for conversion in conversions if isinstance(conversion, WeightRenaming)]
        self._converters = [conversion for conversion in conversions if isinstance(conversion, WeightConverter)]

    def find(self, key: str) -> tuple[str, str | None]:
        """Return a tensor's name in the model, and the pattern of the conversion that produces it, if any."""
        name, pattern = rename_source_key(
            key, self._renamings, self._converters, self._model.base_model_prefix, self._shapes
        )
        return name, pattern

    def converter(self, pattern: str) -> Any:
        """Return the conversion with a pattern."""
        return next(converter for converter in self._converters if pattern in converter.source_patterns)
