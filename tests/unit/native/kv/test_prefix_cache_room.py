"""Eviction for cells and sequence IDs, and what is never evicted."""

import pytest

from support.kv_cells import Grown, NoCells
from tokenmill.native.kv.prefix_cache import KeepPolicy, OpenedSequence, PrefixCache

DIGEST = list(range(100, 120))


def test_the_least_recently_used_goes_first() -> None:
    grown = Grown(cells=31)
    for first in (1, 2, 3):
        grown.leave([first] * 10, "all")
    grown.leave([1] * 10 + [7], "nothing")  # used again
    assert grown.cache.make_room(11)
    assert [grown.cached([first] * 10) for first in (1, 2, 3)] == [10, 0, 10]
    assert grown.cache.evicted == 10


def test_the_end_of_a_sequence_is_a_use_too() -> None:
    grown = Grown(cells=20)
    first, second = grown.open([1] * 10), grown.open([2] * 10)
    grown.cache.close(second, "all")
    grown.cache.close(first, "all")
    assert grown.cache.make_room(5)
    assert (grown.cached([1] * 10), grown.cached([2] * 10)) == (10, 5)


def test_tails_go_before_their_prefixes() -> None:
    grown = Grown(cells=30)
    grown.leave([*DIGEST, 1, 1, 1, 1], "all")
    grown.leave([*DIGEST, 2, 2, 2, 2], "all")
    assert grown.cache.make_room(6)
    assert grown.cached([*DIGEST, 1, 1, 1, 1]) == 20
    assert grown.cached([*DIGEST, 2, 2, 2, 2]) == 24
    assert grown.cache.make_room(30)
    assert grown.cells.used == 0


@pytest.mark.parametrize(
    ("cells", "count", "kept"),
    [
        (1024, 24 + 1, 1000 - 32),  # a 32nd of the cells at a time: a cut walks over all of them
        (1024, 24 + 32, 1000 - 32),
        (1024, 24 + 33, 1000 - 33),
        (1024, 24 + 600, 400),
        (1024, 1024, 0),
    ],
)
def test_a_long_prefix_is_trimmed_from_its_end(cells: int, count: int, kept: int) -> None:
    grown = Grown(cells=cells)
    tokens = list(range(1000))
    grown.leave(tokens)
    cuts = len(grown.cells.cuts)
    assert grown.cache.make_room(count)
    assert grown.cached(tokens) == kept
    assert len(grown.cells.cuts) == cuts + 1


def test_large_caches_are_not_trimmed_by_large_pieces() -> None:
    cache = PrefixCache(NoCells(), total_cells=100_000, sequences=2, shares=True)
    cache.adopt(cache.reserve_id() or 0, range(99_999))
    assert cache.make_room(2)
    assert cache.used == 99_999 - 256


def test_running_sequences_lose_nothing() -> None:
    grown = Grown(cells=30)
    sequence = grown.open([*DIGEST, 1])
    grown.leave([*DIGEST, 2, 2], "all")
    assert grown.cache.available == 9
    assert not grown.cache.make_room(10)
    assert grown.cache.used == 23, "what cannot be had is not tried"
    assert grown.cache.make_room(9)
    assert grown.cells.content(sequence) == [*DIGEST, 1]


def test_a_keeper_above_a_running_sequence_gives_nothing_and_is_left_alone() -> None:
    grown = Grown(cells=30)
    grown.leave(DIGEST)
    sequence = grown.open([*DIGEST, 1])
    grown.leave([5] * 9)
    assert grown.cache.make_room(4)
    grown.cache.close(sequence, "nothing")
    assert (grown.cached(DIGEST), grown.cached([5] * 9)) == (20, 5)


@pytest.mark.parametrize(
    ("prompt", "more", "fits"),
    [
        ([7] * 10, 0, True),
        ([7] * 30, 0, True),  # what is idle can go
        ([7] * 29, 1, True),
        ([7] * 29, 2, False),
        ([*DIGEST, 9], 9, True),
        ([*DIGEST, 9], 10, False),  # unless it is what the prompt itself wants
    ],
)
def test_whether_a_prompt_fits(prompt: list[int], more: int, fits: bool) -> None:
    grown = Grown(cells=30)
    grown.leave([*DIGEST, 1, 1], "all")
    assert grown.cache.fits(prompt, more) == fits


def test_a_prompt_fits_around_what_is_locked_or_pinned() -> None:
    grown = Grown(cells=40)
    grown.open([*DIGEST, 1])
    grown.leave([5] * 10)
    assert grown.cache.fits([*DIGEST, 2], 18)
    assert not grown.cache.fits([*DIGEST, 2], 19)
    grown.cache.pin([5] * 10)
    assert grown.cache.fits([*DIGEST, 2], 8)
    assert not grown.cache.fits([*DIGEST, 2], 9)
    assert grown.cache.fits([5] * 10, 8), "9 of its 10 tokens are there, and were not to be had anyway"
    assert not grown.cache.fits([5] * 10, 9)


@pytest.mark.parametrize("when", ["before", "while", "after"])
@pytest.mark.parametrize("keep", ["nothing", "prompt", "all"])
def test_a_pinned_prefix_is_never_evicted(when: str, keep: KeepPolicy) -> None:
    grown = Grown(cells=30)
    if when == "before":
        grown.cache.pin(DIGEST)
    sequence = grown.open([*DIGEST, 1, 2])
    if when == "while":
        grown.cache.pin(DIGEST)
    grown.cache.close(sequence, "all" if when == "after" else keep)
    if when == "after":
        grown.cache.pin(DIGEST)
    assert grown.cache.available == 10
    assert grown.cache.make_room(10)
    assert not grown.cache.make_room(11)
    assert grown.cached([*DIGEST, 1, 2]) == 20
    grown.cache.unpin(DIGEST)
    assert grown.cache.make_room(30)


def test_a_pin_keeps_the_cached_part() -> None:
    grown = Grown(cells=30)
    grown.cache.pin(DIGEST)
    sequence = grown.open([*DIGEST, 1], compute=12)
    grown.cache.close(sequence, "nothing")
    assert not grown.cache.make_room(19)
    assert grown.cached(DIGEST) == 12


def test_a_pin_within_a_longer_path_ends_where_it_ends() -> None:
    grown = Grown(cells=30)
    grown.leave(DIGEST)
    grown.cache.pin(DIGEST[:5])
    grown.cache.pin(DIGEST[:5])
    assert grown.cache.make_room(25)
    assert grown.cached(DIGEST) == 5
    grown.cache.unpin(DIGEST[:5])
    grown.cache.unpin([1, 2, 3])
    assert grown.cache.make_room(30)


def test_a_pinned_tail_is_not_dropped_at_a_fork() -> None:
    grown = Grown()
    grown.cache.pin([*DIGEST, 1, 1])
    grown.leave([*DIGEST, 1, 1, 1])
    grown.leave([*DIGEST, 2, 2, 2])
    assert grown.cached([*DIGEST, 1, 1, 1]) == 22
    assert grown.cache.used == 22 + 3, "of what is not pinned, the newest tail"
    grown.leave([*DIGEST, 3, 3])
    assert grown.cached([*DIGEST, 1, 1, 1]) == 22
    assert grown.cache.used == 22 + 2


def test_where_ids_are_short_the_oldest_keeper_goes() -> None:
    grown = Grown(sequences=3)
    for first in (1, 2, 3):
        grown.leave([first] * 10, "all")
    grown.open([9, 9])
    assert [grown.cached([first] * 10) for first in (1, 2, 3)] == [0, 10, 10]
    assert grown.cache.evicted == 10


def test_a_new_sequence_takes_the_place_of_the_keeper_of_its_own_prefix() -> None:
    grown = Grown(sequences=1)
    grown.leave([*DIGEST, 1, 1])
    sequence = grown.open([*DIGEST, 2])
    assert grown.cells.copies == []
    assert grown.cells.content(sequence) == [*DIGEST, 2]
    assert grown.cache.evicted == 2


def test_no_id_is_had_from_running_or_pinned_sequences() -> None:
    grown = Grown(sequences=2)
    grown.cache.pin([1] * 5)
    grown.leave([1] * 5)
    grown.open([2] * 5)
    assert grown.cache.open([3]) is None
    assert grown.cache.reserve_id() is None
    opened = grown.cache.open([1] * 6)
    assert opened is not None, "its own pinned head it may go on holding"
    assert opened.reused == 5
    assert grown.cache.open([1] * 6) is None


def test_a_keeper_of_a_pinned_prefix_is_not_shortened_by_taking_its_place() -> None:
    grown = Grown(sequences=1)
    grown.cache.pin(DIGEST)
    grown.leave(DIGEST)
    assert grown.cache.open([*DIGEST[:5], 9, 9]) is None
    assert grown.cached(DIGEST) == 20


def test_letting_a_keeper_go_for_its_id_does_not_lose_the_prefix() -> None:
    grown = Grown(sequences=2)
    grown.leave(DIGEST, "all")
    first = grown.cache.open([*DIGEST, 1, 1])
    assert first == OpenedSequence(1, 20)
    grown.cells.decode(1, 20, [1, 1])
    grown.cache.record_prefill(1, 2)
    second = grown.open([*DIGEST, 2, 2])
    assert second == 0
    assert grown.cells.content(second) == [*DIGEST, 2, 2]
    assert grown.cache.used == grown.cells.used == 24
    assert grown.cached([*DIGEST, 2, 2]) == 22


def test_a_pinned_prefix_with_another_holder_needs_no_keeper() -> None:
    grown = Grown(sequences=2)
    grown.cache.pin([1] * 5)
    grown.leave([1] * 5)
    first = grown.open([1] * 5 + [2])
    assert grown.cache.open([3]) is not None
    grown.cache.close(first, "nothing")
    assert grown.cached([1] * 5) == 5


def test_a_keeper_above_another_is_let_go() -> None:
    grown = Grown(sequences=3)
    grown.leave(DIGEST[:10], "all")
    grown.leave(DIGEST, "all")
    grown.open([7])
    grown.open([8])
    assert grown.cached(DIGEST) == 20


def test_a_restored_prefix_is_as_good_as_a_computed_one() -> None:
    grown = Grown()
    sequence = grown.cache.reserve_id()
    assert sequence is not None
    assert grown.cache.make_room(20)
    grown.cells.decode(sequence, 0, DIGEST)
    grown.cache.adopt(sequence, DIGEST)
    assert grown.cache.find([*DIGEST, 1]) == (sequence, 20)
    assert grown.cache.match([*DIGEST, 1]).ready == 20
    grown.leave([*DIGEST, 1])
    grown.leave([*DIGEST, 2])
    assert grown.cache.used == 20 + 1


@pytest.mark.parametrize("there", [[*DIGEST, 5, 5], DIGEST])
def test_cached_tokens_are_not_stored_twice(there: list[int]) -> None:
    grown = Grown(sequences=2)
    grown.leave(there)
    sequence = grown.cache.reserve_id() or 0
    grown.cells.decode(sequence, 0, DIGEST)
    grown.cache.adopt(sequence, DIGEST)
    assert grown.cache.used == grown.cells.used == len(there)
    assert grown.cache.reserve_id() is not None


def test_a_restored_prefix_with_a_cached_part_of_it() -> None:
    grown = Grown(cells=50)
    first = grown.open(DIGEST[:10])
    sequence = grown.cache.reserve_id() or 0
    grown.cells.decode(sequence, 0, DIGEST)
    grown.cache.adopt(sequence, DIGEST)
    assert grown.cached(DIGEST) == 20
    assert grown.cache.used == 30
    grown.cache.close(first, "nothing")
    assert grown.cache.used == 20


def test_an_id_that_was_not_loaded_comes_back() -> None:
    grown = Grown(sequences=1)
    sequence = grown.cache.reserve_id()
    assert sequence == 0
    assert grown.cache.open([1]) is None
    grown.cells.decode(0, 0, [1, 2])  # a file that ended too early
    grown.cache.release_id(0)
    assert grown.cells.used == 0
    assert grown.cache.open([1]) == OpenedSequence(0, 0)


def test_the_holder_of_a_prefix() -> None:
    grown = Grown()
    assert grown.cache.find(DIGEST) is None
    first = grown.open([*DIGEST, 1])
    assert grown.cache.find(DIGEST) == (first, 20)
    assert grown.cache.find([*DIGEST[:4], 9]) == (first, 4)
