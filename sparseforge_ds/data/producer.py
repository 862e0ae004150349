"""The process that tokenises a stream while ranks train, and the handle by which rank 0 directs it.

A process and not a thread: it must not take the interpreter from a rank that others wait for. It ends with rank 0,
however that ends, and whatever moment it ends at, the chunks are whole and the next one continues from them.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from sparseforge_ds.config.arguments import DocumentFrame
from sparseforge_ds.data.stream_chunks import Chunks, ChunkSizes, Record
from sparseforge_ds.data.text_files import Source
from sparseforge_ds.data.tokenization import Batch, no_text_error, token_dtype, tokenise, unknown_token_error
from sparseforge_ds.data.windows import token_ids

AHEAD = 2
"""Chunks that are made before they are needed."""
_PATIENCE_SECONDS = 60.0
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ChunkSpec:
    """What makes the chunks of a stream; can be pickled."""

    source: Source
    tokenizer: PreTrainedTokenizerBase
    folder: Path
    sizes: ChunkSizes
    vocabulary: int
    """Ids that the model knows."""
    frame: DocumentFrame = "auto"
    """Which of the tokenizer's tokens stand around every document."""
    revision: str | None = None
    """Of a hub dataset, where a checkpoint names it; None is that of the chunks, or today's."""

    @property
    def chunks(self) -> Chunks:
        """The folder that the chunks lie in."""
        return Chunks(self.folder, self.sizes, token_dtype(self.tokenizer, *self.source.marks))


class ChunkWriter:
    """Makes chunks in their order, from where the folder ends: an endless row of tokens, cut into chunks.

    After the last document comes the first again. The tokens behind a chunk are on no disk: the next maker tokenises
    the documents once more that they are of.

    Raises:
        ValueError: the text cannot be read.
        OSError: the folder cannot be written.
    """

    def __init__(self, job: ChunkSpec) -> None:
        self._job = job
        self.chunks = job.chunks
        self.chunks.prepare()
        self.finished = self.chunks.finished()
        record = self.chunks.record(self.finished - 1) if self.finished else None
        if record is None:
            record = {"reader": {"revision": job.revision}, "began": [0, 0], "used": 0}
        self._epoch, self._skipped = record["began"]
        self._reader = job.source.read(record["reader"])
        self._batches = self._tokenise()
        self._left = np.empty(0, dtype=self.chunks.dtype)
        self._used = record["used"]
        """Tokens that chunks have of those that are made next."""

    def make(self) -> None:
        """Make the next chunk.

        Raises:
            ValueError: the text cannot be read, has no text, or does not suit the model.
            OSError: the disk is full.
        """
        wanted, parts, had = self.chunks.tokens(self.finished), [self._left], len(self._left)
        while had < wanted:
            token = self._next_tokens()
            parts.append(token[self._used :])
            self._used = max(0, self._used - len(token))
            had += len(parts[-1])
        token = np.concatenate(parts)
        largest = int(token_ids(token).max())
        if largest >= self._job.vocabulary:
            raise unknown_token_error(largest, self._job.vocabulary)
        self._left = token[wanted:]
        read = {"used": self._length - len(self._left), "epoch": self._epoch, "skipped": self._skipped}
        self.chunks.write(self.finished, token[:wanted], {**self._newest, **read})
        self.finished += 1

    def _tokenise(self) -> Iterator[Batch]:
        return tokenise(self._reader, self._job.tokenizer, self._job.frame, *self._job.source.marks)

    def _next_tokens(self) -> np.ndarray:
        """Of some documents, and remember where they begin; the first ones again after the last."""
        skipped = ends = 0
        while ends < 2:
            begin = {"reader": self._reader.state(), "began": [self._epoch, self._skipped]}
            batch = next(self._batches, None)
            if batch is None:
                self._reader.rewind()
                self._batches = self._tokenise()
                self._epoch, ends = self._epoch + 1, ends + 1
                continue
            skipped, self._skipped = skipped + batch.skipped, self._skipped + batch.skipped
            if len(batch.token):
                self._newest, self._length = begin, len(batch.token)
                return batch.token
        raise no_text_error(self._job.source.name, skipped)


class Producer:
    """A maker in a process of its own, which starts when a chunk is wanted for the first time.

    Args:
        job: what it makes.
    """

    def __init__(self, job: ChunkSpec) -> None:
        self.job = job
        self._wanted = -1
        self._failure: str | None = None
        self.process: subprocess.Popen[bytes] | None = None
        self._connection, self._theirs = Pipe()

    def want(self, chunk: int) -> None:
        """Have a chunk made, and some ahead, if that was not done before. Does not wait."""
        if self.process is None:
            self._start()
        if chunk + AHEAD > self._wanted:
            self._wanted = chunk + AHEAD
            self._send(self._wanted)

    def wait(self, chunk: int) -> Record:
        """The record of a chunk, when it is there and its tokens are whole.

        Raises:
            ValueError: it cannot be made; the message says why.
        """
        self.want(chunk)
        chunks = self.job.chunks
        while True:
            record = chunks.record(chunk)
            if record is not None:
                chunks.check(chunk)
                return record
            if self._failure is not None:
                raise ValueError(self._failure)
            if self._connection.poll(_PATIENCE_SECONDS):
                self._listen()
            else:
                _log.info(
                    "waiting for text: --dataset %s comes more slowly than the run reads it", self.job.source.name
                )

    def close(self) -> None:
        """End the process."""
        if self.process is not None:
            self._end()

    def _start(self) -> None:
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
            "TOKENIZERS_PARALLELISM": "true",
            "CUDA_VISIBLE_DEVICES": "",
        }
        self.process = subprocess.Popen(
            [sys.executable, "-m", __name__, str(self._theirs.fileno()), str(os.getpid())],
            env=environment,
            stdin=subprocess.DEVNULL,
            pass_fds=[self._theirs.fileno()],
            start_new_session=True,  # Ctrl-C is for the ranks; this process sees that they are gone
        )
        self._theirs.close()
        self._end = weakref.finalize(self, _end, self.process)
        self._send(self.job)

    def _listen(self) -> None:
        assert self.process is not None
        try:
            self._failure = self._connection.recv()
        except (EOFError, ConnectionResetError):
            code = self.process.wait()
            self._failure = (
                f"--dataset {self.job.source.name}: the process that tokenises it ended "
                f"({f'signal {-code}' if code < 0 else f'exit code {code}'}); its last words are further up; "
                "continue with --resume"
            )

    def _send(self, message: Any) -> None:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # `wait` finds out why
            self._connection.send(message)
        while self._failure is None and self._connection.poll():  # so that the pipe does not fill up
            self._listen()


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()  # chunks appear whole, at whatever moment
    process.wait()


def serve(connection: Connection, parent: int) -> None:
    """The producer's own life: make what is wanted, say after each chunk that it is there, and end with the parent.

    Args:
        connection: gives the job and then the last chunk that is wanted, again and again; takes None for a chunk that
            was made, or why none can be.
        parent: process id of rank 0.
    """
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
    wanted = -1
    try:
        maker = ChunkWriter(connection.recv())
        while True:
            while maker.finished > wanted or connection.poll():
                wanted = connection.recv()
            maker.make()
            connection.send(None)
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return  # rank 0 is gone, and nobody is left to tell
    except ValueError as error:
        connection.send(str(error))
    except OSError as error:
        connection.send(f"{type(error).__name__}: {error}; continue with --resume when that is repaired")


def _end_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(0)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # launchers send it to the children of a rank too, which still trains
    logging.basicConfig(format="%(message)s", stream=sys.stdout)
    logging.getLogger("sparseforge_ds").setLevel(logging.INFO)  # not the root: HTTP clients say every request there
    from sparseforge_ds.data import producer

    producer.serve(Connection(int(sys.argv[1])), int(sys.argv[2]))
