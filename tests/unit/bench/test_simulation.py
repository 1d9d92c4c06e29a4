"""The simulation behind docs/scale.md, in small: what goes in comes out, and the page says what was written down."""

import json
import random
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))  # bench is no package that is installed

from bench.simulate import Case, simulate  # noqa: E402
from bench.simulation import recorded  # noqa: E402
from bench.simulation.engine import Engine, Work  # noqa: E402
from bench.simulation.fleet import Fleet  # noqa: E402
from bench.simulation.loads import LOADS, SIZE, Kind, assigned, kinds, scattered, works  # noqa: E402
from bench.simulation.page import page  # noqa: E402
from bench.simulation.plot import plot  # noqa: E402

from tokenmill.jobs.assign import Runner  # noqa: E402
from tokenmill.jobs.expected import Rates  # noqa: E402

RATES = Rates(100.0, ((1, 10.0), (4, 20.0)))
HEAD = ((1, 200.0),)


def events(engine: Engine) -> list[tuple[str, int, float]]:
    """Until nothing runs."""
    seen: list[tuple[str, int, float]] = []
    while engine.next_s() is not None:
        if (event := engine.step()) is not None:
            seen.append((event.kind, event.work.number, engine.now_s))
    return seen


def test_an_engine_computes_a_head_once_and_writes_with_all_lanes() -> None:
    engine = Engine(RATES, 4)
    for number in range(4):
        engine.send(Work(number, HEAD, 50.0, 100.0))
    seen = events(engine)
    assert engine.computed_tokens == 200 + 4 * 50
    assert engine.written_tokens == 400
    assert seen[0][:2] == ("first token", 0)
    assert seen[0][2] == pytest.approx(2.5), "others wait for the head"
    assert seen[-1][2] == pytest.approx(4.0 + 400 / 20), "computed / prefill + written / decode"
    assert engine.busy_s == pytest.approx(engine.now_s)


def test_more_may_be_sent_than_run() -> None:
    engine = Engine(RATES, 2)
    for number in range(5):
        engine.send(Work(number, (), 10.0, 10.0))
    assert engine.running == 2
    assert sorted(number for kind, number, _ in events(engine) if kind == "finished") == [0, 1, 2, 3, 4]


def test_a_head_goes_when_cells_are_short() -> None:
    engine = Engine(RATES, 1, cells=300)
    for number, head in enumerate([1, 2, 1]):
        engine.send(Work(number, ((head, 200.0),), 1.0, 1.0))
    events(engine)
    assert engine.computed_tokens == 3 * 201


def test_what_had_ended_when_an_engine_fails_stays_so() -> None:
    engine = Engine(RATES, 1)
    engine.send(Work(0, HEAD, 100.0, 100.0, jobs=10))
    engine.send(Work(1, (), 10.0, 10.0))
    for _ in range(7):  # the head and three jobs, and a prompt
        engine.step()
    lost = dict(engine.die(engine.now_s + 0.1))
    assert {work.number: done for work, done in lost.items()} == {0: 3, 1: 0}
    assert engine.next_s() is None
    (rest,) = (work.rest(2, done) for work, done in lost.items() if done)
    assert rest.jobs == 7
    assert [rest.prompt_tokens, rest.output_tokens] == pytest.approx([70, 70])


@pytest.mark.parametrize("load", LOADS)
@pytest.mark.parametrize("most_jobs", [1, 7, 1000])
def test_loads_are_cut_without_loss(load: str, most_jobs: int) -> None:
    all_kinds = kinds(load, 960, recorded.nights())
    assert sum(kind.jobs for kind in all_kinds) == 960
    runner = Runner(100.0, 20.0)
    for pieces in (assigned(all_kinds, [runner] * 5)[0], scattered(all_kinds, 5, "seed")):
        cut = [list(works(all_kinds, own, 4, random.Random(1), most_jobs)) for own in pieces]
        assert sum(work.jobs for own in cut for work in own) == 960
        assert all(work.jobs == 1 for own in cut for work in own) or most_jobs > 1
        prompts = sum(work.prompt_tokens for own in cut for work in own if work.path)
        assert prompts <= sum(kind.jobs * kind.prompt_tokens for kind in all_kinds) + 960 * SIZE.digest_tokens


def test_assigned_heads_are_computed_on_fewer_engines_than_scattered_ones() -> None:
    load = "four digests for each 48 jobs"
    made = {way: simulate(Case("small", load, way, 8, "none", 960, None)) for way in ("assigned", "scattered")}
    heads = 80 * 1310
    least = heads + 960 * 42
    assert made["assigned"].computed_tokens == pytest.approx(least, rel=0.03)
    assert made["scattered"].computed_tokens > 4 * heads
    assert made["assigned"].wall_s < 0.5 * made["scattered"].wall_s


@pytest.mark.parametrize("load", ["four digests for each 48 jobs", "template table", "no sharing"])
def test_works_of_several_jobs_take_as_long_as_jobs_one_by_one(load: str) -> None:
    one, many = (simulate(Case("giant", load, "assigned", 2, "none", 1920, count)) for count in (None, 40))
    assert many.wall_s == pytest.approx(one.wall_s, rel=0.03)
    assert many.computed_tokens == pytest.approx(one.computed_tokens, rel=0.03)


@pytest.mark.parametrize("least_works", [None, 60])
def test_every_job_is_answered_once_though_engines_fail(least_works: int | None) -> None:
    all_kinds = [Kind(HEAD, 200, 20.0), Kind(((2, 100.0),), 100, 20.0)]
    engine = recorded.Recorded("test", RATES, 30.0, 0.0)
    pieces = scattered(all_kinds, 4, "seed")
    calm, rough = (
        Fleet(engine, all_kinds, pieces, seed="seed", least_works=least_works, hours_between_failures=hours).run()
        for hours in (None, 0.05)
    )
    assert calm.answered == rough.answered == 300
    assert (calm.failed, calm.redone) == (0, 0)
    assert rough.failed > 0
    assert rough.redone > 0
    assert rough.wall_s > calm.wall_s
    assert rough.taken > 0, "engines without work take what waits elsewhere"


def test_the_same_seed_is_the_same_night() -> None:
    case = Case("giant", "template table", "scattered", 5, "harsh", 600, 50)
    assert simulate(case) == simulate(case)


def test_figures_are_those_that_were_recorded() -> None:
    small, giant = recorded.small(), recorded.giant()
    assert small.rates.decode_at(1) == pytest.approx(896.7, abs=0.1)
    assert giant.rates.decode_tok_s[0] == (1, 12.94)
    assert giant.rates.prefill_tok_s == 24.43
    assert len(recorded.GENERATED) == 100
    assert pytest.approx(6335, abs=1) == recorded.CALM_HOURS


def test_the_page_and_the_plot_are_made_of_the_results() -> None:
    document = json.loads((ROOT / "bench/results/simulation.json").read_text(encoding="utf-8"))
    assert (ROOT / "docs/scale.md").read_text(encoding="utf-8") == page(document)
    assert (ROOT / "docs/img/scale.svg").read_text(encoding="utf-8") == plot(document)
    assert "predicted" in page(document)
