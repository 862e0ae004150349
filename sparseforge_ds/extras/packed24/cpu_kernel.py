"""The C++ kernel of `linear24`, compiled on first use by torch's loader of extensions into TORCH_EXTENSIONS_DIR.

It has paths for AVX-512 with bf16 and VBMI, for AVX2, and a portable one. It takes the best that the processor has, or
the one that SPARSEFORGE_CPU_KERNEL names: `avx512`, `avx2`, `portable`.
"""

from __future__ import annotations

import logging
import subprocess
from functools import cache
from pathlib import Path

from sparseforge_ds.extension_locks import OWN, clear_lock

_LOG = logging.getLogger(__name__)
_NAME = f"{OWN}linear24"


@cache
def load_cpu_kernel() -> bool:
    """Compile and load the kernel, and register it with torch for tensors on the CPU.

    Returns:
        False if it cannot be built; one warning tells why, and what it costs.
    """
    # The loader's imports take a second: only products need them.
    from torch.utils.cpp_extension import _get_build_directory, load

    try:
        folder = Path(_get_build_directory(_NAME, verbose=False))
        if not any(folder.glob("*.so")):
            # A warning, since few commands show notes and the wait is 10 s or more.
            _LOG.warning("linear24: compiling the CPU kernel, once on this machine, in %s", folder)
        clear_lock(folder / "lock")
        load(
            name=_NAME,
            sources=[str(Path(__file__).with_name("linear24.cpp"))],
            extra_cflags=["-O3", "-fopenmp", "-Wno-psabi"],
            extra_ldflags=["-fopenmp"],
            build_directory=str(folder),
            is_python_module=False,
        )
    except (ImportError, OSError, RuntimeError, subprocess.SubprocessError) as error:
        _LOG.warning(
            "linear24: the CPU kernel could not be built (%s); packed weights are unpacked at every call. Text is "
            "generated at about half a dense model's speed. Install a C++ compiler and ninja, or make the model dense "
            "by model.dequantize()",
            (str(error).splitlines() or [type(error).__name__])[0],
        )
        return False
    return True
