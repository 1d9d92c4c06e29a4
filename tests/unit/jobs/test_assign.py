"""Heads to runners: every job once, few copies, and an end near the least that is possible."""

from collections import defaultdict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tokenmill.jobs.assign import TOLERANCE, Assignment, Group, Runner, assign

SLACK = 1.002  # ends are tried in steps
TOKENS = st.floats(0, 4000)
GROUPS = st.lists(
    st.tuples(st.integers(0, 400), TOKENS, st.floats(1, 200), st.floats(1, 500)), min_size=1, max_size=30
).map(lambda rows: [Group(bytes([at]), *row) for at, row in enumerate(rows)])
RUNNER = Runner(1000.0, 100.0)


@st.composite
def unlike(draw: st.DrawFn, groups: int) -> list[Runner]:
    """Runners of several speeds, some busy, some with heads."""
    heads = st.frozensets(st.integers(0, groups - 1).map(lambda at: bytes([at])), max_size=4)
    runner = st.builds(
        Runner, st.sampled_from([500.0, 1000.0]), st.sampled_from([50.0, 100.0, 200.0]), heads, st.floats(0, 200)
    )
    return draw(st.lists(runner, min_size=1, max_size=12))


def each_once(made: Assignment, groups: list[Group]) -> None:
    seen = defaultdict[int, set[int]](set)
    for share in made.shares:
        numbers = set(range(share.first, share.first + share.jobs))
        assert numbers, "a share without jobs"
        assert not numbers & seen[share.group], "a job twice"
        seen[share.group] |= numbers
    for at, group in enumerate(groups):
        assert seen[at] == set(range(group.jobs))


def ends_are_true(made: Assignment, groups: list[Group], runners: list[Runner]) -> None:
    ends_s = [runner.free_s for runner in runners]
    for share in made.shares:
        runner, group = runners[share.runner], groups[share.group]
        ends_s[share.runner] += runner.head_s(group) + share.jobs * runner.job_s(group)
    assert made.ends_s == pytest.approx(ends_s)


@given(GROUPS, st.integers(1, 40))
@settings(max_examples=150, deadline=None)
def test_runners_of_one_speed_end_together_with_few_copies(groups: list[Group], count: int) -> None:
    runners = [RUNNER] * count
    made = assign(groups, runners)
    each_once(made, groups)
    ends_are_true(made, groups, runners)
    head_s = max(RUNNER.head_s(group) for group in groups)
    job_s = max(RUNNER.job_s(group) for group in groups)
    assert made.least_s <= made.makespan_s * SLACK
    assert made.makespan_s <= SLACK * TOLERANCE * (made.least_s + 2 * head_s + job_s)
    assert made.copies <= len(groups) + count
    for at, group in enumerate(groups):
        on = {share.runner for share in made.shares if share.group == at}
        own_s = made.least_s - RUNNER.head_s(group) - RUNNER.job_s(group)
        if own_s > 0:
            takes_s = RUNNER.head_s(group) + group.jobs * RUNNER.job_s(group)
            assert len(on) <= 2 + SLACK * takes_s / own_s


@given(st.data(), GROUPS)
@settings(max_examples=150, deadline=None)
def test_runners_of_all_kinds_get_every_job_once(data: st.DataObject, groups: list[Group]) -> None:
    runners = data.draw(unlike(len(groups)))
    made = assign(groups, runners)
    each_once(made, groups)
    ends_are_true(made, groups, runners)
    assert made.least_s <= made.makespan_s * SLACK
    assert assign(groups, runners) == made


def test_a_head_within_a_fair_share_stays_whole() -> None:
    groups = [Group(bytes([at]), 12, 1300.0, 40.0, 64.0) for at in range(200)]
    made = assign(groups, [RUNNER] * 10)
    assert made.copies == 200
    assert made.makespan_s == pytest.approx(made.least_s)


@pytest.mark.parametrize(("count", "copies"), [(1, 1), (2, 2), (10, 10), (100, 100)])
def test_one_head_goes_to_all_runners_where_it_has_work_for_all(count: int, copies: int) -> None:
    group = Group(b"head", 10_000, 1300.0, 40.0, 64.0)
    made = assign([group], [RUNNER] * count)
    assert made.copies == copies
    assert made.makespan_s <= made.least_s + RUNNER.head_s(group) + RUNNER.job_s(group)


def test_a_head_that_costs_more_than_its_jobs_is_not_computed_everywhere() -> None:
    made = assign([Group(b"head", 10, 100_000.0, 10.0, 10.0)], [RUNNER] * 10)
    assert made.copies == 1, "a second copy would end half a second before, of a hundred"


def test_groups_that_do_not_divide_are_cut_rather_than_left_to_one() -> None:
    groups = [Group(bytes([at]), 1000, 100.0, 10.0, 50.0) for at in range(11)]
    made = assign(groups, [RUNNER] * 10)
    assert made.makespan_s < 1.01 * made.least_s, "two whole groups on one runner would take nearly twice as long"
    assert made.copies <= 11 + 9


def test_what_is_warm_goes_where_it_is() -> None:
    groups = [Group(bytes([at]), 20, 5000.0, 10.0, 20.0) for at in range(4)]
    runners = [Runner(1000.0, 100.0, frozenset({bytes([3 - at])})) for at in range(4)]
    made = assign(groups, runners)
    assert made.copies == 0
    assert {(share.runner, share.group) for share in made.shares} == {(at, 3 - at) for at in range(4)}


def test_a_runner_that_is_busy_gets_less_and_a_quick_one_more() -> None:
    runners = [Runner(1000.0, 100.0, free_s=60.0), Runner(1000.0, 100.0), Runner(2000.0, 200.0)]
    made = assign([Group(bytes([at]), 10, 0.0, 1.0, 10.0) for at in range(250)], runners)
    jobs = [sum(share.jobs for share in made.shares if share.runner == at) for at in range(3)]
    assert jobs[0] < jobs[1] < jobs[2]
    assert max(made.ends_s) - min(made.ends_s) < 2


def test_nothing_to_do_and_nobody_to_do_it() -> None:
    assert assign([], [RUNNER]) == Assignment((), (0.0,), 0, 0.0)
    assert assign([Group(b"", 0, 10.0, 1.0, 1.0)], [RUNNER]).shares == ()
    with pytest.raises(ValueError, match="no runner"):
        assign([], [])
    with pytest.raises(ValueError, match="one group"):
        assign([Group(b"a", 1, 1.0, 1.0, 1.0)] * 2, [RUNNER])
