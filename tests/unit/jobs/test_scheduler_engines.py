"""Prompt bytes computed on simulated engines, against the least that is possible, and how long a night takes."""

import random

import pytest

from support.slot_engine import DECODE_S, CachingEngine, Engine, Night, SharingEngine, SlotEngine, Work
from tokenmill.engine.engine import Usage
from tokenmill.jobs.ingest.identity import CHUNK_BYTES
from tokenmill.jobs.scheduler.costs import (
    RECOMPUTE_LENGTHS_UNKNOWN,
    RECOMPUTE_RATE_ASSUMED,
    RECOMPUTE_WITHOUT_RATES,
)
from tokenmill.jobs.scheduler.estimates import MeasuredRates
from tokenmill.jobs.scheduler.prefix_groups import minimum
from tokenmill.jobs.scheduler.scheduler import Scheduler
from tokenmill.jobs.scheduler.shape import EngineShape, Reuse

HEAD = 5200  # bytes: not a whole number of chunks
BYTE_RATES = MeasuredRates(1000.0, ((1, 50.0), (2, 100.0), (4, 200.0), (8, 400.0)))
FLAT_RATES = MeasuredRates(1000.0, ((1, 50.0), (8, 50.0)))


def digests(count: int = 4, jobs: int = 48, *, head: int = HEAD, output: int = 48, seed: int = 1) -> list[Work]:
    """Jobs over a few long heads, shuffled."""
    draw = random.Random(seed)
    heads = [draw.randbytes(head) for _ in range(count)]
    prompts = [heads[number % count] + draw.randbytes(draw.randint(100, 400)) for number in range(jobs)]
    draw.shuffle(prompts)
    return [Work(number, prompt, output) for number, prompt in enumerate(prompts)]


def nested(seed: int = 2) -> list[Work]:
    """Questions about documents under one instruction, every head a whole number of chunks."""
    draw = random.Random(seed)
    system = draw.randbytes(2 * CHUNK_BYTES)
    documents = [system + draw.randbytes(CHUNK_BYTES * draw.randint(2, 8)) for _ in range(12)]
    works = [
        Work(0, document + bytes([question]) + draw.randbytes(60), draw.randint(5, 90))
        for document in documents
        for question in range(draw.randint(1, 7))
    ]
    draw.shuffle(works)
    return [Work(number, work.prompt, work.output) for number, work in enumerate(works)]


def least(works: list[Work]) -> int:
    return minimum(work.prompt for work in works)


def scheduler(
    reuse: Reuse, width: int, *, cells: int | None = None, window: int = 4096, rates: MeasuredRates | None = None
) -> Scheduler:
    slots = width if reuse == "slots" else None
    ahead = 4 if reuse == "shares" else 0
    return Scheduler(EngineShape(reuse, width, slots, ahead, cells, rates or MeasuredRates()), window=window)


@pytest.mark.parametrize("slots", [1, 2, 4, 8])
@pytest.mark.parametrize("rates", [None, BYTE_RATES, FLAT_RATES], ids=["no rates", "rates", "flat rates"])
def test_slots_compute_shuffled_digests_once_for_each_slot_at_most(slots: int, rates: MeasuredRates | None) -> None:
    works = digests()
    night = Night(scheduler("slots", slots, rates=rates), SlotEngine(slots), works).run()
    extra = max(0, len(night.engine.slots_used) - 4)
    assert night.engine.computed <= 1.02 * least(works) + extra * HEAD
    assert sorted(night.done) == list(range(48))
    assert night.most_in_flight <= slots


def test_slots_in_file_order_are_what_this_is_against() -> None:
    """The same engine without pins and order computes three times as much, as measured on the real one."""
    works, engine = digests(), SlotEngine(8)
    for number, work in enumerate(works):
        if number >= 8:
            while engine.step().kind != "finished":
                pass
        engine.send(work, None)
    assert engine.computed > 2.5 * least(works)


@pytest.mark.parametrize(
    ("rates", "slots"),
    [
        (None, 1),  # answers of 12 jobs on two slots are not as long as the head
        (BYTE_RATES, 4),  # slots add up, and the head costs five seconds
        (FLAT_RATES, 1),  # another slot writes nothing more
    ],
)
def test_one_digest_is_spread_over_slots_only_where_it_pays(rates: MeasuredRates | None, slots: int) -> None:
    works = digests(1, 24, output=100)
    night = Night(scheduler("slots", 4, rates=rates), SlotEngine(4), works).run()
    assert len(night.engine.slots_used) == slots
    assert night.engine.computed <= 1.02 * least(works) + (slots - 1) * HEAD
    if rates is None:
        assert RECOMPUTE_WITHOUT_RATES in night.scheduler.notes


def test_spreading_without_rates_needs_answers_as_long_as_the_head_on_each_slot() -> None:
    works = digests(1, 96, output=400)
    night = Night(scheduler("slots", 4), SlotEngine(4), works).run()
    assert len(night.engine.slots_used) == 4
    assert night.engine.computed <= 1.02 * least(works) + 3 * HEAD


@pytest.mark.parametrize(
    ("rates", "slots"),
    [
        (((1, 50.0),), 4),  # nothing is known of two: it is hoped for, and what is found then is not told here
        (((1, 50.0), (2, 100.0)), 4),
        (((1, 50.0), (2, 51.0), (3, 51.0), (4, 51.0)), 1),  # tried, and not worth it
        (((4, 200.0),), 4),  # only wider was ever measured
        ((), 1),
    ],
)
def test_what_a_run_has_measured_spreads_a_head_where_that_pays(
    rates: tuple[tuple[int, float], ...], slots: int
) -> None:
    works = digests(1, 24, output=100)
    night = Night(scheduler("slots", 4), SlotEngine(4), works)
    night.scheduler.measured(MeasuredRates(1000.0, rates))
    night.run()
    assert len(night.engine.slots_used) == slots
    hoped = RECOMPUTE_RATE_ASSUMED in night.scheduler.notes
    assert hoped == (len(rates) in (1, 2) and rates[-1][0] < 4)


def test_what_was_measured_before_stands_where_the_run_tells_nothing() -> None:
    works = digests(1, 24, output=100)
    night = Night(scheduler("slots", 4, rates=FLAT_RATES), SlotEngine(4), works)
    night.scheduler.measured(MeasuredRates(None, ((8, 50.0),)))
    night.run()
    assert len(night.engine.slots_used) == 1


def test_a_head_stays_on_its_slot_until_it_is_known_how_long_answers_are() -> None:
    works = [Work(work.job, work.prompt, 400, expected=False) for work in digests(1, 96)]
    night = Night(scheduler("slots", 4), SlotEngine(4), works)
    night.act()
    assert night.most_in_flight == 1
    assert RECOMPUTE_LENGTHS_UNKNOWN in night.scheduler.notes
    night.run()
    assert night.most_in_flight == 4


def test_slots_keep_documents_apart_and_share_what_is_above_them_at_a_slot_each() -> None:
    works = nested()
    night = Night(scheduler("slots", 4, rates=BYTE_RATES), SlotEngine(4), works).run()
    assert len(night.engine.slots_used) == 4
    # The instruction once for each slot; at the end a slot may join another one's document.
    assert least(works) <= night.engine.computed <= least(works) + 3 * 2 * CHUNK_BYTES + 10 * CHUNK_BYTES


ENGINES: list[tuple[Reuse, type[Engine]]] = [("shares", SharingEngine), ("prefix cache", CachingEngine)]


def engine_of(kind: type[Engine], width: int, cells: int | None) -> Engine:
    return SharingEngine(width, cells) if kind is SharingEngine else CachingEngine(cells)


@pytest.mark.parametrize(("reuse", "kind"), ENGINES)
@pytest.mark.parametrize("width", [1, 3, 8])
@pytest.mark.parametrize("window", [6, 64, 4096])
def test_nothing_is_computed_twice_with_room_for_everything(
    reuse: Reuse, kind: type[Engine], width: int, window: int
) -> None:
    works = nested()
    night = Night(scheduler(reuse, width, window=window), engine_of(kind, width, None), works).run()
    assert night.engine.computed == least(works)
    assert sorted(night.done) == [work.job for work in works]
    assert night.most_in_flight <= width + (4 if reuse == "shares" else 0)


@pytest.mark.parametrize(("reuse", "kind"), ENGINES)
@pytest.mark.parametrize("width", [1, 4, 8])
def test_nothing_is_computed_twice_with_room_for_one_digest(reuse: Reuse, kind: type[Engine], width: int) -> None:
    """Cells for two heads and a few tails: the order alone keeps each head until its jobs are done."""
    works, cells = digests(4, 60), 2 * HEAD + 8 * 500
    night = Night(scheduler(reuse, width, cells=cells), engine_of(kind, width, cells), works).run()
    assert night.engine.computed <= 1.001 * least(works)


@pytest.mark.parametrize(("reuse", "kind"), ENGINES)
def test_fewer_run_at_once_where_cells_are_short_and_that_is_said(reuse: Reuse, kind: type[Engine]) -> None:
    works, cells = digests(2, 40), HEAD + 4 * 450
    night = Night(scheduler(reuse, 16, cells=cells), engine_of(kind, 16, cells), works)
    night.scheduler.lengths.finished(works[0].record, Usage(len(works[0].prompt), 48, 0))
    night.run()
    assert night.most_in_flight <= 8
    assert any("cells" in note for note in night.scheduler.notes)
    assert night.engine.computed <= 1.01 * least(works)


def test_a_prefix_cache_gets_one_leader_and_then_the_others() -> None:
    works = digests(1, 10)
    night = Night(scheduler("prefix cache", 4), CachingEngine(), works)
    night.act()
    assert len(night.order) == 1
    assert night.sent[night.order[0]].leader
    assert night.waits == ["prefix_pending"]
    night.report(night.engine.step())
    night.act()
    assert len(night.order) == 4
    assert not any(night.sent[job].leader for job in night.order[1:])
    assert {night.sent[job].source_job for job in night.order[1:]} == {night.order[0]}


def test_leaders_of_small_groups_fill_the_slots() -> None:
    works = digests(6, 12)
    night = Night(scheduler("prefix cache", 4), CachingEngine(), works)
    night.act()
    assert len(night.order) == 2, "two leaders, and slots for the follower of each"
    night.run()
    assert night.engine.computed <= 1.001 * least(works)


@pytest.mark.parametrize(("reuse", "kind"), ENGINES)
@pytest.mark.parametrize("width", [2, 8])
def test_what_is_expected_is_found(reuse: Reuse, kind: type[Engine], width: int) -> None:
    for works in (nested(), digests()):
        night = Night(scheduler(reuse, width), engine_of(kind, width, None), works).run()
        assert len(night.sent) == len(works)
        for job, sent in night.sent.items():
            found = night.engine.found[job]
            assert sent.expected_bytes <= found < sent.expected_bytes + CHUNK_BYTES
            assert (sent.source_job is None) == (sent.expected_bytes == 0)


def test_what_is_expected_is_found_on_slots() -> None:
    night = Night(scheduler("slots", 4), SlotEngine(4), digests()).run()
    assert len(night.sent) == len(digests())
    for job, sent in night.sent.items():
        assert sent.slot in range(4)
        assert sent.expected_bytes <= night.engine.found[job] < sent.expected_bytes + CHUNK_BYTES
    assert sum(sent.leader for sent in night.sent.values()) == 4
    assert {sent.expected_bytes for sent in night.sent.values()} == {0, HEAD // CHUNK_BYTES * CHUNK_BYTES}


@pytest.mark.parametrize(("reuse", "kind"), [*ENGINES, ("none", Engine)])
def test_a_long_answer_is_not_left_for_the_end(reuse: Reuse, kind: type[Engine]) -> None:
    """The group with the longest answer, and 250 others, comes first; in the next one is another long answer."""
    draw = random.Random(6)
    heads = [draw.randbytes(2 * CHUNK_BYTES) for _ in range(2)]
    outputs = [(0, 700), *[(0, 20)] * 250, *[(1, 20)] * 10, (1, 600)]
    works = [Work(job, heads[at] + draw.randbytes(80), output) for job, (at, output) in enumerate(outputs)]
    engine = Engine() if kind is Engine else engine_of(kind, 4, None)
    night = Night(scheduler(reuse, 4), engine, works).run()
    assert night.ended_s[-1] - night.ended_s[-2] < 0.2 * 600 * DECODE_S, "one job had the engine for itself"
    before = night.order.index(261)
    assert 100 < before < 200, "no sooner than needed"
    if reuse != "none":
        assert night.engine.computed <= 1.001 * least(works)
        at = [outputs[job][0] for job in night.order if job != 261]
        assert at == sorted(at), "the order went on where it was"


@pytest.mark.parametrize("seed", range(5))
def test_large_groups_go_first_to_slots_when_the_end_is_in_sight(seed: int) -> None:
    draw = random.Random(seed)
    sizes = [3, 4, 20, 5, 6, 18]
    heads = [draw.randbytes(2048) for _ in sizes]
    prompts = [head + draw.randbytes(90) for head, size in zip(heads, sizes, strict=True) for _ in range(size)]
    night = Night(scheduler("slots", 2), SlotEngine(2), [Work(job, prompt, 10) for job, prompt in enumerate(prompts)])
    night.act()
    night.report_next()
    night.run()
    assert {night.by_job[job].prompt[:2048] for job in night.order[:2]} == {heads[2], heads[5]}
    assert night.ended_s[-1] - night.ended_s[-2] < 4


def test_the_longest_lead_their_group() -> None:
    draw = random.Random(5)
    works = [Work(job, b"x" * 2048 + draw.randbytes(80), draw.randint(1, 900)) for job in range(20)]
    night = Night(scheduler("shares", 1), SharingEngine(1), works).run()
    lengths = [works[job].output for job in night.order]
    assert lengths == sorted(lengths, reverse=True)


def test_without_reuse_lines_keep_their_order_and_all_slots_are_used() -> None:
    works = digests(4, 40)
    night = Night(scheduler("none", 6), Engine(), works).run()
    assert night.order == list(range(40))
    assert night.most_in_flight == 6
    assert not any(sent.leader or sent.expected_bytes for sent in night.sent.values())
