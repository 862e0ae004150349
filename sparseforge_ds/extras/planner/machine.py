"""The GPUs that a run is planned for: what they compute in a second, and what they hold."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

GIB = 2**30


class Gpu(NamedTuple):
    """What the manufacturer's data sheet says of a GPU."""

    half: float
    """Dense 16-bit peak of the tensor cores, in 10^12 operations a second."""
    single: float
    """Peak in fp32, without TF32, which torch leaves off for matrix products."""
    memory: float
    """GiB of device memory; what ECC and the driver take of it is for the reserve."""
    bandwidth: float
    """GB a second of the device memory."""

    def peak(self, dtype: torch.dtype) -> float:
        """Of a run that computes in this dtype, in 10^12 operations a second."""
        return self.single if dtype == torch.float32 else self.half


GPUS = {
    "a100": Gpu(312.0, 19.5, 80, 2039.0),
    "h100": Gpu(989.0, 67.0, 80, 3350.0),
    "h200": Gpu(989.0, 67.0, 141, 4800.0),
    "b200": Gpu(2250.0, 75.0, 180, 8000.0),
    "l40s": Gpu(362.0, 91.6, 48, 864.0),
    "v100": Gpu(125.0, 15.7, 32, 900.0),
}
"""By name, SXM and the largest memory where there are several; B200 is that of an HGX board."""


@dataclass(frozen=True)
class Machine:
    """What a run is planned for."""

    device: int
    """Bytes of a GPU."""
    reserve: int
    """Bytes of a GPU that are not to be planned with."""
    tflops: float = GPUS["h100"].half
    """Peak of a GPU in the dtype of the run, in 10^12 operations a second."""
    mfu: float = 0.4
    """Share of the peak that a run reaches."""
