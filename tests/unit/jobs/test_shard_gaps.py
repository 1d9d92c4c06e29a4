"""Where free jobs are looked for: all that is in no stretch, and nothing else."""

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.prefix_rows import rows_of
from tokenmill.jobs.models import JobId, SortKey
from tokenmill.jobs.sharding.policy import Shard, Span, elsewhere, elsewhere_of, gaps

BATCHES, RANKS, PLACES = (1, 2, 3), (-5, 0, 7), (b"\x00", b"a", b"a\x00", b"\xff")
EVERY: list[SortKey] = sorted(
    (rank, batch, place, JobId.of(batch, number))
    for rank, batch, (number, place) in product(RANKS, BATCHES, enumerate([*PLACES, b"a"], 1))
)


@st.composite
def layouts(draw: st.DrawFn) -> list[Shard]:
    """Some stretches, of one batch and priority each, that have no job in common."""
    found = list[Shard]()
    for rank, batch in product(RANKS, BATCHES):
        jobs = [position for position in EVERY if position[:2] == (rank, batch)]
        at = 0
        while at < len(jobs):
            length = draw(st.integers(0, len(jobs) - at))
            if length:
                found.append(Shard(jobs[at], jobs[at + length - 1], length))
            at += max(1, length) if draw(st.booleans()) else length + 1
    return draw(st.permutations(found))


def inside(position: SortKey, span: Span) -> bool:
    return position[1] == span.after[1] and span.after < position < span.until


@given(layouts(), st.sets(st.sampled_from(BATCHES)), st.none() | st.sampled_from(EVERY))
def test_a_job_is_in_a_gap_if_it_is_in_no_stretch(every: list[Shard], batches: set[int], after: SortKey | None) -> None:
    found = gaps(every, sorted(batches), after)
    for position in EVERY:
        free = (
            position[1] in batches
            and (after is None or position > after)
            and not any(position in stretch for stretch in every)
        )
        assert sum(inside(position, span) for span in found) == free
    assert len(found) <= len(every) + len(batches)
    assert all(span.after[1] == span.until[1] for span in found)


@given(layouts())
def test_a_stretch_lies_between_what_is_around_it(every: list[Shard]) -> None:
    for stretch, position in product(every, EVERY):
        assert inside(position, stretch.span) == (position in stretch)


def test_no_batches_have_no_gaps() -> None:
    assert gaps([Shard(EVERY[0], EVERY[1], 2)], [], None) == []


@pytest.mark.parametrize("common", [0, 1024])
@given(
    groups=st.lists(st.tuples(st.integers(1, 5), st.sampled_from([0, 1024, 4096])), min_size=1, max_size=6),
    data=st.data(),
)
def test_what_is_left_to_several_is_the_most_that_is_left_to_one(
    common: int, groups: list[tuple[int, int]], data: st.DataObject
) -> None:
    rows = rows_of(groups, common=common)
    first = data.draw(st.integers(0, len(rows)))
    places = [row.place for row in data.draw(st.lists(st.sampled_from(rows)))]
    left = rows[first:]
    assert elsewhere_of(places, left) == max((elsewhere(place, left) for place in places), default=0)
