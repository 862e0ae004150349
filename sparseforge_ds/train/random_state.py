"""The random number generators of one process, as a small JSON file beside DeepSpeed's files.

Every rank has a file of its own, `random_00003.json`: numbers as numbers, byte tensors in base64, no pickle. The states
fit the number of ranks that saved them; another number of ranks starts from new seeds.
"""

from __future__ import annotations

import base64
import binascii
import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import torch
from deepspeed.accelerator import get_accelerator
from torch import Tensor


def random_file(rank: int) -> str:
    """Name of a rank's file."""
    return f"random_{rank:05d}.json"


def seed_everything(seed: int) -> None:
    """Seed every generator of this process."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
    get_accelerator().manual_seed_all(seed)


def seed_anew(seed: int, step: int, rank: int) -> None:
    """Seed every generator for a run that goes on at `step` on other ranks than before: nothing is drawn twice."""
    seed_everything(int(np.random.SeedSequence([seed, step, rank]).generate_state(1, np.uint64)[0] >> 1))


def random_state() -> dict[str, Any]:
    """Every generator of this process, as plain JSON types."""
    version, internal, gauss = random.getstate()
    name, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    accelerator = get_accelerator()
    on_host = accelerator.device_name() == "cpu"
    return {
        "python": [version, list(internal), gauss],
        "numpy": [str(name), [int(key) for key in keys], int(position), int(has_gauss), float(cached)],
        "torch": _to_text(torch.get_rng_state()),
        "accelerator": [
            accelerator.device_name().split(":")[0],
            None if on_host else _to_text(accelerator.get_rng_state()),
        ],
    }


def set_random_state(state: dict[str, Any]) -> None:
    """Inverse of `random_state`; on another kind of accelerator its generator stays as it is.

    Raises:
        ValueError: the state was not made by `random_state`.
    """
    try:
        version, internal, gauss = state["python"]
        random.setstate((version, tuple(internal), gauss))
        name, keys, position, has_gauss, cached = state["numpy"]
        np.random.set_state((name, np.array(keys, dtype=np.uint32), position, has_gauss, cached))
        torch.set_rng_state(_to_bytes(state["torch"]))
        kind, content = state["accelerator"]
        if content is not None and fits_accelerator(state):
            get_accelerator().set_rng_state(_to_bytes(content))
    except (LookupError, TypeError, ValueError, OverflowError, RuntimeError, binascii.Error) as error:
        raise ValueError(f"not the state of this version's random number generators ({error!r:.200})") from None


def fits_accelerator(state: dict[str, Any]) -> bool:
    """Whether the state was taken on the kind of accelerator that this process has."""
    return bool(state["accelerator"][0] == get_accelerator().device_name().split(":")[0])


def read_random_state(path: Path) -> dict[str, Any]:
    """What `random_state` was when the file was written.

    Raises:
        ValueError: the file is missing or damaged.
    """
    try:
        state = json.loads(path.read_text())
        if not isinstance(state, dict) or not isinstance(state["accelerator"], list):
            raise TypeError("no object with the states of generators")
    except (OSError, UnicodeDecodeError, json.JSONDecodeError, KeyError, TypeError) as error:
        raise ValueError(
            f"{path}: holds no random number generators ({error!r:.200}); use another checkpoint"
        ) from None
    return state


def _to_text(state: Tensor) -> str:
    return base64.b64encode(state.cpu().numpy().tobytes()).decode("ascii")


def _to_bytes(text: str) -> Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text, validate=True)), dtype=torch.uint8)
