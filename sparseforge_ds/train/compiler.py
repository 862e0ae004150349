"""A trial of torch.compile: on GPUs compiled functions move the mask."""

from __future__ import annotations

import subprocess

import torch

from sparseforge_ds.mask.kernels.fisher import token_squares
from sparseforge_ds.mask.kernels.fusing import is_compiled


def require_compiler(device: torch.device) -> None:
    """Compile one of our functions for a device, where they are compiled at all.

    Raises:
        ValueError: torch.compile does not work on this machine, and the run would end at its first measurement.
    """
    if not is_compiled(device):
        return
    try:
        token_squares(torch.ones(1, 4, device=device))
    except (RuntimeError, OSError, subprocess.SubprocessError) as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        first_line = lines[0] if lines else repr(error)
        cause = next((line for line in lines if "rror" in line or "ompiler" in line), first_line)
        raise ValueError(
            f"torch.compile does not work for {device.type} on this machine ({cause:.300}); it needs a C++ compiler "
            "and the headers of Python, for GPUs too (Debian and Ubuntu: apt install g++ python3-dev)"
        ) from None
