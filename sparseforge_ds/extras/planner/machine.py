"""GPUs that a run is planned for: their speed and their memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

GIB = 2**30


class Gpu(NamedTuple):
    """Numbers of a GPU's data sheet."""

    half: float
    """Dense 16-bit peak of the tensor cores, in 10^12 operations a second."""
    single: float
    """Peak in fp32 in the same unit, without TF32, which torch leaves off for matrix products."""
    double: float
    """Peak in fp64 in the same unit."""
    memory: float
    """GiB of device memory; the reserve must cover the share of ECC and the driver."""
    bandwidth: float
    """GB a second of the device memory."""

    def peak(self, dtype: torch.dtype) -> float:
        """Return the peak for a dtype, in 10^12 operations a second."""
        return self.single if dtype == torch.float32 else self.half


GPUS = {
    "a100": Gpu(312.0, 19.5, 19.5, 80, 2039.0),
    "h100": Gpu(989.0, 67.0, 67.0, 80, 3350.0),
    "h200": Gpu(989.0, 67.0, 67.0, 141, 4800.0),
    "b200": Gpu(2250.0, 75.0, 37.0, 180, 8000.0),
    "l40s": Gpu(362.0, 91.6, 1.4, 48, 864.0),
    "v100": Gpu(125.0, 15.7, 7.8, 32, 900.0),
}
"""GPUs by name; of several variants the SXM one with the largest memory. B200 is that of an HGX board."""


@dataclass(frozen=True)
class Machine:
    """GPU that a run is planned for, with the assumptions about its use."""

    device: int
    """Bytes of a GPU."""
    reserve: int
    """Bytes of a GPU that the plan leaves free."""
    tflops: float = GPUS["h100"].half
    """Peak of a GPU in the dtype of the run, in 10^12 operations a second."""
    mfu: float = 0.4
    """Share of the peak that a run reaches."""
