"""The process that tokenises a stream while ranks train, and the handle by which rank 0 directs it.

A process and not a thread: it must not take the interpreter from a rank that others wait for. It ends with rank 0,
however that ends, and whatever moment it ends at, the chunks are whole and the next one continues from them.
"""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from sparseforge_ds.config.arguments import DocumentFrame
from sparseforge_ds.data.chunks import Chunks, Record, Sizes
from sparseforge_ds.data.documents import Stream
from sparseforge_ds.data.packing import token_dtype
from sparseforge_ds.data.token_row import TokenRow

AHEAD = 2
"""Chunks that are made before they are needed."""
KEEP = 8
"""Chunks behind the run whose tokens stay, so that probes that look back find them."""
_PATIENCE_SECONDS = 60.0
_FAREWELL_SECONDS = 10.0


@dataclass(frozen=True)
class Job:
    """What makes the chunks of a stream; can be pickled."""

    stream: Stream
    tokenizer: PreTrainedTokenizerBase
    folder: Path
    sizes: Sizes
    vocabulary: int
    """Ids that the model knows."""
    frame: DocumentFrame = "auto"
    """Which of the tokenizer's tokens stand around every document."""

    @property
    def chunks(self) -> Chunks:
        """The folder that the chunks lie in."""
        return Chunks(self.folder, self.sizes, token_dtype(self.tokenizer))


class Maker:
    """Makes chunks, in any order, though in their order it is quickest."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self.chunks = job.chunks
        self.chunks.prepare()
        self._row: TokenRow | None = None
        self._next = 0
        self._kept_from = 0

    def make(self, chunk: int) -> Record:
        """The record of a chunk that is then there.

        Raises:
            ValueError: the text cannot be read, or is not what it was, or does not suit the model.
            OSError: the disk is full.
        """
        record = self.chunks.whole(chunk)
        if record is not None:
            return record
        row = self._seek(chunk)
        while True:
            start = row.cursor()
            token = row.take(self.chunks.tokens(self._next))
            if int(token.max()) >= self._job.vocabulary:
                raise ValueError(
                    f"the tokenizer gives token {int(token.max())}, but the model knows {self._job.vocabulary}; "
                    "tokenizer and weights do not belong together"
                )
            keep = self._next == chunk or self._next >= self._kept_from
            record = self.chunks.write(self._next, token, start, row.cursor(), keep)
            self._next += 1
            if self._next > chunk:
                return record

    def discard(self, before: int) -> None:
        """Remove the tokens of the chunks before `before`, which can be made again, and write none on the way."""
        self._kept_from = before
        self.chunks.discard(before)

    def _seek(self, chunk: int) -> TokenRow:
        """The row at the start of `chunk`, or of the first chunk whose start is not known yet."""
        if self._row is not None and self._next == chunk:
            return self._row
        known = self.chunks.record(chunk)
        if known is not None:
            self._next, cursor = chunk, known["start"]
        else:
            newest = self.chunks.newest_before(chunk)
            before = self.chunks.record(newest) if newest >= 0 else None
            self._next, cursor = newest + 1, None if before is None else before["end"]
        self._row = TokenRow(self._job.stream, self._job.tokenizer, cursor, self._job.frame)
        return self._row


class Producer:
    """A maker in a process of its own.

    Args:
        job: what it makes.
        say: prints a line for people.
    """

    def __init__(self, job: Job, say: Callable[[str], None]) -> None:
        self._name = job.stream.name
        self._say = say
        self._made: dict[int, Record] = {}
        self._wanted = -1
        self._failure: str | None = None
        self._end_announced = False
        self._connection, theirs = Pipe()
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
            "TOKENIZERS_PARALLELISM": "true",
            "CUDA_VISIBLE_DEVICES": "",
        }
        self.process = subprocess.Popen(
            [sys.executable, "-m", __name__, str(theirs.fileno())],
            env=environment,
            stdin=subprocess.DEVNULL,
            pass_fds=[theirs.fileno()],
            start_new_session=True,  # Ctrl-C is for the ranks; this process sees that they are gone
        )
        theirs.close()
        self._end = weakref.finalize(self, _end, self._connection, self.process)
        self._send(job)

    def want(self, chunk: int) -> None:
        """Have a chunk made, and some ahead, if that was not done before. Does not wait."""
        if chunk not in self._made or chunk + AHEAD > self._wanted:
            self._wanted = chunk + AHEAD
            self._send(("make", chunk))

    def wait(self, chunk: int) -> Record:
        """The record of a chunk, when it is there.

        Raises:
            ValueError: it cannot be made; the message says why.
        """
        self.want(chunk)
        while chunk not in self._made:
            if self._failure is not None:
                raise ValueError(self._failure)
            if not self._connection.poll(_PATIENCE_SECONDS):
                self._say(f"waiting for text: --dataset {self._name} comes more slowly than the run reads it")
                continue
            try:
                number, record, self._failure = self._connection.recv()
            except (EOFError, ConnectionResetError):
                code = self.process.wait()
                self._failure = (
                    f"--dataset {self._name}: the process that tokenises it ended "
                    f"({f'signal {-code}' if code < 0 else f'exit code {code}'}); its last words are further up; "
                    "continue with --resume"
                )
                continue
            if self._failure is None:
                self._made[number] = record
                self._announce_end(record)
        return self._made[chunk]

    def adopt(self, records: dict[int, Record]) -> None:
        """Take over what a checkpoint knows of chunks."""
        self._send(("adopt", records))

    def discard(self, before: int) -> None:
        """Remove the tokens of old chunks."""
        for chunk in [chunk for chunk in self._made if chunk < before]:
            del self._made[chunk]
        self._send(("discard", before))

    def close(self) -> None:
        """End the process."""
        self._end()

    def _announce_end(self, record: Record) -> None:
        if record["end"]["epoch"] and not self._end_announced:
            self._end_announced = True
            self._say(f"--dataset {self._name}: its last document has been read; the first follows again")

    def _send(self, message: Any) -> None:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # `wait` finds out why
            self._connection.send(message)


def _end(connection: Connection, process: subprocess.Popen[bytes]) -> None:
    connection.close()
    try:
        process.wait(_FAREWELL_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def serve(connection: Connection) -> None:
    """The producer's own life: make what is wanted, say so, and end with the other side."""
    messages: queue.Queue[Any] = queue.Queue()
    threading.Thread(target=_listen, args=(connection, messages), daemon=True).start()
    number, last = 0, -1
    try:
        maker = Maker(messages.get())
        while True:
            while number > last or not messages.empty():
                verb, what = messages.get()
                if verb == "make":
                    number, last = what, what + AHEAD
                elif verb == "discard":
                    maker.discard(what)
                else:
                    for chunk, record in what.items():
                        maker.chunks.adopt(chunk, record)
            connection.send((number, maker.make(number), None))
            number += 1
    except (BrokenPipeError, ConnectionResetError):
        return  # rank 0 is gone, and nobody is left to tell
    except ValueError as error:
        connection.send((-1, None, str(error)))
    except OSError as error:
        connection.send((-1, None, f"{type(error).__name__}: {error}; continue with --resume when that is repaired"))


def _listen(connection: Connection, messages: queue.Queue[Any]) -> None:
    while True:
        try:
            messages.put(connection.recv())
        except (EOFError, ConnectionResetError):  # rank 0 is gone: nobody needs what is being made
            os._exit(0)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # launchers send it to the children of a rank too, which still trains
    from sparseforge_ds.data import producer

    producer.serve(Connection(int(sys.argv[1])))
