"""Finds the largest logits of many rows on several threads, so that sampling a thousand rows takes milliseconds.

`RowScan.scan` is the entry point. numpy releases the GIL inside each call, so a call covers several rows: with one row
per call the threads would mostly wait for the GIL. It draws no tokens; see sampler.py.
"""

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import groupby

import numpy as np
from numpy.typing import NDArray

from tokenmill.native.sampling.logprobs import BLOCKS, is_quick

Matrix = NDArray[np.float32]
_CHUNK_BYTES = 16 << 20  # logits per call
_MIN_PARALLEL = 1 << 20  # logits; fewer are scanned on the calling thread
MAX_THREADS = 16


@dataclass(frozen=True, slots=True)
class Largest:
    """The largest logits of one row, largest first; of equal ones the first token comes first."""

    tokens: NDArray[np.intp]
    logits: Matrix
    top: float  # the largest logit; NaN if the row contains one


class RowScan:
    """Scans rows of logits. Only one thread may call it at a time."""

    def __init__(self, threads: int) -> None:
        self._threads = min(threads, MAX_THREADS)
        self._pool = ThreadPoolExecutor(self._threads, "row-scan") if self._threads > 1 else None

    def scan(self, matrix: Matrix, counts: Sequence[int]) -> list[Largest | None]:
        """Return the `counts[i]` largest logits of row i; None where it is 0 or sorting the row is as fast."""
        found: list[Largest | None] = [None] * len(counts)
        chunks = list(_chunks(matrix, counts))

        def work(chunk: tuple[int, int, int]) -> None:
            start, end, count = chunk
            found[start:end] = _argmax(matrix[start:end]) if count == 1 else _largest(matrix[start:end], count)

        if self._pool is None or len(chunks) < 2 or matrix.size < _MIN_PARALLEL:
            for chunk in chunks:
                work(chunk)
        else:
            list(self._pool.map(work, chunks))
        return found

    def close(self) -> None:
        """Stop the threads."""
        if self._pool is not None:
            self._pool.shutdown(wait=False)


def _chunks(matrix: Matrix, counts: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Divide the rows into runs (start, end, count) with the same count and at most `_CHUNK_BYTES`."""
    rows = max(1, _CHUNK_BYTES // (4 * matrix.shape[1])) if len(counts) else 1
    start = 0
    for count, same in groupby(counts):
        end = start + sum(1 for _ in same)
        if count > 0 and (count == 1 or is_quick(matrix[0], count)):
            for at in range(start, end, rows):
                yield at, min(at + rows, end), count
        start = end


def _argmax(rows: Matrix) -> list[Largest]:
    tokens = rows.argmax(axis=1)  # the first NaN if there is one
    logits = rows[np.arange(len(rows)), tokens]
    return [Largest(tokens[at : at + 1], logits[at : at + 1], top) for at, top in enumerate(logits.tolist())]


def _largest(rows: Matrix, count: int) -> list[Largest]:
    """As `logprobs.largest`, for several rows: the count-th largest of the block maxima is a lower bound."""
    size = rows.shape[1]
    width = size // BLOCKS
    tops = rows[:, : width * BLOCKS].reshape(len(rows), BLOCKS, width).max(axis=1)
    floors = np.partition(tops, -count, axis=1)[:, -count]
    maxima = np.maximum(tops.max(axis=1), rows[:, width * BLOCKS :].max(axis=1, initial=-np.inf)).tolist()
    flat = np.flatnonzero(rows >= floors[:, None])
    row = flat // size
    token = flat - row * size
    logit = rows[row, token]
    order = np.lexsort((-logit, row))  # stable: ascending tokens among equal logits
    token = token[order]
    logit = logit[order]
    starts = np.searchsorted(row, np.arange(len(rows) + 1)).tolist()
    return [
        Largest(token[start : min(start + count, end)], logit[start : min(start + count, end)], top)
        for start, end, top in zip(starts, starts[1:], maxima, strict=False)
    ]
