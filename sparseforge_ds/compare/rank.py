"""One process of a run: the launcher's own `main`, told by the environment which rank it is.

The fork server that starts it has imported the trainer already, which spares every run some seconds.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

PRELOADED = ["sparseforge_ds.train.run"]
"""What the fork server imports."""
_DIE_WITH_PARENT = 1
"""PR_SET_PDEATHSIG of prctl(2)."""


def train_rank(environment: dict[str, str], log: str, threads: int, arguments: list[str]) -> None:
    """Train as one rank, and end the process with the launcher's exit code.

    Args:
        environment: RANK and whatever else the launcher of a distributed run sets.
        log: file that takes what is printed.
        threads: for operations on the CPU.
        arguments: the launcher's command line.
    """
    # SIGTERM saves: when the comparison is killed its runs stop, and go on from there the next time.
    ctypes.CDLL(None).prctl(_DIE_WITH_PARENT, signal.SIGTERM)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for stream in (1, 2):
        os.dup2(output, stream)
    os.environ.update(environment)
    import torch

    torch.set_num_threads(threads)
    from sparseforge_ds.train.run import main

    sys.exit(main(arguments))
