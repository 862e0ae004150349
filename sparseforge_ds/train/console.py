"""What a run says: what the loggers of `sparseforge_ds` get, as plain lines above the progress bar."""

from __future__ import annotations

import logging
import os
import sys
import warnings

import deepspeed
import transformers
from tqdm import tqdm


def set_up_console() -> None:
    """Let our loggers speak, on rank 0 from INFO on and on others from WARNING on, and quieten the others'."""
    logger = logging.getLogger("sparseforge_ds")
    rank = os.environ.get("RANK", "0")
    logger.setLevel(logging.INFO if rank == "0" else logging.WARNING)
    logger.handlers = [_Console(rank)]
    deepspeed.utils.logger.setLevel(logging.WARNING)
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    warnings.filterwarnings("ignore", category=FutureWarning)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")


class _Console(logging.Handler):
    """Errors to stderr, the others to stdout; all at once."""

    def __init__(self, rank: str) -> None:
        super().__init__()
        self.rank = rank

    def emit(self, record: logging.LogRecord) -> None:
        text = self.format(record)
        if record.levelno >= logging.WARNING:
            text = f"{record.levelname.lower()}: {'' if self.rank == '0' else f'on rank {self.rank}: '}{text}"
        stream = sys.stderr if record.levelno >= logging.ERROR else sys.stdout
        tqdm.write(text, file=stream)  # above a bar, if there is one
        stream.flush()
