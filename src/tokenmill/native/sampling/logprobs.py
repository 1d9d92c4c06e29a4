"""Log-probabilities and the largest logits of a row, in numpy."""

import math

import numpy as np
from numpy.typing import NDArray

from tokenmill.engine.engine import MAX_LOGPROBS

BLOCKS = 256
Logits = NDArray[np.float32]


def logprobs(logits: Logits, token: int, n: int) -> tuple[float, tuple[tuple[int, float], ...]]:
    """A token's log-probability, and the n likeliest tokens with theirs, best first."""
    most = float(logits.max())
    norm = most + math.log(float(np.exp(logits - most, dtype=np.float32).sum(dtype=np.float64)))
    best = largest(logits, min(n, MAX_LOGPROBS, len(logits)))
    return float(logits[token]) - norm, tuple((int(one), float(logits[one]) - norm) for one in best)


def is_quick(logits: Logits, n: int) -> bool:
    """Whether `largest` is faster than sorting."""
    return n * BLOCKS <= len(logits)


def largest(logits: Logits, n: int) -> NDArray[np.intp]:
    """Indices of the n largest logits, largest first; of equal ones the first.

    The n-th largest of the blocks' maxima is a lower bound of the result, and few other logits reach it. A block has
    every (size / 256)-th logit, so that the maxima of all blocks are computed together.
    """
    if n <= 0:
        return np.empty(0, np.intp)
    width = len(logits) // BLOCKS
    if width < n:
        return np.argsort(-logits, kind="stable")[:n]
    blocks = logits[: width * BLOCKS].reshape(BLOCKS, width)
    tops = blocks.max(axis=0)
    floor = np.partition(tops, -n)[-n]
    high = np.flatnonzero(tops >= floor)
    row, block = np.nonzero(blocks[:, high] >= floor)
    beyond = np.flatnonzero(logits[width * BLOCKS :] >= floor) + width * BLOCKS
    found = np.concatenate((row * width + high[block], beyond))  # ascending: nonzero goes row by row
    return found[np.argsort(-logits[found], kind="stable")[:n]]
