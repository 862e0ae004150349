"""Console output of a run: messages of the package's loggers, as plain lines above the progress bar."""

from __future__ import annotations

import logging
import os
import sys
import warnings

import deepspeed
import transformers
from tqdm import tqdm

from sparseforge_ds.checkpoint.printable_text import printable
from sparseforge_ds.train.launcher import rank_from_launcher


def set_up_console() -> None:
    """Show messages of this package, on rank 0 from INFO on and on others from WARNING on; quieten other libraries."""
    logger = logging.getLogger("sparseforge_ds")
    logger.setLevel(logging.INFO)
    logger.handlers = [_Console()]
    deepspeed.utils.logger.setLevel(logging.WARNING)
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    warnings.filterwarnings("ignore", category=FutureWarning)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")


class _Console(logging.Handler):
    """Handler that writes errors to stderr and everything else to stdout, unbuffered."""

    def emit(self, record: logging.LogRecord) -> None:
        rank = rank_from_launcher()  # 0 under mpirun until DeepSpeed has started
        if rank and record.levelno < logging.WARNING:
            return
        # Names of tensors and files may hold what a terminal would obey.
        text = "\n".join(map(printable, self.format(record).split("\n")))
        if record.levelno >= logging.WARNING:
            text = f"{record.levelname.lower()}: {f'on rank {rank}: ' if rank else ''}{text}"
        stream = sys.stderr if record.levelno >= logging.ERROR else sys.stdout
        # tqdm writes above its bar. The newline is part of the text: launcher and ranks share one pipe.
        tqdm.write(f"{text}\n", file=stream, end="")
        stream.flush()
