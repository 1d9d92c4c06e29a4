"""The simulation behind docs/scale.md, in small: what goes in comes out, and the page says what was written down."""

import json
import random
import sys
from itertools import pairwise
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))  # bench is no package that is installed

from bench.simulate import Case, simulate  # noqa: E402
from bench.simulation import recorded  # noqa: E402
from bench.simulation.engine import Engine, Work  # noqa: E402
from bench.simulation.fleet import Fleet  # noqa: E402
from bench.simulation.loads import LOADS, Kind, kinds, scattered  # noqa: E402
from bench.simulation.page import page  # noqa: E402
from bench.simulation.plot import plot  # noqa: E402
from bench.simulation.sharing import Sharer, Sharing, quickly_joined  # noqa: E402
from bench.simulation.store import Queue, StoreCosts  # noqa: E402
from bench.simulation.table import Table  # noqa: E402

from tokenmill.jobs.ingest.identity import shared_bytes  # noqa: E402
from tokenmill.jobs.scheduler.estimates import MeasuredRates  # noqa: E402

RATES = MeasuredRates(100.0, ((1, 10.0), (4, 20.0)))
HEAD = ((1, 200.0),)
MANY = "four digests for each 48 jobs"


def events(engine: Engine) -> list[tuple[str, int, float]]:
    """Until nothing runs."""
    seen: list[tuple[str, int, float]] = []
    while engine.next_s() is not None:
        if (event := engine.step()) is not None:
            seen.append((event.kind, event.work.number, engine.now_s))
    return seen


def sharing(table: Table, most_jobs: int = 1) -> Sharing:
    return Sharing(table, most_jobs, lambda *_: None)


def test_an_engine_computes_a_head_once_and_writes_with_all_lanes() -> None:
    engine = Engine(RATES, 4)
    engine.send([Work(number, HEAD, 50.0, 100.0) for number in range(4)], 0.0)
    seen = events(engine)
    assert engine.computed_tokens == 200 + 4 * 50
    assert engine.written_tokens == 400
    assert seen[0][:2] == ("first token", 0)
    assert seen[0][2] == pytest.approx(2.5), "others wait for the head"
    assert seen[-1][2] == pytest.approx(4.0 + 400 / 20), "computed / prefill + written / decode"
    assert engine.busy_s == pytest.approx(engine.now_s)


def test_what_is_sent_between_two_reports_changes_nothing_that_was_done() -> None:
    engine = Engine(RATES, 4)
    engine.send([Work(0, (), 100.0, 100.0)], 0.0)
    engine.send([Work(1, (), 100.0, 100.0)], 0.5)
    kind, number, at_s = events(engine)[0]
    assert (kind, number) == ("first token", 0)
    assert at_s == pytest.approx(1.0)
    assert engine.computed_tokens == pytest.approx(200)
    assert engine.written_tokens == pytest.approx(200)
    assert engine.left == 0


def test_more_may_be_sent_than_run() -> None:
    engine = Engine(RATES, 2)
    engine.send([Work(number, (), 10.0, 10.0) for number in range(5)], 0.0)
    assert engine.running == 2
    assert sorted(number for kind, number, _ in events(engine) if kind == "finished") == [0, 1, 2, 3, 4]


def test_a_head_goes_when_cells_are_short() -> None:
    engine = Engine(RATES, 1, cells=300)
    engine.send([Work(number, ((head, 200.0),), 1.0, 1.0) for number, head in enumerate([1, 2, 1])], 0.0)
    events(engine)
    assert engine.computed_tokens == 3 * 201


def test_what_had_ended_when_an_engine_fails_stays_so() -> None:
    engine = Engine(RATES, 1)
    engine.send([Work(0, HEAD, 80.0, 80.0, jobs=8), Work(1, (), 10.0, 10.0)], 0.0)
    for _ in range(7):  # the head and three jobs, and a prompt
        engine.step()
    lost = dict(engine.die(engine.now_s + 0.1))
    assert {work.number: done for work, done in lost.items()} == {0: 3, 1: 0}
    assert engine.next_s() is None


@pytest.mark.parametrize("load", LOADS)
@pytest.mark.parametrize("most_jobs", [1, 7, 1000])
def test_loads_are_cut_without_loss(load: str, most_jobs: int) -> None:
    all_kinds = kinds(load, 960, recorded.nights())
    table = Table(all_kinds, seed="1")
    whole = table.work(0, table.jobs)
    assert table.jobs == sum(kind.jobs for kind in all_kinds) == 960
    for finer in (None, 4):
        cut = list(table.works(100, 960, most_jobs, finer=finer))
        assert [cut[0].first, cut[-1].end] == [100, 960]
        assert all(one.end == other.first for one, other in pairwise(cut))
        assert all(work.jobs == 1 for work in cut) or most_jobs > 1
        before = table.work(0, 100)
        assert sum(work.output_tokens for work in cut) == pytest.approx(whole.output_tokens - before.output_tokens)


@pytest.mark.parametrize("load", LOADS)
def test_rows_are_in_order_and_share_what_heads_do(load: str) -> None:
    table = Table(kinds(load, 480, recorded.nights()), seed=None)
    rows = [table.row(position) for position in range(table.jobs)]
    assert all(one.key < other.key for one, other in pairwise(rows))
    chance = random.Random(1)
    for one, other in [*pairwise(rows), *(chance.sample(rows, 2) for _ in range(200))]:
        assert quickly_joined(one, other) == min(shared_bytes(one.place, other.place), one.prompt_bytes)
    assert (quickly_joined(rows[0], rows[1]) >= 512) == (load != "no sharing")


def test_a_runner_gets_whole_heads_up_to_a_part_of_a_fair_share() -> None:
    table = Table(kinds(MANY, 4800, recorded.nights()), seed=None)
    shared = sharing(table)
    runners = [Sharer(number, 16) for number in range(10)]
    for runner in runners:
        shared.join(runner)
    given = [shared.window(runner, 0.0, 0, again=True) for runner in runners]
    sizes = [sum(work.jobs for work in works) for works in given]
    assert sizes[0] == 240
    assert all(size % 12 == 0 for size in sizes)
    assert sizes == sorted(sizes, reverse=True)
    seen = [position for works in given for work in works for position in range(work.first, work.end)]
    assert sorted(seen) == list(range(sum(sizes)))


def test_who_has_nothing_takes_a_part_of_anothers_and_what_a_lost_one_had_is_free() -> None:
    table = Table(kinds("no sharing", 400, recorded.nights()), seed=None)
    shared = sharing(table)
    one, two = Sharer(0, 16), Sharer(1, 16)
    shared.join(one)
    while shared.window(one, 0.0, 0, again=False):
        pass
    shared.join(two)
    taken = shared.window(two, 1.0, 0, again=True)
    assert shared.taken == 1
    assert taken
    for work in taken[:3]:
        shared.sent(work)
    assert shared.pending == 397
    shared.leave(two, [(work.first, work.end) for work in taken[:3]])
    shared.leave(one, [])
    assert shared.pending == 400
    three = Sharer(2, 16)
    shared.join(three)
    found = list(taken[:0])
    while works := shared.window(three, 2.0, 0, again=False):
        found += works
    assert sorted(work.first for work in found) == list(range(400))


def test_calls_wait_for_each_other_and_a_turn_takes_longer_with_more_runners() -> None:
    one, two = Queue(1), Queue(2)
    assert [one.end_s(0.0, 2.0), one.end_s(1.0, 2.0), one.end_s(9.0, 1.0)] == [2.0, 4.0, 10.0]
    assert [two.end_s(0.0, 2.0), two.end_s(1.0, 2.0), two.end_s(1.0, 1.0)] == [2.0, 3.0, 3.0]
    costs = StoreCosts(0.1, 0.1, ((0, 1.0), (10, 2.0)))
    assert [costs.turn_s(others) for others in (0, 5, 10, 99)] == [1.0, 1.5, 2.0, 2.0]


def test_assigned_heads_are_computed_on_fewer_engines_than_scattered_ones() -> None:
    made = {way: simulate(Case("small", MANY, way, 8, "none", 960, None)) for way in ("assigned", "scattered")}
    heads = 80 * 1310
    least = heads + 960 * 42
    assert made["assigned"].computed_tokens == pytest.approx(least, rel=0.1)
    assert made["scattered"].computed_tokens > 4 * heads
    assert made["assigned"].wall_s < 0.5 * made["scattered"].wall_s


def test_a_store_that_does_one_call_at_a_time_holds_up_fast_engines() -> None:
    slow, quick, free = (
        simulate(Case("small", "no sharing", "assigned", 64, "none", 6400, None, store=store))
        for store in ("measured", "eight writers", "free")
    )
    assert slow.wall_s > slow.writing_s > 6
    assert free.wall_s < quick.wall_s <= slow.wall_s
    assert free.turns_s == free.writing_s == 0


@pytest.mark.parametrize("load", [MANY, "template table", "no sharing"])
def test_works_of_several_jobs_take_as_long_as_jobs_one_by_one(load: str) -> None:
    one, many = (simulate(Case("giant", load, "assigned", 2, "none", 1920, count)) for count in (None, 40))
    assert many.wall_s == pytest.approx(one.wall_s, rel=0.06)
    assert many.computed_tokens == pytest.approx(one.computed_tokens, rel=0.03)


@pytest.mark.parametrize("least_works", [None, 60])
@pytest.mark.parametrize("anywhere", [False, True])
def test_every_job_is_answered_once_though_runners_fail(least_works: int | None, anywhere: bool) -> None:
    all_kinds = [Kind(HEAD, 200, 20.0), Kind(((2, 100.0),), 100, 20.0)]
    engine = recorded.Recorded("test", RATES, 30.0)
    pieces = scattered(all_kinds, 4, "seed")
    ends = [sum(jobs for own in pieces[:at] for _, jobs in own) for at in range(5)]
    table = [piece for own in pieces for piece in own] if anywhere else None
    calm, rough = (
        Fleet(
            engine,
            Table(all_kinds, table, seed="seed"),
            4,
            recorded.store(),
            seed="seed",
            least_works=least_works,
            shares=list(pairwise(ends)) if anywhere else None,
            hours_between_failures=hours,
        ).run()
        for hours in (None, 0.05)
    )
    assert calm.answered == rough.answered == 300
    assert (calm.failed, calm.redone) == (0, 0)
    assert rough.failed > 0
    assert rough.redone > 0
    assert rough.wall_s > calm.wall_s


def test_the_same_seed_is_the_same_night() -> None:
    for way in ("assigned", "scattered"):
        case = Case("giant", "template table", way, 5, "hourly", 600, 50)
        assert simulate(case) == simulate(case)


def test_figures_are_those_that_were_recorded() -> None:
    small, giant = recorded.small(), recorded.giant()
    assert small.rates.decode_at(1) == pytest.approx(896.7, abs=0.1)
    assert giant.rates.decode_tok_s[0] == (1, 12.94)
    assert giant.rates.prefill_tok_s == 24.43
    assert len(recorded.GENERATED) == 100
    store = recorded.store()
    assert [store.start_s, store.commit_s] == pytest.approx([0.010 / 16, 0.0057 / 16])
    assert store.turn_s(0) == pytest.approx(0.09, abs=0.01)
    assert store.turn_s(1000) == pytest.approx(0.15, abs=0.01)


def test_the_page_and_the_plot_are_made_of_the_results() -> None:
    document = json.loads((ROOT / "bench/results/simulation.json").read_text(encoding="utf-8"))
    assert (ROOT / "docs/scale.md").read_text(encoding="utf-8") == page(document)
    assert (ROOT / "docs/img/scale.svg").read_text(encoding="utf-8") == plot(document)
    assert "predicted" in page(document)
