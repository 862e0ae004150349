"""Loader of packed24 folders (`sparseforge export --format packed24`) by transformers' own `from_pretrained`.

    import sparseforge_ds.extras.packed24
    model = AutoModelForCausalLM.from_pretrained("models/qwen3_14b_packed24")

Linear layers stay packed in memory (`packed_linear.Packed24Linear`, GPT-2's `Packed24Conv1D`), and so do
experts in one tensor (`packed_experts`); `save_pretrained` writes a packed folder again. `model.dequantize()`
makes all of it dense. `"semi_structured": true` in the `quantization_config` makes torch's semi-structured tensors of
linear layers instead, on CUDA (8.0 or more, 16 bits), which are faster from about a thousand rows on; experts are
unpacked then. Semi-structured tensors are not saved, nor are branches.

A packed weight lies under its own name, with half its inputs, beside `<name>_positions`: transformers without this
package raises on the shape, where an unknown quant_method alone would be a mere warning. Rounded values have their
scales in `<name>_scale`, and stay so in memory, whatever dtype the rest of the model is cast to.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers.quantizers.auto import AUTO_QUANTIZER_MAPPING, register_quantization_config, register_quantizer
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from sparseforge_ds.extras.packed24.packed_experts import Packed24Experts
from sparseforge_ds.packed_format.packed_values import GRIDS, SCALE, SCALE_DTYPES, Grid, bits_a_weight, require_grid
from sparseforge_ds.packed_format.packing import (
    PACKED24,
    PACKED24_FORMAT,
    POSITIONS,
    STORED_GRIDS,
    STORED_SCALES,
    has_packed_weights,
)


class Packed24Config(QuantizationConfigMixin):  # type: ignore[misc]  # transformers is untyped
    """The `quantization_config` of a packed folder.

    Args:
        format: version of the storage.
        semi_structured: on CUDA, unpack weights into torch's semi-structured sparse tensors where it has a kernel for
            them, and into dense ones elsewhere.
        low_rank: k of the low-rank branch of each layer that has one, by the layer's name.
        low_rank_learned: whether the folder has the projections P of these branches too.
        values: a key of `GRIDS` for rounded values; None for values in the model's dtype.
        group_size: with `values` int4 the kept values that share a scale; None for all of a row.
    """

    def __init__(
        self,
        format: int = PACKED24_FORMAT,
        semi_structured: bool = False,
        low_rank: dict[str, int] | None = None,
        low_rank_learned: bool = False,
        values: str | None = None,
        group_size: int | None = None,
        **more: Any,
    ) -> None:
        if format != PACKED24_FORMAT or not isinstance(semi_structured, bool) or set(more) - {"quant_method"}:
            raise ValueError(
                f"{PACKED24}: format {format!r} with {sorted(more)} is not what this version of sparseforge_ds reads "
                f"(format {PACKED24_FORMAT}); upgrade it, or export again"
            )
        self.quant_method = PACKED24
        self.format = format
        self.semi_structured = semi_structured
        self.low_rank = low_rank or {}
        self.low_rank_learned = low_rank_learned
        if not isinstance(self.low_rank, dict) or any(type(k) is not int or k < 1 for k in self.low_rank.values()):
            raise ValueError(f"{PACKED24}: low_rank {low_rank!r} is damaged; use names of layers and integers k >= 1")
        if not isinstance(low_rank_learned, bool):
            raise ValueError(f"{PACKED24}: low_rank_learned {low_rank_learned!r} is damaged; use true or false")
        require_grid(values, group_size)
        self.values = values
        self.group_size = group_size

    @property
    def grid(self) -> Grid | None:
        """Grid of rounded values, or None."""
        return require_grid(self.values, self.group_size)

    def to_dict(self) -> dict[str, Any]:
        """Return the content for config.json, without keys that older versions refuse and that say nothing here."""
        content = super().to_dict()
        return {
            key: value
            for key, value in content.items()
            if value or key not in ("low_rank_learned", "values", "group_size")
        }


class Packed24Quantizer(HfQuantizer):  # type: ignore[misc]  # transformers is untyped
    """Quantizer that puts packed layers into a model while transformers loads it."""

    requires_calibration = True  # there is no packing on the fly: `sparseforge export` does that
    _leaves = ("weight",)
    _files: tuple[str, ...] = ()
    _packed: frozenset[str] = frozenset()

    @property
    def parts(self) -> list[str]:
        """Suffixes of the tensors that are a packed weight."""
        return ["", POSITIONS, *([SCALE] if self.quantization_config.values else [])]

    @property
    def serialized_names(self) -> dict[str, list[str]]:
        """Names for a model's own conversions, like the merge of experts; see `get_load_operations`."""
        return {"weight": [f"weight{part}" for part in self.parts]}

    def get_load_operations(self) -> dict[str, Any]:
        """Return the operation that comes before a model's own conversions: unpacking."""
        return {"dequantize": _operation}

    def get_weight_conversions(self) -> list[Any]:
        """Return conversions of `weight` and its other parts to `weight`; one that is not packed passes through."""
        from sparseforge_ds.transformers_internals import WeightConverter

        return [
            WeightConverter([rf"\.{leaf}{part}$" for part in self.parts], f".{leaf}", [_operation(self)])
            for leaf in self._leaves
        ]

    def get_new_dtype(self, converter: Any, param: Any, dtype: torch.dtype | None) -> torch.dtype | None:
        """Return the dtype that a tensor of the files is cast to; None for rounded values and scales, which are not."""
        if values := self.quantization_config.values:
            stored = param.get_dtype() if hasattr(param, "get_dtype") else param.dtype
            if stored in (STORED_GRIDS[values], GRIDS[values]):
                return None
            # Names are loaded in order, so that scales come behind the positions of their weight.
            behind = any(POSITIONS in pattern for pattern in getattr(converter, "collected_tensors", ()))
            alone = any(getattr(step, "of_scales", False) for step in getattr(converter, "operations", ()))
            if stored in (STORED_SCALES[values], SCALE_DTYPES[GRIDS[values]]) and (behind or alone):
                return None
        new_dtype: torch.dtype | None = super().get_new_dtype(converter, param, dtype)
        return new_dtype

    def validate_environment(self, *args: Any, device_map: Any = None, **kwargs: Any) -> None:
        """Reject a `device_map` with parts on disk, where transformers cannot write all packed weights."""
        if isinstance(device_map, dict) and "disk" in device_map.values():
            raise ValueError(
                f"{PACKED24}: device_map puts {list(device_map.values()).count('disk')} of the model's modules on "
                'disk, where transformers cannot store packed weights; map them to "cpu", or raise max_memory'
            )

    def param_element_size(self, model: Any, param_name: str, param: torch.Tensor) -> float:
        """Return the bytes per element that a weight will take once it is loaded; the layer is still dense here.

        transformers adds them up for `device_map="auto"`, and for the memory that it reserves on a GPU before it loads.
        """
        if param_name not in self._packed:
            return param.element_size()
        grid = self.quantization_config.grid
        return param.element_size() / 2 + 1 / 8 if grid is None else bits_a_weight(grid) / 8

    def update_weight_conversions(self, weight_conversions: list[Any], model: Any) -> list[Any]:
        """Check the files' headers, and choose how experts are merged.

        Those that stay packed are merged as dense ones are, all others after a step that unpacks.
        """
        from sparseforge_ds.extras.packed24.file_headers import check_headers, read_headers
        from sparseforge_ds.extras.packed24.merged_experts import keep_experts
        from sparseforge_ds.extras.packed24.unpacking import is_replaced
        from sparseforge_ds.model.loading_targets import Targets

        headers = read_headers(self._files)
        targets = Targets(model, weight_conversions)
        check_headers(model, headers, targets, self.quantization_config.grid)
        if self.quantization_config.semi_structured:
            return list(super().update_weight_conversions(weight_conversions, model))
        weights = (targets.find(key.removesuffix(POSITIONS))[0] for key in headers if key.endswith(POSITIONS))
        self._packed = frozenset(weights) & {
            f"{name}.weight" for name, layer in model.named_modules() if is_replaced(layer)
        }
        kept, rest = keep_experts(model, headers, targets, weight_conversions, self.quantization_config.grid)
        return [*kept, *super().update_weight_conversions(rest, model)]

    def _process_model_before_weight_loading(self, model: Any, **kwargs: Any) -> Any:
        """Note the names of matrices, `weight` except in fused experts, and add branches."""
        self._files = tuple(kwargs.get("checkpoint_files") or ())
        self._leaves = tuple(sorted({name.rpartition(".")[2] for name, p in model.named_parameters() if p.ndim > 1}))
        from sparseforge_ds.extras.packed24.file_headers import collect_damage
        from sparseforge_ds.model.branch import add_branch

        collect_damage(model)
        config = self.quantization_config
        for name, k in config.low_rank.items():
            try:
                add_branch(model.get_submodule(name), k, config.low_rank_learned).enabled = True
            except AttributeError as error:
                raise ValueError(
                    f"{PACKED24}: low_rank names {name}, no linear layer of this model ({error})"
                ) from None
        return model

    def _process_model_after_weight_loading(self, model: Any, **kwargs: Any) -> Any:
        """Reject damaged weights, and keep saving from undoing the conversion.

        A model without packed weights and branches becomes an ordinary one.

        Raises:
            ValueError: positions are damaged; the message names the first weight.
        """
        from sparseforge_ds.extras.packed24.file_headers import require_sound

        require_sound(model)
        ours = type(_operation(self))
        model._weight_conversions = [
            conversion
            for conversion in model._weight_conversions or []
            if not any(isinstance(operation, ours) for operation in getattr(conversion, "operations", ()))
        ]
        branched = bool(self.quantization_config.low_rank)
        if not branched and not any(has_packed_weights(module) or _is_sparse(module) for module in model.modules()):
            self.remove_quantization_config(model)
            for module in model.modules():
                if getattr(getattr(module, "config", None), "_is_quantized", False):
                    module.config._is_quantized = False
        return model

    def dequantize(self, model: Any, dtype: torch.dtype | str | None = None) -> Any:
        """Make the model dense, and cast all of it to `dtype` unless that is None.

        transformers' own method would give the config's dtype to the unpacked weights only.
        """
        model = self._dequantize(model)
        self.remove_quantization_config(model)
        return model if dtype is None else model.to(getattr(torch, dtype) if isinstance(dtype, str) else dtype)

    def _dequantize(self, model: Any, dtype: torch.dtype | None = None) -> Any:
        if self.quantization_config.low_rank:
            raise ValueError(
                f"{PACKED24}: this model has low-rank branches, without which its weights are useless; a folder for "
                "other tools is what `sparseforge export FOLDER OUT --format hf` writes"
            )
        self.make_dense(model)
        for module in model.modules():
            if getattr(getattr(module, "config", None), "_is_quantized", False):
                module.config._is_quantized = False
        return model

    def make_dense(self, model: Any) -> None:
        """Turn packed and semi-structured layers of a model into dense ones, in memory; branches stay."""
        from sparseforge_ds.model.branch import Branch, add_branch

        dtype = _dtype(model)
        for name, module in list(model.named_modules()):
            if isinstance(module, Packed24Experts):
                module.make_dense(dtype)
            elif has_packed_weights(module):
                dense = module.dense(dtype)
                if isinstance(module, Branch):
                    add_branch(dense, module.k, like=module).enabled = module.enabled
                model.set_submodule(name, dense)
            elif _is_sparse(module):
                module.weight = nn.Parameter(module.weight.to_dense(), requires_grad=True)

    def is_serializable(self) -> bool:
        """Return False for semi-structured tensors and branches, so that transformers refuses to save them."""
        return not self.quantization_config.semi_structured and not self.quantization_config.low_rank

    @property
    def is_compileable(self) -> bool:
        """True if `generate` may compile decoding with a static cache: packed products are operators of their own."""
        return not self.quantization_config.semi_structured

    @property
    def is_trainable(self) -> bool:
        """True if adapters on packed layers may train; without one, transformers' Trainer refuses."""
        return not self.quantization_config.semi_structured


def _dtype(model: Any) -> torch.dtype:
    """Return the dtype that a model computes in: of its first floating-point parameter that is not rounded."""
    floats = (parameter.dtype for parameter in model.parameters() if parameter.is_floating_point())
    return next((dtype for dtype in floats if dtype not in GRIDS.values()), torch.float32)


def _is_sparse(module: nn.Module) -> bool:
    from torch.sparse import SparseSemiStructuredTensor

    weight = getattr(module, "weight", None)
    return isinstance(module, nn.Linear) and isinstance(
        weight.data if isinstance(weight, nn.Parameter) else weight, SparseSemiStructuredTensor
    )


def _operation(quantizer: Packed24Quantizer) -> Any:
    """Return the step of transformers' loader that unpacks.

    Its class is imported here, since the loader imports this file first.
    """
    from sparseforge_ds.extras.packed24.unpacking import Unpack24

    return Unpack24(quantizer.quantization_config.semi_structured)


def register_format() -> None:
    """Make `from_pretrained` of transformers know packed24; a further call changes nothing."""
    if PACKED24 not in AUTO_QUANTIZER_MAPPING:
        register_quantization_config(PACKED24)(Packed24Config)
        register_quantizer(PACKED24)(Packed24Quantizer)
