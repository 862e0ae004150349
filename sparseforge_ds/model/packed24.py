"""Loading what `sparseforge export --format packed24` writes, by transformers' own `from_pretrained`.

    import sparseforge_ds
    model = AutoModelForCausalLM.from_pretrained("models/qwen3_14b_packed24")

On the CPU, and wherever 2:4 tensor cores cannot take a layer, its weight is unpacked on load: the model is then an
ordinary dense one, of which `save_pretrained` writes an ordinary folder. On CUDA (compute capability 8.0 or more, fp16
or bf16, `device_map="cuda"`) the weight of an nn.Linear becomes torch's semi-structured sparse tensor; then
`save_pretrained` refuses, and `model.dequantize()` makes it dense.

Low-rank branches (`low_rank` of the quantization_config) are B alone, beside the weights: their layers get the class of
`model.branch`, which computes the sums of inputs. Such a model is not saved by `save_pretrained`, whose folder would
not say that there are branches.

A packed weight lies under its own name, with half its inputs, beside `<name>_positions`. That is what makes
transformers without this package fail: it ignores a quant_method that it does not know with a mere warning, but raises
on a shape that is not the model's.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers.quantizers.auto import AUTO_QUANTIZER_MAPPING, register_quantization_config, register_quantizer
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from sparseforge_ds.mask.packing import PACKED24, PACKED24_FORMAT, POSITIONS


class Packed24Config(QuantizationConfigMixin):  # type: ignore[misc]  # transformers is untyped
    """The `quantization_config` of a packed folder.

    Args:
        format: version of the storage.
        semi_structured: on CUDA, keep weights as torch's semi-structured sparse tensors; false: unpack everywhere.
        low_rank: k of the low-rank branch of each layer that has one, by the layer's name.

    Raises:
        ValueError: a format that this version does not know.
    """

    def __init__(
        self,
        format: int = PACKED24_FORMAT,
        semi_structured: bool = True,
        low_rank: dict[str, int] | None = None,
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
        if not isinstance(self.low_rank, dict) or any(type(k) is not int or k < 1 for k in self.low_rank.values()):
            raise ValueError(f"{PACKED24}: low_rank {low_rank!r} is damaged; use names of layers and integers k >= 1")


class Packed24Quantizer(HfQuantizer):  # type: ignore[misc]  # transformers is untyped
    """Unpacks weights while transformers loads them."""

    requires_calibration = True  # there is no packing on the fly: `sparseforge export` does that
    serialized_names = {"weight": ["weight", f"weight{POSITIONS}"]}
    """For a model's own conversions, like the merge of experts; see `get_load_operations`."""
    _leaves = ("weight",)

    def get_load_operations(self) -> dict[str, Any]:
        """Before a model's own conversions: unpacking comes first."""
        return {"dequantize": _operation}

    def get_weight_conversions(self) -> list[Any]:
        """`weight` and `weight_positions` become `weight`; a weight that is not packed is passed through."""
        from transformers.core_model_loading import WeightConverter

        return [
            WeightConverter([rf"\.{leaf}$", rf"\.{leaf}{POSITIONS}$"], f".{leaf}", [_operation(self)])
            for leaf in self._leaves
        ]

    def _process_model_before_weight_loading(self, model: Any, **kwargs: Any) -> Any:
        """Matrices are called `weight` in most layers; fused experts have other names. Branches are added."""
        self._leaves = tuple(sorted({name.rpartition(".")[2] for name, p in model.named_parameters() if p.ndim > 1}))
        from sparseforge_ds.model.branch import add_branch

        for name, k in self.quantization_config.low_rank.items():
            try:
                add_branch(model.get_submodule(name), k).enabled = True
            except AttributeError as error:
                raise ValueError(
                    f"{PACKED24}: low_rank names {name}, no linear layer of this model ({error})"
                ) from None
        return model

    def _process_model_after_weight_loading(self, model: Any, **kwargs: Any) -> Any:
        """Nothing of the packing is left in a dense model without branches: it may be saved, trained, and quantized."""
        ours = type(_operation(self))
        model._weight_conversions = [
            conversion
            for conversion in model._weight_conversions or []
            if not any(isinstance(operation, ours) for operation in getattr(conversion, "operations", ()))
        ]
        branched = bool(self.quantization_config.low_rank)
        if not branched and not any(_is_sparse(parameter) for parameter in model.parameters()):
            self.remove_quantization_config(model)
            for module in model.modules():
                if getattr(getattr(module, "config", None), "_is_quantized", False):
                    module.config._is_quantized = False
        return model

    def _dequantize(self, model: Any, dtype: torch.dtype | None = None) -> Any:
        if self.quantization_config.low_rank:
            raise ValueError(
                f"{PACKED24}: this model has low-rank branches, without which its weights are useless; a folder for "
                "other tools is what `sparseforge export FOLDER OUT --format hf` writes"
            )
        for module in model.modules():
            if isinstance(module, nn.Linear) and _is_sparse(module.weight):
                module.weight = nn.Parameter(module.weight.to_dense().to(dtype), requires_grad=True)
        return model

    def is_serializable(self) -> bool:
        """Semi-structured tensors and branches are not saved: transformers raises."""
        return False

    @property
    def is_trainable(self) -> bool:
        """Semi-structured weights have no gradient, and a trained branch could not be saved."""
        return False


def _is_sparse(parameter: Tensor) -> bool:
    from torch.sparse import SparseSemiStructuredTensor

    return isinstance(parameter, SparseSemiStructuredTensor) or isinstance(parameter.data, SparseSemiStructuredTensor)


def _operation(quantizer: Packed24Quantizer) -> Any:
    """The step of transformers' loader that unpacks; its class is made here, as this file is imported by a part of
    transformers that the loader itself needs."""
    from sparseforge_ds.model.packed24_loading import Unpack24

    return Unpack24(quantizer.quantization_config.semi_structured)


if PACKED24 not in AUTO_QUANTIZER_MAPPING:  # a reload is no error
    register_quantization_config(PACKED24)(Packed24Config)
    register_quantizer(PACKED24)(Packed24Quantizer)
