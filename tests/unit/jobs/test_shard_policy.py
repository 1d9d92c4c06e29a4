"""Stretches of pending jobs: whole heads, fair sizes, and what is worth taking from another."""

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.prefix_rows import rows_of
from tokenmill.jobs.scheduler.prefix_groups import WORTH_BYTES
from tokenmill.jobs.sharding.policy import (
    MAX_SHARD_JOBS,
    Shard,
    before,
    cut,
    elsewhere,
    fair,
    fair_share,
    halved,
    joined,
)

SHORT, HEAD, LONG = 1024, 4096, 65536  # bytes
GROUPS = st.lists(st.tuples(st.integers(1, 12), st.sampled_from([0, 256, SHORT, HEAD])), min_size=1, max_size=12)


@pytest.mark.parametrize(
    ("groups", "most", "whole", "more", "expected"),
    [
        ([(3, HEAD), (3, HEAD), (3, HEAD)], 9, None, False, 9),  # all of it
        ([(3, HEAD), (3, HEAD), (3, HEAD)], 8, None, False, 6),  # two whole heads
        ([(3, HEAD), (3, HEAD), (3, HEAD)], 6, None, False, 6),
        ([(3, HEAD), (3, HEAD), (3, HEAD)], 5, None, True, 3),
        ([(9, SHORT)], 4, None, False, 4),  # a head that is longer is cut
        ([(9, SHORT)], 4, 9, False, 9),  # but kept whole up to a fair share
        ([(9, SHORT)], 4, 8, False, 4),
        ([(9, LONG)], 4, None, False, 9),  # and where cutting it costs more than it gains
        ([(9, LONG)], 4, None, True, 4),  # nobody knows how long it is
        ([(3, SHORT), (6, LONG), (1, 0)], 5, None, True, 3),
        ([(6, SHORT), (3, SHORT)], 4, 8, False, 6),
        ([(1, 0), (9, SHORT)], 4, None, False, 1),  # what is before a long head is not cut with it
        ([(9, 256)], 4, None, False, 4),  # a few words are no head
        ([(1, 0)] * 9, 4, 8, False, 4),
        ([(1, 0)] * 4, 4, None, True, 4),  # nothing is known of what follows, and there is no head
        ([(4, HEAD)], 4, None, True, 4),
    ],
)
def test_whole_heads_as_far_as_they_go(
    groups: list[tuple[int, int]], most: int, whole: int | None, more: bool, expected: int
) -> None:
    assert cut(rows_of(groups), most, more=more, whole=whole) == expected


def test_documents_behind_one_system_prompt_are_kept_whole() -> None:
    rows = rows_of([(9, 2048), (9, 2048), (9, 2048)], common=SHORT)
    assert [cut(rows, most, more=False) for most in (4, 10, 19, 27)] == [4, 9, 18, 27]
    assert cut(rows, 4, more=False, whole=11) == 9
    rows = rows_of([(9, LONG), (9, LONG), (9, LONG)], common=SHORT)
    assert [cut(rows, most, more=False) for most in (4, 10)] == [9, 9]


def test_a_stretch_lies_in_one_batch_and_one_priority() -> None:
    older, newer = rows_of([(3, 0)], batch=1), rows_of([(3, 0)], batch=2)
    urgent = rows_of([(2, 0)], batch=2, rank=-5)
    assert cut([*older, *newer], 6, more=False) == 3
    assert cut([*urgent, *newer], 6, more=True) == 2


def test_nothing_is_cut_from_nothing() -> None:
    assert cut([], 4, more=False) == 0


@given(GROUPS, st.integers(1, 40), st.integers(1, 60), st.booleans())
@settings(max_examples=150, deadline=None)
def test_a_head_is_cut_only_where_it_is_longer_than_a_fair_share(
    groups: list[tuple[int, int]], most: int, whole: int, more: bool
) -> None:
    rows = rows_of(groups)
    jobs = cut(rows, most, more=more, whole=whole)
    assert 1 <= jobs <= len(rows)
    if jobs == len(rows) or joined(rows[jobs - 1], rows[jobs]) < WORTH_BYTES:
        assert jobs <= max(most, whole) or rows[jobs - 1].prompt_bytes > SHORT
        return
    assert jobs <= most
    ends = [at for at in range(1, len(rows)) if joined(rows[at - 1], rows[at]) < WORTH_BYTES]
    end = next((at for at in ends if at > jobs), len(rows))
    assert not any(at < jobs for at in ends), "the head before it was whole already"
    assert more or end > max(most, whole)


@pytest.mark.parametrize(
    ("pending", "workers", "lanes", "speed", "expected"),
    [
        (100, 1, 4, None, 50),
        (100, 2, 4, None, 25),
        (101, 2, 4, None, 26),
        (100, 5, 16, None, 16),  # never fewer than the lanes
        (0, 5, 16, None, 16),
        (100, 2, 4, 0.8, 40),  # the faster of two
        (100, 2, 4, 0.2, 10),
        (10_000_000, 2, 4, None, MAX_SHARD_JOBS),
    ],
)
def test_the_next_stretch_is_a_part_of_what_is_left(
    pending: int, workers: int, lanes: int, speed: float | None, expected: int
) -> None:
    assert fair(pending, workers, lanes, speed=speed) == expected


def test_a_fair_share_is_what_each_would_get_of_all() -> None:
    assert [fair_share(100, workers) for workers in (1, 2, 3)] == [100, 50, 34]
    assert fair_share(100, 4, speed=0.5) == 50
    assert fair_share(10_000_000, 2) == MAX_SHARD_JOBS


@pytest.mark.parametrize(
    ("groups", "speed", "stay"),
    [
        ([(1, 0)], 0.5, None),  # one job is left with who has it
        ([(1, 0)] * 2, 0.5, 1),
        ([(1, 0)] * 10, 0.5, 5),
        ([(1, 0)] * 10, 0.2, 8),  # a slow one takes less
        ([(4, HEAD), (6, HEAD)], 0.5, 4),  # between two heads
        ([(20, HEAD), (2, LONG)], 0.5, 20),
        ([(2, LONG)], 0.5, None),  # computing that head again costs more than is gained
        ([(400, HEAD)], 0.5, 207),  # less than a half, for the price of the head
    ],
)
def test_the_second_half_is_taken_where_it_pays(groups: list[tuple[int, int]], speed: float, stay: int | None) -> None:
    assert halved(rows_of(groups), speed=speed) == stay


@given(GROUPS, st.floats(0.05, 0.95))
@settings(max_examples=150, deadline=None)
def test_both_have_something_of_what_is_halved(groups: list[tuple[int, int]], speed: float) -> None:
    rows = rows_of(groups)
    stay = halved(rows, speed=speed)
    assert stay is None or 0 < stay < len(rows)


def test_who_does_not_have_a_head_goes_on_behind_it() -> None:
    rows = rows_of([(5, HEAD), (3, HEAD)])
    assert elsewhere(rows[1].place, rows[2:]) == 3
    assert elsewhere(rows[4].place, rows[5:]) == 0  # it had a whole head
    assert elsewhere(rows[1].place, rows[2:5]) == 0  # there is nothing else
    assert elsewhere(rows[1].place, []) == 0


def test_who_does_not_have_a_document_goes_on_with_the_next() -> None:
    rows = rows_of([(5, HEAD), (3, HEAD)], common=SHORT)
    assert elsewhere(rows[1].place, rows[2:]) == 3
    assert elsewhere(rows[4].place, rows[5:]) == 0


def test_a_stretch_has_what_lies_in_it() -> None:
    rows = rows_of([(1, 0)] * 5)
    stretch = Shard(rows[1].key, rows[3].key, 3)
    assert [row.key in stretch for row in rows] == [False, True, True, True, False]
    assert before(rows[1].key) not in stretch
    assert rows[0].key < before(rows[1].key) < rows[1].key


@given(
    st.lists(st.integers(1, 9), min_size=1, max_size=6),
    st.lists(st.tuples(st.integers(1, 30), st.sampled_from([0, HEAD])), min_size=1, max_size=20),
    st.integers(1, 4),
)
@settings(max_examples=100, deadline=None)
def test_every_job_is_done_once_and_unlike_workers_end_together(
    speeds: list[int], groups: list[tuple[int, int]], lanes: int
) -> None:
    """Workers that do `speed` jobs in a turn, in memory: what is free first, then halves."""
    free, done = rows_of(groups), list[int]()
    all_jobs = {row.id for row in free}
    has: list[list[int]] = [[] for _ in speeds]
    by_id = {row.id: row for row in free}
    turns = 0
    while free or any(has):
        turns += 1
        for worker, speed in enumerate(speeds):
            for _ in range(speed):
                if not has[worker] and free:
                    most = fair(len(free), len(speeds), lanes)
                    taken = cut(free, most, more=False, whole=fair_share(len(free), len(speeds)))
                    has[worker], free = [row.id for row in free[:taken]], free[taken:]
                elif not has[worker]:
                    other = max(range(len(speeds)), key=lambda at: len(has[at]))
                    left = [by_id[job] for job in has[other]]
                    stay = halved(left) if left else None
                    if stay is not None:
                        has[worker], has[other] = has[other][stay:], has[other][:stay]
                if has[worker]:
                    done.append(has[worker].pop(0))
    assert sorted(done) == sorted(all_jobs)
    if all(size == 0 for _, size in groups):
        assert turns <= -(-len(all_jobs) // sum(speeds)) + 2


def test_rows_are_in_the_order_of_the_store() -> None:
    rows = rows_of([(3, HEAD), (2, 0)], common=SHORT)
    assert all(one.key < other.key for one, other in pairwise(rows))
