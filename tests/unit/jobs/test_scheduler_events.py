"""What happens to jobs in flight, engines, slots and widths, and what the scheduler makes of it."""

import random

import pytest

from support.prefix_keys import long_key
from support.slot_engine import CachingEngine, Engine, Event, Night, SharingEngine, SlotEngine, Work
from tokenmill.engine.engine import Usage
from tokenmill.jobs.ingest.identity import CHUNK_BYTES
from tokenmill.jobs.scheduler.cache_model import CacheModel
from tokenmill.jobs.scheduler.decisions import Dispatch, Fetch, Wait
from tokenmill.jobs.scheduler.prefix_groups import Pending, minimum
from tokenmill.jobs.scheduler.scheduler import SLOT_WINDOW, WINDOW, Scheduler
from tokenmill.jobs.scheduler.shape import EngineShape, Reuse

SHAPES = [
    EngineShape("shares", 4, look_ahead=2),
    EngineShape("slots", 4, 4),
    EngineShape("prefix cache", 4),
    EngineShape("none", 4),
]
BY_REUSE = [pytest.param(shape, id=shape.reuse) for shape in SHAPES]


def engine_for(shape: EngineShape) -> Engine:
    kinds: dict[Reuse, Engine] = {
        "shares": SharingEngine(shape.width),
        "slots": SlotEngine(shape.width),
        "prefix cache": CachingEngine(),
        "none": Engine(),
    }
    return kinds[shape.reuse]


def some_works(groups: int = 4, jobs: int = 40) -> list[Work]:
    draw = random.Random(3)
    heads = [draw.randbytes(3 * CHUNK_BYTES) for _ in range(groups)]
    return [Work(job, heads[job % groups] + draw.randbytes(70), 10) for job in range(jobs)]


def dispatches(scheduler: Scheduler) -> list[Dispatch]:
    return [decision for decision in scheduler.decide() if isinstance(decision, Dispatch)]


def test_an_idle_scheduler_asks_for_jobs_and_then_waits() -> None:
    scheduler = Scheduler(SHAPES[0])
    assert scheduler.decide() == (Fetch(WINDOW),)
    assert scheduler.decide() == (Wait("no_jobs"),)
    scheduler.available([], more=False)
    assert scheduler.decide() == (Wait("no_jobs"),)
    assert Scheduler(SHAPES[1]).decide() == (Fetch(SLOT_WINDOW),)


def test_more_jobs_are_asked_for_before_the_window_is_empty() -> None:
    scheduler = Scheduler(EngineShape("none", 2), window=10)
    assert scheduler.decide() == (Fetch(10),)
    scheduler.available((Pending(job, b"", 5) for job in range(10)), more=True)
    asked = []
    for job in range(10):
        asked += [decision for decision in scheduler.decide() if isinstance(decision, Fetch)]
        assert scheduler.pending <= 10
        scheduler.finished(job)
    assert asked == [Fetch(5)]
    scheduler.reopen_stream()
    assert scheduler.decide() == (Fetch(10),)


def test_jobs_that_are_known_are_left_alone() -> None:
    scheduler = Scheduler(EngineShape("none", 1))
    records = [Pending(job, b"", 5) for job in range(3)]
    scheduler.available(records, more=False)
    assert [sent.job for sent in dispatches(scheduler)] == [0]
    scheduler.available(records)
    assert scheduler.pending == 2
    assert scheduler.in_flight == (0,)


@pytest.mark.parametrize("shape", BY_REUSE)
def test_a_failed_job_is_sent_again_or_not(shape: EngineShape) -> None:
    works, failed = some_works(), dict[int, int]()

    def meanwhile(night: Night) -> None:
        for job in night.scheduler.in_flight:
            if job % 5 == 0 and failed.get(job, 0) < 1 + (job % 10 == 0):
                failed[job] = failed.get(job, 0) + 1
                night.engine.drop(job)
                night.scheduler.failed(job, again=failed[job] < 2)
                return

    night = Night(Scheduler(shape), engine_for(shape), works, meanwhile=meanwhile).run()
    assert set(failed) == {0, 5, 10, 15, 20, 25, 30, 35}
    assert sorted(night.done) == [job for job in range(40) if job % 10]
    assert all(night.order.count(job) == 1 + (job % 5 == 0) for job in range(40))


@pytest.mark.parametrize("shape", BY_REUSE)
def test_nothing_is_lost_with_an_engine_and_all_is_cold_after_it(shape: EngineShape) -> None:
    works, lost = some_works(), list[tuple[int, ...]]()

    def meanwhile(night: Night) -> None:
        if len(night.done) == 15 and not lost:
            in_flight = night.scheduler.in_flight
            lost.append(night.scheduler.engine_lost())
            night.engine.die()
            assert lost[0] == in_flight
            assert night.scheduler.decide()[-1] == Wait("engine_down")
            night.scheduler.engine_back()
            sent = [decision for decision in night.scheduler.decide() if isinstance(decision, Dispatch)]
            if shape.reuse != "shares":
                assert all(each.expected_bytes == 0 for each in sent), "nothing is there to be found"
            night.order += [each.job for each in sent]
            for each in sent:
                night.engine.send(works[each.job], each.slot)
                night.scheduler.started(each.job)

    night = Night(Scheduler(shape), engine_for(shape), works, meanwhile=meanwhile).run()
    assert lost[0]
    assert sorted(night.done) == list(range(40)), "each answered once"
    assert all(night.order.count(job) == 1 + (job in lost[0]) for job in range(40))
    if shape.reuse in ("shares", "prefix cache"):
        head = 3 * CHUNK_BYTES
        redone = sum(len(works[job].prompt) for job in lost[0])
        assert night.engine.computed <= minimum(work.prompt for work in works) + redone + 2 * head


@pytest.mark.parametrize("shape", BY_REUSE)
def test_withdrawn_jobs_are_neither_sent_nor_waited_for(shape: EngineShape) -> None:
    works = some_works()
    night = Night(Scheduler(shape), engine_for(shape), works)
    night.act()
    running = night.scheduler.in_flight[0]
    gone = [running, *(job for job in range(40) if job % 3 == 0 and job not in night.scheduler.in_flight), 999]
    night.engine.drop(running)
    night.scheduler.withdraw(gone)
    night.run()
    assert sorted(night.done) == sorted(set(range(40)) - set(gone))


def test_followers_of_a_leader_that_went_find_what_is_left() -> None:
    """Sent to an engine that makes them wait, and the leader was answered from elsewhere."""
    scheduler = Scheduler(EngineShape("shares", 3, look_ahead=2))
    works = some_works(1, 5)
    scheduler.available((work.record for work in works), more=False)
    sent = dispatches(scheduler)
    assert [each.expected_bytes for each in sent] == [0, 1536, 1536, 1536, 1536]
    scheduler.withdraw([sent[0].job])
    again = [scheduler.finished(each.job) for each in sent[1:]]
    assert [each.expected_bytes for each in again] == [0, 1536, 1536, 1536]
    assert again[0].source_job is None
    assert again[1].source_job == again[0].job


def test_a_slot_keeps_what_it_had_where_a_job_was_never_started() -> None:
    scheduler = Scheduler(EngineShape("slots", 1, 1))
    works = some_works(1, 4)
    scheduler.available((work.record for work in works), more=False)
    first = dispatches(scheduler)[0]
    scheduler.finished(first.job, Usage(400, 10, 0))
    second = dispatches(scheduler)[0]
    scheduler.withdraw([second.job])  # an equal one has an answer
    third = dispatches(scheduler)[0]
    assert (third.expected_bytes, third.source_job) == (1536, first.job)
    scheduler.started(third.job)
    scheduler.failed(third.job, again=False)
    assert dispatches(scheduler)[0].expected_bytes == 0, "what a failure left is not known"


@pytest.mark.parametrize("shape", BY_REUSE)
def test_interactive_work_takes_slots_as_they_become_free(shape: EngineShape) -> None:
    works = some_works()
    night = Night(Scheduler(shape), engine_for(shape), works)
    night.act()
    night.scheduler.set_interactive(3)
    for _ in range(60):
        night.report(night.engine.step())
        before = len(night.scheduler.in_flight)
        night.act()
        if len(night.scheduler.in_flight) > before:
            assert len(night.scheduler.in_flight) <= 1 + shape.look_ahead
    night.scheduler.set_interactive(9)
    while night.scheduler.in_flight:
        night.report(night.engine.step())
        assert not dispatches(night.scheduler)
    assert night.scheduler.decide() == (Wait("interactive"),)
    night.scheduler.set_interactive(0)
    night.run()
    assert sorted(night.done) == list(range(40))


def on(job: int, *chunks: bytes, priority: int = 0) -> Pending:
    """A job whose prompt is these chunks, with an answer that is always worth a slot if there are a few."""
    return Pending(job, long_key(*chunks), CHUNK_BYTES * len(chunks), 200.0, priority, max_tokens=200)


def test_a_slot_does_not_join_a_head_while_others_may_be_coming() -> None:
    scheduler = Scheduler(EngineShape("slots", 2, 2), window=20)
    scheduler.available((on(job, b"aaaa", b"a%03d" % job) for job in range(9)), more=True)
    asked, leader = scheduler.decide()
    assert isinstance(asked, Fetch)
    assert isinstance(leader, Dispatch)
    scheduler.available((on(job, b"bbbb", b"b%03d" % job) for job in range(9, 12)), more=False)
    (other,) = dispatches(scheduler)
    assert (leader.job < 9, other.job < 9) == (True, False)


def test_without_others_the_same_slot_does_join() -> None:
    scheduler = Scheduler(EngineShape("slots", 2, 2), window=20)
    scheduler.available((on(job, b"aaaa", b"a%03d" % job) for job in range(9)), more=False)
    assert [sent.expected_bytes for sent in dispatches(scheduler)] == [0, 0]


def test_a_head_is_claimed_by_a_job_that_was_sent_before_its_others_came() -> None:
    scheduler = Scheduler(EngineShape("slots", 2, 2))
    shared = [b"aaaa"] * 8
    scheduler.available([on(0, *shared, b"xxxx")], more=False)
    assert len(dispatches(scheduler)) == 1
    scheduler.available([on(1, *shared, b"yyyy", b"1111"), on(2, *shared, b"yyyy", b"2222")])
    assert len(dispatches(scheduler)) == 0, "400 tokens of answers are not worth 1024 of head"
    scheduler.finished(0)
    assert [sent.expected_bytes for sent in dispatches(scheduler)] == [4096]


def test_the_slot_whose_head_nobody_needs_is_overwritten_first() -> None:
    scheduler = Scheduler(EngineShape("slots", 1, 3))
    scheduler.available((on(job, b"aaaa", b"a%03d" % job) for job in range(4)), more=False)
    (first,) = dispatches(scheduler)
    scheduler.finished(first.job)
    scheduler.available([on(9, b"bbbb", b"9999", priority=1)])
    (urgent,) = dispatches(scheduler)
    assert urgent.job == 9
    assert urgent.slot != first.slot
    scheduler.finished(9)
    (follower,) = dispatches(scheduler)
    assert (follower.slot, follower.expected_bytes) == (first.slot, CHUNK_BYTES)


def test_what_must_have_gone_from_the_cache_is_not_expected() -> None:
    """Room for two prompts: the third drives out the one that was used longest ago, unless it runs."""
    kinds: tuple[Reuse, ...] = ("shares", "prefix cache")
    for reuse in kinds:
        warmth = CacheModel(EngineShape(reuse, 4, cells_total=2100), tokens=lambda count: count)
        records = [on(job, name, b"0000") for job, name in enumerate((b"aaaa", b"bbbb", b"cccc"))]
        for record in records[:2]:
            warmth.sent(record)
            warmth.warmed(record)
        warmth.ended(records[1], answered=True)
        warmth.sent(records[2])
        warmth.warmed(records[2])
        assert [warmth.find(on(9, name, b"1111"))[0] for name in (b"aaaa", b"bbbb", b"cccc")] == [512, 0, 512]
        warmth.clear()
        assert warmth.find(on(9, b"cccc", b"1111")) == (0, None)


def test_reasons_to_wait_are_said() -> None:
    scheduler = Scheduler(EngineShape("slots", 2, 2))
    scheduler.available((work.record for work in some_works(1, 9)), more=False)
    assert len(dispatches(scheduler)) == 1
    assert scheduler.decide() == (Wait("recompute_too_costly"),)
    tight = Scheduler(EngineShape("shares", 4, cells_total=420))
    tight.available((work.record for work in some_works(4, 9)), more=False)
    (first,) = dispatches(tight)
    tight.first_token(first.job)
    assert tight.decide() == (Wait("kv_cache_full"),)
    assert any("cells" in note and "4 jobs" in note for note in tight.notes)
    full = Scheduler(EngineShape("none", 2))
    full.available((work.record for work in some_works(1, 2)), more=False)
    assert len(dispatches(full)) == 2
    assert full.decide() == (Wait("all_in_flight"),)
    full.available([Pending(77, b"", 1)])
    assert full.decide() == (Wait("max_in_flight"),)


def test_an_event_is_what_the_engine_says() -> None:
    """The first token of a job that was not reported as started says that it was."""
    scheduler = Scheduler(EngineShape("prefix cache", 2))
    works = some_works(1, 2)
    scheduler.available((work.record for work in works), more=False)
    (leader,) = dispatches(scheduler)
    event = Event("first token", leader.job)
    scheduler.first_token(event.job)
    (follower,) = dispatches(scheduler)
    assert (follower.expected_bytes, follower.source_job, follower.leader) == (1536, leader.job, False)
    assert follower.expected_tokens == 384


def test_an_engine_that_keeps_states_is_told_where_the_prompt_of_a_leader_branches() -> None:
    records = [Pending(number, long_key(b"aaaa") + bytes([number] * 4), 2000) for number in range(3)]
    for needs, later in ((True, (1, 2)), (False, ())):
        scheduler = Scheduler(EngineShape("shares", 1, needs_branches=needs))
        scheduler.available(records, more=False)
        first, *_ = scheduler.decide()
        assert isinstance(first, Dispatch)
        assert (first.job, first.later) == (0, later)
