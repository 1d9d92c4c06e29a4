"""Filling the page cache: division into reads, merged blocks, and notes on the result."""

import re
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenmill.engine import page_cache, residency
from tokenmill.engine.page_cache import READ_BYTES, CacheFill, Range, Residency, fill
from tokenmill.errors import ModelError
from tokenmill.units import GIB, MIB

A, B = Path("a.gguf"), Path("b.gguf")
SIZES = st.integers(1, 5 * READ_BYTES)


@given(st.lists(st.tuples(st.sampled_from([A, B]), SIZES), max_size=4), st.none() | st.integers(0, 12 * READ_BYTES))
def test_reads_cover_what_is_cold_in_order_and_never_more_than_fits(
    parts: list[tuple[Path, int]], free_bytes: int | None
) -> None:
    cold = [(path, Range(number * 100 * MIB, size, 0)) for number, (path, size) in enumerate(parts)]
    chunks = list(page_cache._chunks(cold, free_bytes))
    assert all(0 < size <= READ_BYTES for _, _, size in chunks)
    total = sum(size for _, _, size in chunks)
    wanted = sum(size for _, size in parts)
    if free_bytes is None or free_bytes >= wanted:
        assert total == wanted
    else:
        assert free_bytes - READ_BYTES < total <= free_bytes
    offsets = [offset for _, offset, _ in chunks]
    assert offsets == sorted(offsets)  # each range lies behind the one before


@given(st.lists(st.tuples(st.integers(1, 50), st.sampled_from(["full", "empty", "part"])), max_size=12))
def test_joined_ranges_hold_the_same_bytes(blocks: list[tuple[int, str]]) -> None:
    ranges, at = [], 0
    for size, kind in blocks:
        ranges.append(Range(at, size, {"full": size, "empty": 0, "part": size // 2}[kind]))
        at += size
    joined = list(residency._joined(iter(ranges)))
    assert sum(part.bytes for part in joined) == at
    assert sum(part.resident_bytes or 0 for part in joined) == sum(part.resident_bytes or 0 for part in ranges)
    assert [part.offset_bytes for part in joined] == sorted({part.offset_bytes for part in joined})
    for one, other in pairwise(joined):
        assert not residency._alike(one, other)


def test_a_rate_needs_something_read() -> None:
    assert CacheFill(GIB, 0, 0, 0.0).gb_s is None
    assert CacheFill(GIB, GIB, GIB, 0.5).describe() == "1.0 GiB of 1.0 GiB read in 0.5 s, 2.1 GB/s"


def test_unknown_residency_is_not_cold() -> None:
    assert Residency(A, None, GIB).cold_bytes is None
    assert Residency(A, MIB, GIB).cold_bytes == GIB - MIB


def test_a_disk_that_fails_stops_the_fill_with_a_sentence(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    gone = tmp_path / "gone.gguf"
    monkeypatch.setattr(page_cache, "resident", lambda path: Residency(path, 0, 8 * MIB, (Range(0, 8 * MIB, 0),)))
    with pytest.raises(ModelError, match=re.escape(str(gone))) as caught:
        fill([gone])
    assert isinstance(caught.value.__cause__, FileNotFoundError)
    assert caught.value.hint


@pytest.mark.parametrize(("nodes", "spread"), [(None, True), ((0,), True), ((900,), False)])
def test_pages_that_cannot_be_spread_over_nodes_are_read_all_the_same(
    nodes: tuple[int, ...] | None, spread: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"x" * MIB)
    assert fill([path], nodes=nodes).notes == ()  # just written, so all of it is cached
    monkeypatch.setattr(page_cache, "resident", lambda path: Residency(path, 0, MIB, (Range(0, MIB, 0),)))
    monkeypatch.setattr(page_cache, "_lost", lambda *_: [])
    done = fill([path], nodes=nodes)
    assert done.read_bytes == MIB
    assert ["NUMA nodes" in note for note in done.notes] == ([] if spread else [True])
