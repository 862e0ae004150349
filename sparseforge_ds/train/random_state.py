"""The random number generators of one process, as a JSON file beside DeepSpeed's files: every rank has its own.

The states fit the number of ranks that saved them; another number of ranks starts from new seeds.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import torch
from deepspeed.accelerator import get_accelerator
from torch import Tensor
from transformers import set_seed


def seed_anew(seed: int, step: int, rank: int) -> None:
    """Seed every generator for a run that goes on at `step` on another number of ranks: no number is drawn twice."""
    set_seed(int(np.random.SeedSequence([seed, step, rank]).generate_state(1)[0]))


def random_state() -> dict[str, Any]:
    """Return the state of every generator of this process, as plain JSON types."""
    accelerator = get_accelerator()
    kind = accelerator.device_name().split(":")[0]
    name, keys, *rest = np.random.get_state(legacy=True)
    return {
        "python": random.getstate(),
        "numpy": [name, np.asarray(keys).tolist(), *rest],
        "torch": torch.get_rng_state().tolist(),
        "accelerator": [kind, None if kind == "cpu" else accelerator.get_rng_state().tolist()],
    }


def set_random_state(state: dict[str, Any]) -> None:
    """Restore a state of `random_state`; on another kind of accelerator its generator stays as it is.

    Raises:
        ValueError: the state was not made by `random_state`.
    """
    try:
        version, internal, gauss = state["python"]
        random.setstate((version, tuple(internal), gauss))
        name, keys, *rest = state["numpy"]
        np.random.set_state((name, np.array(keys, dtype=np.uint32), *rest))
        torch.set_rng_state(_bytes(state["torch"]))
        _, content = state["accelerator"]
        if content is not None and fits_accelerator(state):
            get_accelerator().set_rng_state(_bytes(content))
    except (LookupError, TypeError, ValueError, OverflowError, RuntimeError) as error:
        raise ValueError(
            f"not the state of this version's random number generators ({error!r:.200}); use another checkpoint"
        ) from None


def fits_accelerator(state: dict[str, Any]) -> bool:
    """Return whether the state was taken on the kind of accelerator that this process has."""
    return bool(state["accelerator"][0] == get_accelerator().device_name().split(":")[0])


def read_random_state(path: Path) -> dict[str, Any]:
    """Read a state of `random_state` from its file.

    Raises:
        ValueError: the file is missing or damaged.
    """
    try:
        state: dict[str, Any] = json.loads(path.read_text())
        fits_accelerator(state)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{path}: holds no random number generators ({error!r:.200}); use another checkpoint"
        ) from None
    return state


def _bytes(numbers: list[int]) -> Tensor:
    return torch.tensor(numbers, dtype=torch.uint8)
