"""Operator `sparseforge::linear24` of torch: the product with a 2:4 weight that stays packed.

Each device has its kernels. On the CPU, the first call loads a C++ library (`cpu_kernel`), which torch then calls
without Python. NVIDIA's GPUs have a kernel for few rows (`mma_kernel`), and all GPUs a Triton kernel for the rest
(`triton_kernel`). Other devices have the reference, which unpacks the weight at each call. The operator is opaque to
torch.compile. Under autocast its inputs are cast as those of nn.functional.linear.
"""

from __future__ import annotations

import logging
import os
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from sparseforge_ds.extras.packed24.cpu_kernel import load_cpu_kernel
from sparseforge_ds.extras.packed24.mma_kernel import mma24
from sparseforge_ds.extras.packed24.operands import require_operands
from sparseforge_ds.packed_format.packed_values import dense_inputs
from sparseforge_ds.packed_format.packing import VALUE_DTYPES, unpack24

_LOGGER = logging.getLogger(__name__)


@torch.library.custom_op("sparseforge::linear24", mutates_args=())
def linear24(
    x: Tensor, values: Tensor, positions: Tensor, bias: Tensor | None = None, scale: Tensor | None = None
) -> Tensor:
    """Compute `nn.functional.linear` with a weight that `pack24` has packed along its last axis.

    Positions are not checked for damage at each call, but once when they are loaded.

    Args:
        x: (..., in), of any strides.
        values: (out, in/2), the kept values, in the dtype of `x`; with `scale` int8 without -128, or float8_e4m3fn, or
            (out, in/4) uint8, two int4 without -8.
        positions: (out, ceil(in/8)), uint8, where they belong.
        bias: (out,), in the dtype of `x`.
        scale: (out, 1), fp32, by which the sums of 8-bit values are multiplied; (out, groups), bf16, by which int4 is,
            groups being of a multiple of 16 values, or 1; None for values without.

    Returns:
        (..., out) in the dtype of `x`. Its gradient goes to `x` and to `bias`; a packed weight has none.

    Raises:
        ValueError: shapes, dtypes or devices do not belong together, or a dtype is none of a packed weight.
    """
    require_operands("linear24", x, values, positions, bias, scale=scale)
    if x.device.type == "cpu" and load_cpu_kernel():
        result: Tensor = linear24(x, values, positions, bias, scale)  # the C++ kernel has replaced this function
        return result
    note_exact_inputs()
    return reference24(x, values, positions, bias, scale)


@cache
def note_exact_inputs() -> None:
    """Say once that a wish for rounded inputs is one for the kernel on CPUs, where somebody has it."""
    if wish := os.environ.get("SPARSEFORGE_CPU_ACTIVATIONS"):
        _LOGGER.warning(
            "linear24: SPARSEFORGE_CPU_ACTIVATIONS=%s: only the kernel for CPUs rounds inputs, and it does not run "
            "here; these products take them as they are",
            wish,
        )


def reference24(x: Tensor, values: Tensor, positions: Tensor, bias: Tensor | None, scale: Tensor | None) -> Tensor:
    """Return what every kernel computes, up to rounding: unpack the weight and multiply."""
    return torch.nn.functional.linear(x, unpack24(values, positions, scale, x.dtype), bias)


def linear24_on_gpu(
    x: Tensor, values: Tensor, positions: Tensor, bias: Tensor | None = None, scale: Tensor | None = None
) -> Tensor:
    """Compute `linear24` on NVIDIA's and AMD's GPUs, which are both "cuda" to torch, by the fastest kernel."""
    require_operands("linear24", x, values, positions, bias, scale=scale)
    note_exact_inputs()
    product = mma24(x, values, positions, bias, scale)
    if product is not None:
        return product
    kernels = triton_kernels() if x.dtype in TRITON_DTYPES else None
    if kernels is None:
        return reference24(x, values, positions, bias, scale)
    result: Tensor = kernels.triton24(x, values, positions, bias, scale)
    return result


TRITON_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@cache
def triton_kernels() -> Any:
    """Import `triton_kernel`, or warn once and return None if Triton is missing.

    CUDA and ROCm builds of torch bring Triton along.
    """
    if find_spec("triton") is None:
        _LOGGER.warning(
            "linear24: triton is not installed, so every product with a packed weight unpacks the whole weight first, "
            "which is slower than a dense layer; pip install triton"
        )
        return None
    return import_module("sparseforge_ds.extras.packed24.triton_kernel")


def _fake(
    x: Tensor, values: Tensor, positions: Tensor, bias: Tensor | None = None, scale: Tensor | None = None
) -> Tensor:
    require_operands("linear24", x, values, positions, bias, scale=scale)
    return x.new_empty((*x.shape[:-1], values.shape[0]))


@torch.library.custom_op("sparseforge::linear24_with_gradient", mutates_args=())
def _with_gradient(
    x: Tensor, values: Tensor, positions: Tensor, bias: Tensor | None = None, scale: Tensor | None = None
) -> Tensor:
    """Compute `linear24` with autograd; the C++ kernel calls it when a gradient is needed."""
    result: Tensor = linear24(x, values, positions, bias, scale)
    return result


@torch.library.custom_op("sparseforge::linear24_input_gradient", mutates_args=())
def _input_gradient(gradient: Tensor, values: Tensor, positions: Tensor, scale: Tensor | None = None) -> Tensor:
    """Return the gradient (..., in) of `linear24`'s x for that of its outputs, (..., out)."""
    require_operands("linear24_input_gradient", gradient, values, positions, scale=scale, backward=True)
    return gradient @ unpack24(values, positions, scale, gradient.dtype)


@_input_gradient.register_fake
def _(gradient: Tensor, values: Tensor, positions: Tensor, scale: Tensor | None = None) -> Tensor:
    require_operands("linear24_input_gradient", gradient, values, positions, scale=scale, backward=True)
    return gradient.new_empty((*gradient.shape[:-1], dense_inputs(values)))


def _keep_for_backward(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, values, positions, bias, scale = inputs
    if values.requires_grad or (scale is not None and scale.requires_grad):
        raise ValueError(
            "linear24: a packed 2:4 weight cannot be trained; make the model dense by model.dequantize(), or train a "
            "low-rank adapter on top of it"
        )
    ctx.save_for_backward(values, positions, *(() if scale is None else (scale,)))
    ctx.has_bias = bias is not None


def _backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, None, None, Tensor | None, None]:
    """Return the gradients of x and of the bias."""
    to_x = _input_gradient(gradient, *ctx.saved_tensors) if ctx.needs_input_grad[0] else None
    to_bias = gradient.reshape(-1, gradient.shape[-1]).sum(0) if ctx.has_bias and ctx.needs_input_grad[3] else None
    return to_x, None, None, to_bias, None


for _operator in (linear24, _with_gradient):
    _operator.register_fake(_fake)
    _operator.register_autograd(_backward, setup_context=_keep_for_backward)


def _refuse(x: Tensor, values: Tensor, positions: Tensor, bias: Tensor | None, scale: Tensor | None) -> None:
    require_operands("linear24", x, values, positions, bias, scale=scale)


_CAST_DTYPES = tuple(dtype for dtype in VALUE_DTYPES if dtype != torch.float64)
"""Dtypes that autocast casts: torch leaves float64 alone, and the operator refuses what no packed weight has."""


def _autocast(device: str) -> None:
    """Cast inputs under autocast to its current dtype; torch's `register_autocast` would fix one dtype."""
    keys = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, f"Autocast{device.upper()}"))

    def cast_inputs(
        x: Tensor, values: Tensor, positions: Tensor, bias: Tensor | None = None, scale: Tensor | None = None
    ) -> Tensor:
        dtype = torch.get_autocast_dtype(device)
        x = x.to(dtype) if x.dtype in _CAST_DTYPES else x
        values = values.to(dtype) if values.dtype in _CAST_DTYPES else values
        bias = bias.to(dtype) if bias is not None and bias.dtype in _CAST_DTYPES else bias
        with torch._C._ExcludeDispatchKeyGuard(keys):
            result: Tensor = linear24(x, values, positions, bias, scale)
            return result

    _LIBRARY.impl("linear24", cast_inputs, f"Autocast{device.upper()}")


_LIBRARY = torch.library.Library("sparseforge", "FRAGMENT")
# The C++ kernel calls it when its own comparisons fail, so that every device has the same messages.
_LIBRARY.define("linear24_refused(Tensor x, Tensor values, Tensor positions, Tensor? bias, Tensor? scale) -> ()")
_LIBRARY.impl("linear24_refused", _refuse, "CompositeImplicitAutograd")
# `register_kernel` would add its own checks to each call, and keep the compiler out as well.
_LIBRARY.impl("linear24", torch.compiler.disable(linear24_on_gpu), "CUDA")
for _device in ("cpu", "cuda"):
    _autocast(_device)
