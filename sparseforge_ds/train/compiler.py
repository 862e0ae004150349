"""Whether torch.compile works here: on GPUs the mask is moved by what it makes."""

from __future__ import annotations

import subprocess

import torch

from sparseforge_ds.mask.kernels.fisher import token_squares
from sparseforge_ds.mask.kernels.fusing import is_compiled


def require_compiler(device: torch.device) -> None:
    """Compile one of our functions for a device, where they are compiled at all.

    Raises:
        ValueError: it cannot be done on this machine, which would end a run when it measures for the first time.
    """
    if not is_compiled(device):
        return
    try:
        token_squares(torch.ones(1, 4, device=device))
    except (RuntimeError, OSError, subprocess.SubprocessError) as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        said = next((line for line in lines if "rror" in line or "ompiler" in line), lines[0] if lines else repr(error))
        raise ValueError(
            f"torch.compile does not work for {device.type} on this machine ({said:.300}); it needs a C++ compiler and "
            "the headers of Python, for GPUs too (Debian and Ubuntu: apt install g++ python3-dev)"
        ) from None
