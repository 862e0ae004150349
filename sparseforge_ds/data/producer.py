"""Process that tokenizes a stream while ranks train, and the handle by which rank 0 directs it.

It is a process and not a thread, since it must not take the interpreter from a rank that others wait for. It ends with
rank 0, however that ends. Whenever it ends, the chunks are intact and the next process continues from them.
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
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from sparseforge_ds.config.arguments import DocumentFrame
from sparseforge_ds.data.stream_chunks import Chunks, ChunkSizes, Record
from sparseforge_ds.data.text_files import TextSource
from sparseforge_ds.data.tokenization import TokenBatch, no_text_error, token_batches, token_dtype, unknown_token_error
from sparseforge_ds.data.windows import ids_of_tokens

AHEAD = 2
"""Chunks that are made before they are needed."""
PATIENCE_SECONDS = 60.0
"""Time after which a rank that waits for a chunk says so."""
_POLL_SECONDS = 0.5
"""Time between two looks at whether the run is to end, while a rank waits for a chunk."""
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ChunkSpec:
    """Recipe for the chunks of a stream; it can be pickled."""

    source: TextSource
    tokenizer: PreTrainedTokenizerBase
    folder: Path
    """Folder of the chunks."""
    sizes: ChunkSizes
    vocabulary: int
    """Number of ids that the model knows."""
    frame: DocumentFrame = "auto"
    """Tokens around every document."""
    revision: str | None = None
    """Revision of a hub dataset that a checkpoint names; None: the revision of the chunks, or today's."""

    @property
    def chunks(self) -> Chunks:
        """Return the chunks."""
        return Chunks(self.folder, self.sizes, token_dtype(self.tokenizer, *self.source.flags))


class ChunkWriter:
    """Writer of chunks, in their order, beginning after the last finished one.

    The text is an endless row of tokens, cut into chunks: after the last document comes the first again. Tokens that
    were read beyond the last chunk are not saved. The next writer tokenizes their documents once more.

    Args:
        spec: recipe for the chunks.

    Raises:
        ValueError: the text cannot be read.
        OSError: the folder cannot be written.
    """

    def __init__(self, spec: ChunkSpec) -> None:
        self._spec = spec
        self.chunks = spec.chunks
        self.chunks.prepare()
        self.finished = self.chunks.finished()
        record = self.chunks.record(self.finished - 1) if self.finished else None
        if record is None:
            record = {"reader": {"revision": spec.revision}, "began": [0, 0], "used": 0}
        self._epoch, self._skipped = record["began"]
        self._reader = spec.source.read(record["reader"])
        self._batches = self._tokenize()
        self._left = np.empty(0, dtype=self.chunks.dtype)
        """Tokens that were read beyond the last chunk."""
        self._used = record["used"]
        """Tokens still to be read that finished chunks already hold."""

    def write_next(self) -> None:
        """Write the next chunk.

        Raises:
            ValueError: the text cannot be read, has no text, or does not suit the model.
            OSError: the disk is full.
        """
        # 1. Read until the chunk is full, past the tokens that finished chunks hold.
        size = self.chunks.tokens(self.finished)
        parts = [self._left]
        available = len(self._left)
        while available < size:
            token = self._next_tokens()
            parts.append(token[self._used :])
            self._used = max(0, self._used - len(token))
            available += len(parts[-1])
        token = np.concatenate(parts)
        largest = int(ids_of_tokens(token).max())
        if largest >= self._spec.vocabulary:
            raise unknown_token_error(largest, self._spec.vocabulary)
        # 2. The record says where in the text the next chunk continues.
        self._left = token[size:]
        progress = {"used": self._length - len(self._left), "epoch": self._epoch, "skipped": self._skipped}
        self.chunks.write(self.finished, token[:size], {**self._newest, **progress})
        self.finished += 1

    def _tokenize(self) -> Iterator[TokenBatch]:
        return token_batches(self._reader, self._spec.tokenizer, self._spec.frame, *self._spec.source.flags)

    def _next_tokens(self) -> np.ndarray:
        """Return the tokens of the next documents, and note where these begin. After the last comes the first again."""
        skipped = ends = 0
        while ends < 2:
            begin = {"reader": self._reader.state(), "began": [self._epoch, self._skipped]}
            batch = next(self._batches, None)
            if batch is None:
                self._reader.rewind()
                self._batches = self._tokenize()
                self._epoch += 1
                ends += 1
                continue
            skipped += batch.skipped
            self._skipped += batch.skipped
            if len(batch.token):
                self._newest = begin
                self._length = len(batch.token)
                return batch.token
        # A whole pass over the text has found no token.
        raise no_text_error(self._spec.source.name, skipped)


class Producer:
    """Handle of a `ChunkWriter` in a process of its own, which starts at the first request.

    Args:
        spec: recipe for the chunks.
    """

    def __init__(self, spec: ChunkSpec) -> None:
        self.spec = spec
        self._requested = -1
        self._failure: str | None = None
        self.process: subprocess.Popen[bytes] | None = None
        self._connection, self._child_connection = Pipe()
        self.should_stop: Callable[[], bool] = lambda: False
        """True once nobody waits for text any more, because a signal has asked the run to end."""

    def request(self, chunk: int) -> None:
        """Request a chunk and the next ones after it. Does not wait."""
        if self.process is None:
            self._start()
        if chunk + AHEAD > self._requested:
            self._requested = chunk + AHEAD
            self._send(self._requested)

    def wait(self, chunk: int) -> Record:
        """Wait for a chunk, check its hash, and return its record.

        Raises:
            ValueError: it cannot be made, or `should_stop`; the message says why.
        """
        self.request(chunk)
        chunks = self.spec.chunks
        last_notice_time = time.monotonic()
        while True:
            record = chunks.record(chunk)
            if record is not None:
                chunks.check(chunk)
                return record
            if self._failure is not None:
                raise ValueError(self._failure)
            if self.should_stop():
                raise ValueError(f"--dataset {self.spec.source.name}: a signal ended the wait for its text")
            if self._connection.poll(_POLL_SECONDS):
                self._receive()
            elif time.monotonic() - last_notice_time > PATIENCE_SECONDS:
                last_notice_time = time.monotonic()
                _log.info(
                    "waiting for text: --dataset %s comes more slowly than the run reads it", self.spec.source.name
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
            [sys.executable, "-m", __name__, str(self._child_connection.fileno()), str(os.getpid())],
            env=environment,
            stdin=subprocess.DEVNULL,
            pass_fds=[self._child_connection.fileno()],
            start_new_session=True,  # Ctrl-C is for the ranks; this process sees that they are gone
        )
        self._child_connection.close()
        self._end = weakref.finalize(self, _end, self.process)
        self._send(self.spec)

    def _receive(self) -> None:
        assert self.process is not None
        try:
            self._failure = self._connection.recv()
        except (EOFError, ConnectionResetError):
            code = self.process.wait()
            self._failure = (
                f"--dataset {self.spec.source.name}: the process that tokenizes it ended "
                f"({f'signal {-code}' if code < 0 else f'exit code {code}'}); its last words are further up; "
                "continue with --resume"
            )

    def _send(self, message: Any) -> None:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # `wait` finds out why
            self._connection.send(message)
        while self._failure is None and self._connection.poll():  # so that the pipe does not fill up
            self._receive()


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()  # chunks appear atomically, so any moment will do
    process.wait()


def serve(connection: Connection, parent: int) -> None:
    """Run the producer's process: write requested chunks, report each, and end with the parent.

    Args:
        connection: gives the `ChunkSpec`, then numbers of the last requested chunk. Takes None after each chunk, or the
            message of the error that ended the work.
        parent: process id of rank 0.
    """
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
    requested = -1
    try:
        writer = ChunkWriter(connection.recv())
        while True:
            while writer.finished > requested or connection.poll():
                requested = connection.recv()
            writer.write_next()
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
