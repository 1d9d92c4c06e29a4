"""Prompts of a few hundred bytes: they are neighbours, and nobody waits for what they share."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.slot_engine import CachingEngine, Engine, Night, SharingEngine, SlotEngine, Work
from tokenmill.jobs.ingest.identity import CHUNK_BYTES, FINE_BYTES
from tokenmill.jobs.scheduler.cache_model import CacheModel
from tokenmill.jobs.scheduler.decisions import Dispatch
from tokenmill.jobs.scheduler.estimates import MeasuredRates
from tokenmill.jobs.scheduler.prefix_groups import WORTH_BYTES, Pending, minimum
from tokenmill.jobs.scheduler.scheduler import Scheduler
from tokenmill.jobs.scheduler.shape import EngineShape

PIECES = [bytes([65 + number]) * FINE_BYTES for number in range(3)]
SHORT = st.lists(st.lists(st.sampled_from(PIECES), max_size=4).map(b"".join), min_size=1, max_size=30)
RATES = MeasuredRates(1000.0, ((1, 50.0), (4, 200.0)))


def rows(count: int = 980) -> list[Work]:
    """Rows of a table in random order, with columns of 20 to 90 bytes."""
    draw = random.Random(5)

    def row(number: int) -> bytes:
        plan, country, segment = draw.randrange(5), draw.randrange(12), draw.randrange(30)
        told = "".join(draw.choices("abcdefgh ", k=60))
        return (
            f"\nuser\nplan: {f'plan {plan} ' * 12}\ncountry: {f'country {country:02} ' * 6}\n"
            f"segment: {f'segment {segment:02} ' * 3}\nid: {number}\ntext: {told}"
        ).encode()

    return [Work(number, row(number), 20 + number % 7) for number in range(count)]


@given(SHORT, st.integers(1, 4), st.randoms(use_true_random=False))
@settings(max_examples=80, deadline=None)
def test_each_short_head_is_computed_once(texts: list[bytes], width: int, draw: random.Random) -> None:
    """One at a time with room for one prompt, so that a head that is left is gone; several with room for all."""
    works = [Work(job, text + bytes([128 + job]) * 3, draw.randint(1, 30)) for job, text in enumerate(texts)]
    cells = 5 * FINE_BYTES if width == 1 else None
    sharing = Night(Scheduler(EngineShape("shares", width)), SharingEngine(width, cells), works).run()
    slot = Night(Scheduler(EngineShape("slots", 1, 1)), SlotEngine(1), works).run()
    assert sharing.engine.computed == slot.engine.computed == minimum(work.prompt for work in works)
    assert sorted(sharing.done) == sorted(slot.done) == list(range(len(works)))


CACHE = 6000
TABLES = [
    (EngineShape("shares", 8, look_ahead=8, cells_total=CACHE), SharingEngine(8, CACHE), 1.01),
    (EngineShape("slots", 4, 4, rates=RATES), SlotEngine(4), 1.1),
    (EngineShape("prefix cache", 8, cells_total=CACHE), CachingEngine(CACHE), 1.2),
]


@pytest.mark.parametrize(("shape", "engine", "most"), TABLES, ids=lambda value: getattr(value, "reuse", None))
def test_a_table_of_short_rows_costs_about_the_least(shape: EngineShape, engine: Engine, most: float) -> None:
    works = rows()
    Night(Scheduler(shape), engine, works).run()
    assert engine.computed <= most * minimum(work.prompt for work in works)


@pytest.mark.parametrize("shape", [shape for shape, *_ in TABLES], ids=lambda shape: shape.reuse)
def test_nobody_waits_for_a_short_head(shape: EngineShape) -> None:
    """All jobs begin with the same 448 bytes: every slot is used at once."""
    scheduler, head = Scheduler(shape), b"h" * (WORTH_BYTES - FINE_BYTES)
    works = [Work(job, head + b"%064d" % job, 10) for job in range(60)]
    scheduler.available((work.record for work in works), more=False)
    assert len(scheduler.decide()) == shape.width + shape.look_ahead


@pytest.mark.parametrize(("shared", "waits"), [(WORTH_BYTES - 2 * FINE_BYTES, False), (WORTH_BYTES, True)])
def test_what_is_worth_waiting_for(shared: int, waits: bool) -> None:
    one, other = (Work(job, b"h" * shared + bytes([job]) * 900, 10).record for job in (1, 2))
    warmth = CacheModel(EngineShape("prefix cache", 2), tokens=lambda count: count)
    warmth.sent(one)
    assert warmth.ready(other) is not waits
    assert not warmth.independent(other)
    warmth.warmed(one)
    assert warmth.ready(other)
    assert warmth.independent(other)
    assert warmth.find(other) == (shared, 1)


def test_a_few_words_do_not_cost_a_slot_its_head() -> None:
    """A job that shares 64 bytes with every slot goes where nothing is lost."""
    words = b"w" * FINE_BYTES
    digests = [words + bytes([65 + number]) * 3 * CHUNK_BYTES for number in range(2)]
    scheduler = Scheduler(EngineShape("slots", 2, 2, rates=RATES))
    records = [Work(job, digests[job % 2] + b"%064d" % job, 10).record for job in range(3)]
    scheduler.available(records, more=False)
    slots = {sent.job: sent.slot for sent in scheduler.decide() if isinstance(sent, Dispatch)}
    needed, idle = slots[0], slots[1]  # job 2 needs what job 0 leaves
    for job in slots:
        scheduler.finished(job)
    scheduler.available([Pending(9, Work(9, words + b"9" * 700, 10).record.prefix_key, 764, 10.0, priority=1)])
    sent = next(each for each in scheduler.decide() if isinstance(each, Dispatch))
    assert (sent.job, sent.slot, sent.expected_bytes) == (9, idle, FINE_BYTES)
    assert needed != idle
