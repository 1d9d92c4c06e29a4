"""Priorities and deadlines jump the queue; inside, the order stays."""

import random
from dataclasses import replace
from itertools import groupby

import pytest

from support.slot_engine import CachingEngine, Night, SharingEngine, Work
from tokenmill.jobs.ingest.identity import CHUNK_BYTES
from tokenmill.jobs.models import JobId
from tokenmill.jobs.scheduler.backlog import UNKNOWN_SPEED_RISK_S, Backlog
from tokenmill.jobs.scheduler.estimates import MeasuredRates
from tokenmill.jobs.scheduler.prefix_groups import Pending, minimum
from tokenmill.jobs.scheduler.scheduler import Scheduler
from tokenmill.jobs.scheduler.shape import EngineShape

RATES = MeasuredRates(1000.0, ((1, 50.0), (4, 200.0)))
DRAW = random.Random(13)
HEADS = sorted(DRAW.randbytes(2 * CHUNK_BYTES) for _ in range(5))


def works(
    count: int = 40, *, urgent: range = range(0), deadline_s: float = 100.0, priorities: tuple[int, ...] = (0,)
) -> list[Work]:
    draw = random.Random(12)
    return [
        Work(
            job,
            HEADS[job % 5] + draw.randbytes(40),
            10,
            priorities[job % 7 % len(priorities)],
            deadline_s if job in urgent else None,
        )
        for job in range(count)
    ]


def heads_in_order(night: Night) -> list[int]:
    return [
        head for head, _ in groupby(HEADS.index(night.by_job[job].prompt[: 2 * CHUNK_BYTES]) for job in night.order)
    ]


def shape(rates: MeasuredRates | None = None, width: int = 1) -> EngineShape:
    return EngineShape("shares", width, rates=rates or MeasuredRates())


def test_higher_priorities_go_first_and_each_in_head_order() -> None:
    night = Night(Scheduler(shape()), SharingEngine(1), works(70, priorities=(0, 5, -3))).run()
    ranks = [night.by_job[job].priority for job in night.order]
    assert ranks == sorted(ranks, reverse=True)
    assert len(heads_in_order(night)) <= 15
    for rank in (5, 0, -3):
        heads = [night.by_job[job].prompt[:9] for job in night.order if night.by_job[job].priority == rank]
        assert len(list(groupby(heads))) == 5, "no group was left and entered again"


@pytest.mark.parametrize("window", [6, 4096])
def test_the_older_of_two_batches_goes_first(window: int) -> None:
    """Though they have the same heads: whoever came second does not delay the first."""
    both = [replace(work, job=JobId.of(batch, work.job)) for batch in (2, 1) for work in works(40)]
    night = Night(Scheduler(shape(), window=window), SharingEngine(1), both).run()
    assert [JobId.batch(job) for job in night.order] == [1] * 40 + [2] * 40
    for batch in (1, 2):
        heads = [night.by_job[job].prompt[:9] for job in night.order if JobId.batch(job) == batch]
        assert len(list(groupby(heads))) == 5
    if window > 80:  # all are at hand
        assert len({night.by_job[job].prompt[:9] for job in night.order[38:42]}) == 1, "it begins with what is warm"


def test_slots_that_a_batch_cannot_fill_are_for_the_next() -> None:
    both = [Work(job, b"%d" % job * 900, 10) for job in (JobId.of(1, 0), JobId.of(2, 0), JobId.of(2, 1))]
    night = Night(Scheduler(shape(width=2)), SharingEngine(2), both)
    night.act()
    assert [JobId.batch(job) for job in night.order] == [1, 2]


def test_a_later_batch_of_higher_priority_goes_first() -> None:
    both = [Work(JobId.of(batch, 0), b"%d" % batch * 900, 10, priority=batch) for batch in (1, 2, 3)]
    night = Night(Scheduler(shape()), SharingEngine(1), both).run()
    assert [JobId.batch(job) for job in night.order] == [3, 2, 1]


def test_a_later_batch_that_is_at_hand_does_not_lose_its_patience() -> None:
    """Four windows of its own batch may pass before a job, however many of an earlier one do."""
    scheduler = Scheduler(EngineShape("shares", 1), window=8)
    later = [Pending(JobId.of(2, job), b"zzzz", 600, 5.0) for job in range(3)]
    scheduler.available(later, more=False)
    sent = list[int]()
    for job in range(1, 100):
        scheduler.available([Pending(JobId.of(1, job), b"aaaa", 600, 5.0)])
        (decision,) = scheduler.decide()
        sent.append(getattr(decision, "job", -1))
        scheduler.finished(sent[-1])
    assert {JobId.batch(job) for job in sent} == {1}


def test_a_new_job_of_higher_priority_is_next() -> None:
    night = Night(Scheduler(shape()), SharingEngine(1), works())
    for _ in range(10):
        night.act()
        night.report_next()
    night.by_job[99] = Work(99, b"another" * 200, 10, priority=1)
    night.scheduler.available([night.by_job[99].record])
    before = len(night.order)
    night.run()
    assert night.order[before] == 99
    assert sorted(night.done) == [*range(40), 99]


@pytest.mark.parametrize(
    ("rates", "now_s", "jumps"),
    [
        (RATES, 0.0, False),
        (RATES, 9_800.0, False),
        (RATES, 9_990.0, True),
        (None, 10_000.0 - UNKNOWN_SPEED_RISK_S - 1, False),
        (None, 10_000.0 - UNKNOWN_SPEED_RISK_S + 1, True),
    ],
)
def test_a_deadline_jumps_the_queue_when_it_is_in_danger(
    rates: MeasuredRates | None, now_s: float, jumps: bool
) -> None:
    night = Night(Scheduler(shape(rates)), SharingEngine(1), works(urgent=range(17, 18), deadline_s=10_000.0))
    night.act()
    first = night.order[0]
    in_line = Night(Scheduler(shape(rates)), SharingEngine(1), works()).run().order
    assert first == in_line[0]
    assert first % 5 != 17 % 5
    night.scheduler.advance_clock(now_s)
    night.run()
    if not jumps:
        assert night.order == in_line
        return
    assert night.order[1] == 17
    # Its group is at hand now and is worked in its own order; what was left is worked after that.
    assert [job % 5 for job in night.order[1:9]] == [2] * 8
    assert sorted(night.done) == list(range(40))
    assert night.engine.computed <= minimum(work.prompt for work in works()) + 2 * CHUNK_BYTES


def test_jobs_in_danger_are_worked_by_head_and_the_nearest_group_first() -> None:
    jobs = [
        Work(work.job, work.prompt, 10, 0, {0: 500.0, 1: 400.0, 3: 450.0}.get(work.job % 5) if work.job < 20 else None)
        for work in works()
    ]
    night = Night(Scheduler(shape(RATES)), SharingEngine(1), jobs)
    night.scheduler.decide()
    night.scheduler.available((job.record for job in sorted(jobs, key=lambda job: job.record.prefix_key)), more=False)
    night.scheduler.advance_clock(480.0)
    night.run()
    urgent = [job % 5 for job in night.order[:12]]
    assert urgent == [1] * 4 + [3] * 4 + [0] * 4


def test_what_is_due_before_a_job_in_danger_is_in_danger_too() -> None:
    """A hundred jobs of one second each, all due in 200: alone none would be late, together the last would."""
    scheduler = Scheduler(EngineShape("shares", 1, rates=MeasuredRates(1e9, ((1, 50.0),))))
    records = [Pending(job, bytes([job] * 4), 10, 50.0, deadline_s=200.0, max_tokens=50) for job in range(1, 101)]
    first = Pending(0, b"\0\0\0\0", 10, 50.0, max_tokens=50)
    for now_s, next_job in ((0.0, 0), (20.0, 1)):
        scheduler = Scheduler(EngineShape("shares", 1, rates=MeasuredRates(1e9, ((1, 50.0),))))
        scheduler.available([first, *records], more=False)
        scheduler.advance_clock(now_s)
        (sent,) = scheduler.decide()
        assert getattr(sent, "job", None) == next_job, now_s


def test_deadlines_are_not_looked_at_more_often_than_needed() -> None:
    backlog, looks = Backlog(final="longest", window=8), list[int]()

    def cost(record: Pending) -> tuple[float, float]:
        looks.append(record.job)
        return 0.0, 0.0

    backlog.add(work.record for work in works(urgent=range(40)))
    far = ((-500.0, 40), (-499.0, 40), (-440.5, 40), (-439.5, 80))  # a look in a minute is enough
    near = ((35.0, 120), (36.0, 120), (36.5, 160), (37.6, 200))  # of the hundred, sixty are kept in reserve
    for now_s, seen in (*far, *near, (-600.0, 240)):  # a clock that is set back
        backlog.advance_clock(now_s, cost)
        assert len(looks) == seen, now_s
    backlog.add([Pending(99, b"newwhead", 10, deadline_s=1.0)])
    backlog.advance_clock(-599.9, cost)
    assert len(looks) == 281, "a new one is looked at at once"


def test_nobody_is_passed_over_for_ever() -> None:
    """A group that is fed all the time, and a job of another group that came before: it is sent all the same."""
    scheduler = Scheduler(EngineShape("prefix cache", 1), window=8)
    scheduler.available([Pending(0, b"zzzz0000", 600, 5.0), Pending(1, b"aaaa0001", 600, 5.0)], more=False)
    sent = list[int]()
    for job in range(2, 200):
        scheduler.available([Pending(job, b"aaaa" + job.to_bytes(4, "big"), 600, 5.0)])
        (decision,) = scheduler.decide()
        number = getattr(decision, "job", -1)
        sent.append(number)
        scheduler.finished(number)
    assert 0 in sent
    assert 8 < sent.index(0) <= 4 * 8 + 2, "four windows of later ones, and one that waited as long"
    assert len(set(sent)) == len(sent)


@pytest.mark.parametrize("priority", [0, 3])
def test_slots_are_kept_for_urgent_followers_while_their_head_is_computed(priority: int) -> None:
    """Otherwise the others would take them, and keep them for as long as their answers are."""
    jobs = [Work(work.job, work.prompt, 10, priority if work.job % 5 == 3 else 0) for work in works()]
    night = Night(Scheduler(EngineShape("prefix cache", 4)), CachingEngine(), jobs)
    night.act()
    assert len(night.order) == 1
    night.run()
    if priority:
        assert [job % 5 for job in night.order[:8]] == [3] * 8
