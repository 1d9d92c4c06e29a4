"""Handwritten prefix keys, and recorded places."""

from hashlib import sha256
from itertools import pairwise
from zlib import crc32

from tokenmill.jobs.ingest.identity import FINE_CHUNKS


def long_key(*chunks: bytes) -> bytes:
    """The key of a prompt of these chunks, each of 512 bytes; four bytes stand for each."""
    first, *others = chunks
    return b"".join([first * FINE_CHUNKS, *others])


def old_place(text: bytes) -> bytes:
    """As stores have them from before there were chunks of 64 bytes."""
    ends = [
        *range(0, 12 << 10, 512),
        *range(12 << 10, 64 << 10, 2 << 10),
        *range(64 << 10, 272 << 10, 16 << 10),
        272 << 10,
    ]
    spans = [*pairwise(ends), (272 << 10, len(text))]
    sums = [crc32(text[start:end]) for start, end in spans if start < len(text)] or [crc32(b"")]
    return b"".join(each.to_bytes(4, "big") for each in sums) + sha256(text).digest()[:4]
