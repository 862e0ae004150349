"""What a run says: what the loggers of `sparseforge_ds` get, as plain lines above the progress bar."""

from __future__ import annotations

import logging
import os
import sys
import warnings

import deepspeed
import transformers
from tqdm import tqdm

from sparseforge_ds.train.launcher import rank_from_launcher


def set_up_console() -> None:
    """Let our loggers speak, on rank 0 from INFO on and on others from WARNING on, and quieten the others'."""
    logger = logging.getLogger("sparseforge_ds")
    logger.setLevel(logging.INFO)
    logger.handlers = [_Console()]
    deepspeed.utils.logger.setLevel(logging.WARNING)
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    warnings.filterwarnings("ignore", category=FutureWarning)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")


class _Console(logging.Handler):
    """Errors to stderr, the others to stdout; all at once."""

    def emit(self, record: logging.LogRecord) -> None:
        rank = rank_from_launcher()  # mpirun's ranks learn theirs when DeepSpeed starts
        if rank and record.levelno < logging.WARNING:
            return
        text = self.format(record)
        if record.levelno >= logging.WARNING:
            text = f"{record.levelname.lower()}: {f'on rank {rank}: ' if rank else ''}{text}"
        stream = sys.stderr if record.levelno >= logging.ERROR else sys.stdout
        # Above a bar, if there is one; with its newline in one write, for the launcher and other ranks share the pipe.
        tqdm.write(f"{text}\n", file=stream, end="")
        stream.flush()
