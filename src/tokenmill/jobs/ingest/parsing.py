"""Parses lines in other processes, preserving their order.

Checking a line in Python takes about as long as storing it in SQLite, so one additional process doubles the speed of
submitting a file. A parser process runs this module. It reads and writes length-prefixed frames, and exits when its
input ends, which also happens when its parent dies.
"""

import fcntl
import marshal
import os
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Generator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, suppress
from itertools import chain, islice
from types import TracebackType
from typing import IO, Any, Self, cast

from tokenmill.errors import TokenmillError
from tokenmill.jobs.ingest.line import JobRow, ParseOptions, bad_row, rows
from tokenmill.storage.lines import BadLine, Chunk
from tokenmill.units import MIB

CHUNKS_HERE = 8  # shorter files are parsed in this process, which takes less time than starting another
AHEAD_BYTES = 48 * MIB  # of parsed lines that are buffered during a transaction
MAX_PROCESSES = 4
PIPE_BYTES = MIB  # holds a chunk
_LENGTH_BYTES = 8


def parsed(
    content: Iterator[Chunk | BadLine], reading: ParseOptions, processes: int | None = None
) -> Generator[tuple[Chunk | BadLine, list[JobRow]], None, None]:
    """Yield each chunk with its rows, in order. `processes`: number of parsers; None: chosen by the number of cores."""
    first = list(islice(content, CHUNKS_HERE))
    if processes is None:
        processes = min(MAX_PROCESSES, len(os.sched_getaffinity(0)) - 1) if len(first) == CHUNKS_HERE else 0
    everything = chain(first, content)
    if processes < 1:
        for item in everything:
            yield item, _rows(item, reading)
        return
    with ExitStack() as stack:
        parsers = [stack.enter_context(_Parser(reading)) for _ in range(processes)]
        pending: deque[tuple[Chunk | BadLine, Future[list[JobRow]]]] = deque()
        ahead_bytes = 0
        for index, item in enumerate(everything):
            pending.append((item, parsers[index % processes].rows(item)))
            ahead_bytes += _bytes(item)
            while ahead_bytes > AHEAD_BYTES:
                done, future = pending.popleft()
                ahead_bytes -= _bytes(done)
                yield done, future.result()
        for done, future in pending:
            yield done, future.result()


def _bytes(item: Chunk | BadLine) -> int:
    return len(item.data) if isinstance(item, Chunk) else 0


def _rows(item: Chunk | BadLine, reading: ParseOptions) -> list[JobRow]:
    return [bad_row(item, reading)] if isinstance(item, BadLine) else list(rows(item, reading))


class _Parser:
    """A parser process, with one thread that sends and one that receives, so that it never waits for this process."""

    def __init__(self, reading: ParseOptions) -> None:
        self._reading = reading
        # -P, because the job folder may contain a json.py.
        command = [sys.executable, "-P", "-m", "tokenmill.jobs.ingest.parsing"]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        for pipe in (self._process.stdin, self._process.stdout):
            with suppress(OSError):  # above this user's limit
                fcntl.fcntl(cast(IO[bytes], pipe), fcntl.F_SETPIPE_SZ, PIPE_BYTES)
        self._input, self._output = cast(IO[bytes], self._process.stdin), cast(IO[bytes], self._process.stdout)
        self._sender = ThreadPoolExecutor(1)
        self._receiver = ThreadPoolExecutor(1)
        settings = (reading.batch, reading.model_id, reading.priority, reading.reuse, dict(reading.defaults))
        self._sender.submit(_send, self._input, settings)

    def rows(self, item: Chunk | BadLine) -> Future[list[JobRow]]:
        """The rows of a chunk, once the process has parsed it."""
        if isinstance(item, BadLine):
            return self._receiver.submit(_rows, item, self._reading)
        self._sender.submit(
            _send_chunk, self._input, item
        )  # an error there ends the process, which `_received` reports
        return self._receiver.submit(self._received)

    def _received(self) -> list[JobRow]:
        try:
            return cast(list[JobRow], _receive(self._output))  # plain tuples, which the store accepts
        except EOFError:
            status = self._process.wait()
            raise TokenmillError(
                f"a parser process ended with status {status}",
                hint="the machine may be out of memory; run the same command again to continue",
            ) from None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.kill()  # it has no state to save
        self._process.wait()
        for threads in (self._sender, self._receiver):
            threads.shutdown(cancel_futures=True)
        self._output.close()
        with suppress(BrokenPipeError):  # flushes the rest of a frame
            self._input.close()


def _send_chunk(pipe: IO[bytes], chunk: Chunk) -> None:
    """Send a chunk without marshal, which would copy the text."""
    pipe.write(chunk.first.to_bytes(_LENGTH_BYTES, "little"))
    pipe.write(len(chunk.data).to_bytes(_LENGTH_BYTES, "little"))
    pipe.write(chunk.data)
    pipe.flush()


def _receive_chunk(pipe: IO[bytes]) -> Chunk:
    header = pipe.read(2 * _LENGTH_BYTES)
    if len(header) < 2 * _LENGTH_BYTES:
        raise EOFError
    first = header[:_LENGTH_BYTES]
    length = header[_LENGTH_BYTES:]
    return Chunk(int.from_bytes(first, "little"), pipe.read(int.from_bytes(length, "little")))


def _send(pipe: IO[bytes], value: Any) -> None:
    data = marshal.dumps(value)
    pipe.write(len(data).to_bytes(_LENGTH_BYTES, "little"))
    pipe.write(data)
    pipe.flush()


def _receive(pipe: IO[bytes]) -> Any:
    length = pipe.read(_LENGTH_BYTES)
    if len(length) < _LENGTH_BYTES:
        raise EOFError
    return marshal.loads(pipe.read(int.from_bytes(length, "little")))  # noqa: S302  from our own process


def main() -> None:
    """Parse chunks until the input ends."""
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_IGN)  # a terminal sends these to the whole group; the parent decides
    source = sys.stdin.buffer
    target = sys.stdout.buffer
    try:
        reading = ParseOptions(*_receive(source))
        while True:
            _send(target, [tuple(row) for row in rows(_receive_chunk(source), reading)])
    except (EOFError, BrokenPipeError):
        os._exit(0)  # nothing to flush


if __name__ == "__main__":
    main()
