"""Checks of the "optimizer" of a DeepSpeed JSON: its class, its parameters, and the ZeRO stage."""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping
from typing import Any

import torch
from deepspeed.ops.adagrad import DeepSpeedCPUAdagrad
from deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam
from deepspeed.ops.lamb import FusedLamb
from deepspeed.ops.lion import DeepSpeedCPULion, FusedLion
from deepspeed.runtime.config import DEEPSPEED_OPTIMIZERS
from deepspeed.runtime.zero.utils import ZERO_SUPPORTED_OPTIMIZERS

from sparseforge_ds.config.deepspeed_keys import without_autos
from sparseforge_ds.config.strict import LARGEST, LARGEST_RATE, nearest

_SWITCHES = ("torch_adam", "adam_w_mode", "fp32_optimizer_states")
"""Parameters of Adam that DeepSpeed uses itself, and does not pass on."""
MUON_RATES = ("muon_lr", "adam_lr")
"""Rates of the two kinds of weights under DeepSpeed's Muon, each in place of `lr`: matrices of blocks, and the rest."""
_RATES = ("lr", *MUON_RATES)
_NUMBERS = (*_RATES, "eps", "weight_decay", "momentum")
"""Parameters that must be numbers >= 0."""
_BY_DEEPSPEED = ("muon", "onebitadam", "onebitlamb", "zerooneadam")
"""Optimizers, in lower case, whose parameters are left to DeepSpeed."""
_USE = 'use {"type": "AdamW", "params": {"lr": "auto"}}'


def check_optimizer(content: Mapping[str, Any]) -> None:
    """Check the optimizer of a configuration. Parameters that are "auto" are filled later, and not checked.

    Raises:
        ValueError: the optimizer is unknown, has a parameter that it does not take, or cannot work under ZeRO.
    """
    # 1. Types and values, which hold for every optimizer.
    optimizer = content.get("optimizer", {})
    name = optimizer.get("type")
    raw_params = optimizer.get("params", {})
    if name is None:
        raise ValueError('no "optimizer" in the DeepSpeed JSON; add {"type": "AdamW", "params": {"lr": "auto"}}')
    if not isinstance(name, str):
        raise ValueError(f"optimizer.type = {json.dumps(name)}: expected a string; {_USE}")
    if not isinstance(raw_params, dict):
        raise ValueError(f'optimizer.params = {json.dumps(raw_params)}: expected an object, like {{"lr": "auto"}}')
    params = without_autos(raw_params)
    _check_values(params)
    if name.lower() == "muon":
        _check_muon_rates(params)
    # 2. The class that DeepSpeed would take, and the names of its parameters.
    zero = content.get("zero_optimization", {})
    stage = int(zero.get("stage", 0))
    offload = zero.get("offload_optimizer")
    on_host = isinstance(offload, dict) and offload.get("device", "none") != "none"
    if name.lower() in _BY_DEEPSPEED:
        return  # `zero.refuse` says why not
    kind = _optimizer_class(name, params, on_host)
    _check_names(name, kind, raw_params)
    # 3. What ZeRO makes of it.
    if stage and kind not in ZERO_SUPPORTED_OPTIMIZERS and not content.get("zero_allow_untested_optimizer", False):
        raise ValueError(
            f'optimizer.type = "{name}": ZeRO stage {stage} was not made for it; {_USE}, or set '
            '"zero_allow_untested_optimizer": true to try'
        )
    if stage and kind in (torch.optim.Adagrad, DeepSpeedCPUAdagrad):
        raise ValueError(
            f'optimizer.type = "{name}": ZeRO puts another one in its place, past the step hooks that publish masks; '
            f"{_USE}, or stage 0"
        )
    if not stage and kind.__name__ == "Adafactor":  # under ZeRO weights are flat, and it keeps a number for each
        raise ValueError(
            f'optimizer.type = "{name}": keeps sums of rows and columns, which cannot be cut into shards; {_USE}'
        )
    if issubclass(kind, torch.optim.Optimizer) and kind.__module__.startswith("torch."):
        _check_made(name, kind, params)


def has_rates_of_muon(params: Mapping[str, Any]) -> bool:
    """Return True if both rates of Muon are given, so that nothing trains at `lr`."""
    return all(key in params for key in MUON_RATES)


def default_params(optimizer: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of parameters that a checked optimizer does not name; none where they are DeepSpeed's."""
    name = optimizer["type"]
    if name.lower() in _BY_DEEPSPEED:
        return {}
    parameters = inspect.signature(_optimizer_class(name, optimizer["params"], on_host=False)).parameters
    defaults = {key: taken.default for key, taken in parameters.items() if taken.default is not taken.empty}
    return {key: list(value) if isinstance(value, tuple) else value for key, value in defaults.items()}


def has_weight_decay(name: str) -> bool:
    """Return False for an optimizer of torch that takes no weight decay, like Rprop."""
    kind = getattr(torch.optim, name, None)
    return not isinstance(kind, type) or "weight_decay" in inspect.signature(kind).parameters


def _optimizer_class(name: str, params: Mapping[str, Any], on_host: bool) -> type:
    """Return the class that DeepSpeed takes for a name; `on_host` says that the optimizer is offloaded."""
    lower = name.lower()
    if lower in ("adam", "adamw"):
        if params.get("torch_adam", False):
            return torch.optim.AdamW if lower == "adamw" or params.get("adam_w_mode", True) else torch.optim.Adam
        return DeepSpeedCPUAdam if on_host else FusedAdam
    classes: dict[str, type] = {
        "adagrad": DeepSpeedCPUAdagrad if on_host else torch.optim.Adagrad,
        "lamb": FusedLamb,
        "lion": DeepSpeedCPULion if on_host else FusedLion,
    }
    if lower in classes:
        return classes[lower]
    if lower in DEEPSPEED_OPTIMIZERS:
        raise ValueError(f'optimizer.type = "{name}" scales its steps by the width of layers, by mup; {_USE}')
    kind = getattr(torch.optim, name, None)
    if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer) and kind is not torch.optim.Optimizer:
        return kind
    # Neither has it: suggest the most similar name of both.
    known = ["Adam", "AdamW", "Adagrad", "Lamb", "Lion"]
    known += [attribute for attribute in dir(torch.optim) if isinstance(getattr(torch.optim, attribute), type)]
    near = nearest(name, (candidate for candidate in known if candidate not in ("Optimizer", "Muon")))
    cure = f'did you mean "{near}"?' if near else _USE
    raise ValueError(f'optimizer.type = "{name}": DeepSpeed has no such optimizer; {cure}')


def _check_values(params: Mapping[str, Any]) -> None:
    # Rates, decays and epsilons.
    for key in _NUMBERS:
        value = params.get(key, 0)
        if not isinstance(value, (int, float)) or isinstance(value, bool):
            raise ValueError(f'optimizer.params.{key} = {json.dumps(value)}: expected a number, or "auto"')
        most = LARGEST_RATE if key in _RATES else LARGEST
        if not 0 <= value <= most:
            raise ValueError(
                f"optimizer.params.{key} = {json.dumps(value)} is not valid: use a number >= 0, at most {most:g}"
            )
    # Decay rates of the two moments.
    betas = params.get("betas", [0.9, 0.999])
    if not (
        isinstance(betas, list)
        and len(betas) == 2
        and all(isinstance(beta, (int, float)) and not isinstance(beta, bool) and 0 <= beta < 1 for beta in betas)
    ):
        raise ValueError(
            f"optimizer.params.betas = {json.dumps(betas)} is not valid: use two numbers, each 0 <= beta < 1"
        )
    # Switches, which null leaves to the optimizer.
    for key in (*_SWITCHES, "fused", "foreach", "amsgrad", "bias_correction"):
        value = params.get(key)
        if value is not None and not isinstance(value, bool):
            raise ValueError(f"optimizer.params.{key} = {json.dumps(value)}: expected true or false")


def _check_muon_rates(params: Mapping[str, Any]) -> None:
    """Refuse an `lr` that no weight trains at, and a rate of 0 for the matrices, of which `adam_lr` is a share."""
    if "lr" in params and has_rates_of_muon(params):
        raise ValueError(
            f"optimizer.params.lr = {json.dumps(params['lr'])} has no effect: matrices train at muon_lr, and all else "
            "at adam_lr; leave one of the three out"
        )
    key = "muon_lr" if "muon_lr" in params else "lr"
    if params.get(key) == 0:
        raise ValueError(f"optimizer.params.{key} = 0: no matrix would be trained; use a number > 0")


def _check_names(name: str, kind: type, params: Mapping[str, Any]) -> None:
    """Refuse parameters that the class does not take, by its signature: its constructor may compile for minutes."""
    taken = [*inspect.signature(kind).parameters][1:]
    if name.lower() in ("adam", "adamw"):
        taken = [key for key in taken if key not in ("adamw_mode", "adam_w_mode")] + list(_SWITCHES)
    for key in params:
        if key in taken:
            continue
        if key == "max_grad_norm":
            raise ValueError('optimizer.params.max_grad_norm: use the key "gradient_clipping" beside "optimizer"')
        hint = f"did you mean {near}?" if (near := nearest(key, taken)) else f"known are {', '.join(taken)}"
        if name.lower() in ("adam", "adamw") and key in inspect.signature(torch.optim.AdamW).parameters:
            hint = 'it belongs to torch\'s AdamW; add "torch_adam": true'
        raise ValueError(f"optimizer.params.{key}: {kind.__name__} has no such parameter; {hint}")


def _check_made(name: str, kind: type, params: Mapping[str, Any]) -> None:
    """Refuse values that the constructor of an optimizer of torch refuses."""
    arguments = {key: value for key, value in params.items() if key not in _SWITCHES}
    param_groups = [{"params": [torch.zeros(2, 2, requires_grad=True)]} for _ in range(2)]
    try:
        kind(param_groups, **arguments)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f'optimizer.params of "{name}": {" ".join(str(error).split())}') from None
