"""The requests of each section of a benchmark, on an engine that counts tokens instead of seconds."""

import asyncio
import re
from collections.abc import Awaitable, Callable, Collection

import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.prefix_engine import PrefixEngine, TurnedEngine
from tokenmill.errors import UsageError
from tokenmill.tuner.bench.cache import cache, first
from tokenmill.tuner.bench.energy import Energy, Price, energy, parse_price
from tokenmill.tuner.bench.rig import Rig
from tokenmill.tuner.bench.rows import BenchRow
from tokenmill.tuner.bench.run import PARTS, BenchOptions, belongs, bench, last_part
from tokenmill.tuner.bench.served import Prose, Served
from tokenmill.tuner.bench.sweep import (
    by_sequences,
    by_threads,
    rate,
    rate_seen,
    sequence_counts,
    steps,
    sweep,
    thread_counts,
)
from tokenmill.tuner.energy import Joules
from tokenmill.tuner.history import SpeedRecord
from tokenmill.tuner.point import PointScope
from tokenmill.tuner.soak.judge import Limit
from tokenmill.tuner.soak.run import fill

PLACE = PointScope("box", "m", "model", "id", "native", "build 1")


def rig_of(engine: PrefixEngine, repeat: int = 2) -> Rig:
    return Rig(engine, Prose(engine, 3), repeat)


def run(scene: Callable[[], Awaitable[None]]) -> None:
    async def limited() -> None:
        async with asyncio.timeout(30):
            await scene()

    asyncio.run(limited())


def same(row: BenchRow) -> BenchRow:
    return row


# ---- by depth


@pytest.mark.parametrize(
    ("depth", "step", "expected"),
    [(1024, 512, ((0, 512), (512, 512))), (600, 512, ((0, 512), (512, 88))), (100, 512, ((0, 100),))],
)
def test_steps_up_to_a_depth(depth: int, step: int, expected: tuple[tuple[int, int], ...]) -> None:
    assert steps(depth, step) == expected


def test_a_sweep_grows_one_prompt_and_computes_only_what_is_new() -> None:
    async def scene() -> None:
        engine = PrefixEngine()
        rows = await sweep(rig_of(engine, repeat=3), depth=300, step=100, tokens=5, keep=same)
        assert [(row.what, row.pp, row.tg) for row in rows] == [("sweep", 100, 5)] * 3
        assert [row.n_kv for row in rows] == [1, 101, 201]  # the sign for a beginning is there from the second run on
        assert [row.depth for row in rows] == [101, 201, 301]
        assert len(engine.requests) == 9
        assert {request.slot for request in engine.requests} == {0}
        assert all(request.ignore_eos and request.max_tokens == 5 for request in engine.requests)
        assert all(row.s_pp_tok_s is not None and row.s_pp_tok_s.runs == 3 for row in rows)

    run(scene)


def test_an_engine_that_keeps_nothing_shows_in_the_columns() -> None:
    async def scene() -> None:
        engine = PrefixEngine()
        engine.keeps = False
        rows = await sweep(rig_of(engine), depth=200, step=100, tokens=5, keep=same)
        assert [(row.n_kv, row.pp) for row in rows] == [(0, 101), (0, 201)]

    run(scene)


def test_a_sweep_deeper_than_the_context_is_refused_before_anything_is_asked() -> None:
    async def scene() -> None:
        engine = PrefixEngine(context=256)
        with pytest.raises(UsageError) as error:
            await sweep(rig_of(engine), depth=300, step=100, tokens=5, keep=same)
        assert error.value.code == "context_length_exceeded"
        assert re.findall(r"\d+", error.value.message)[-2:] == ["305", "256"]
        assert "--context 306" in (error.value.hint or "")
        assert not engine.requests

    run(scene)


def test_what_stands_before_every_text_takes_room_too() -> None:
    async def scene() -> None:
        rig = rig_of(PrefixEngine(context=256))
        assert rig.room == 256
        await rig.prose.learn()
        assert rig.room == 255
        done = await fill(rig, Limit(255, 64), lambda _: ())
        assert (done.ended, done.steps[-1].depth) == ("goal", 255)
        with pytest.raises(UsageError) as caught:
            await fill(rig, Limit(256, 64), lambda _: ())
        assert caught.value.code == "context_length_exceeded"
        with pytest.raises(UsageError) as caught:
            await fill(rig, Limit(255, 16), lambda _: ())
        assert caught.value.code == "step_too_small"

    run(scene)


# ---- disturbed runs


class Noisy:
    """Says for each run in turn whether it was disturbed."""

    def __init__(self, words: list[str | None]) -> None:
        self.words, self.pids = words, list[tuple[int, ...]]()

    def __call__(self) -> "Noisy":
        return self

    def start(self, pids: Collection[int]) -> None:
        self.pids.append(tuple(pids))

    def stop(self) -> str | None:
        return self.words.pop(0)


@pytest.mark.parametrize(
    ("words", "kept", "disturbed", "repeated"),
    [
        ([None, None], 2, None, 0),
        (["noise", None, None], 2, None, 1),
        (["a", "b", "c", None], 1, None, 3),
        (["a", "b", "c", "d"], 4, "d", 0),
    ],
)
def test_disturbed_runs_are_made_again_but_not_for_ever(
    words: list[str | None], kept: int, disturbed: str | None, repeated: int
) -> None:
    async def scene() -> None:
        engine = PrefixEngine(pid=None)
        rig = Rig(engine, Prose(engine, 1), 2, Noisy(words))

        async def once() -> int:
            return 7

        assert await rig.repeated(once) == ((7,) * kept, disturbed, repeated)

    run(scene)


# ---- the prompt cache


def test_a_prompt_cold_again_and_with_a_new_tail() -> None:
    async def scene() -> None:
        engine = PrefixEngine()
        rig = rig_of(engine)
        begin = await first(rig, prompt=200, tokens=4, keep=same)
        assert (begin.what, begin.pp, begin.n_kv) == ("first", 201, 0)
        rows, effect = await cache(rig, prompt=200, tokens=4, keep=same, plan=None)
        assert [(row.what, row.prompt_tokens) for row in rows] == [("cold", 201), ("again", 201), ("tail", 265)]
        assert rows[0].n_kv is not None
        assert rows[0].n_kv <= 1  # the sign for a beginning is always there
        assert (rows[1].n_kv, rows[1].pp, rows[1].s_pp_tok_s) == (200, 1, None)
        assert (rows[2].n_kv, rows[2].pp) == (201, 64)
        assert effect is not None
        assert (effect.saved_tokens, effect.prompt_tokens) == (200, 201)
        assert (effect.state_bytes, effect.predicted_state_bytes) == (None, None)

    run(scene)


def test_no_effect_where_nothing_is_kept() -> None:
    async def scene() -> None:
        engine = PrefixEngine()
        engine.keeps = False
        _, effect = await cache(rig_of(engine), prompt=100, tokens=4, keep=same, plan=None)
        assert effect is None

    run(scene)


# ---- threads and sequences


@pytest.mark.parametrize(
    ("cores", "expected"), [(1, (1,)), (2, (1, 2)), (8, tuple(range(1, 9))), (16, (2, 4, 8, 12, 13, 14, 15, 16))]
)
def test_threads_worth_a_look(cores: int, expected: tuple[int, ...]) -> None:
    assert thread_counts(cores) == expected


@given(st.integers(1, 256))
def test_threads_are_within_the_cores_and_few(cores: int) -> None:
    counts = thread_counts(cores)
    assert counts == tuple(sorted(set(counts)))
    assert 1 <= counts[0] <= counts[-1] == cores
    assert len(counts) <= 8


def test_widths_worth_a_look() -> None:
    assert [sequence_counts(most) for most in (1, 2, 6, 16)] == [(1,), (1, 2), (1, 2, 4, 6), (1, 2, 4, 8, 16)]


def test_threads_are_turned_and_put_back() -> None:
    async def scene() -> None:
        engine = TurnedEngine()
        rows, note = await by_threads(rig_of(engine), (1, 2), prompt=64, tokens=4, keep=same)
        assert note is None
        assert [(row.threads, row.threads_batch, row.what) for row in rows] == [(1, 1, "threads"), (2, 2, "threads")]
        assert engine.turned == [("threads", 1), ("threads", 2), ("threads", 4)]

    run(scene)


def test_an_engine_that_cannot_turn_its_threads_says_so() -> None:
    async def scene() -> None:
        engine = PrefixEngine()
        rows, note = await by_threads(rig_of(engine), (1, 2), prompt=64, tokens=4, keep=same)
        assert rows == ()
        assert note is not None
        assert engine.identity.build in note
        assert not engine.requests

    run(scene)


def test_sequences_are_written_together_behind_prompts_that_are_there() -> None:
    async def scene() -> None:
        engine = TurnedEngine(slots=2)
        rows, note = await by_sequences(rig_of(engine), None, prompt=32, tokens=6, keep=same)
        assert note is None
        assert [(row.sequences, row.pp, row.tg, row.depth) for row in rows] == [(1, 33, 6, 33), (2, 66, 12, 33)]
        assert engine.most_at_once == 2
        assert engine.turned == [("slots", 1), ("slots", 2), ("slots", 2)]
        with pytest.raises(UsageError) as caught:
            await by_sequences(rig_of(engine), (9,), prompt=32, tokens=6, keep=same)
        assert caught.value.code == "too_few_slots"
        assert re.findall(r"\d+", caught.value.message) == ["8", "9"]

    run(scene)


def test_up_to_all_slots_of_a_server_are_used() -> None:
    async def scene() -> None:
        rows, note = await by_sequences(rig_of(PrefixEngine(slots=2)), None, prompt=32, tokens=6, keep=same)
        assert [row.sequences for row in rows] == [1, 2]
        assert note is not None
        assert "2 slots" in note
        rows, note = await by_sequences(rig_of(PrefixEngine(slots=None)), None, prompt=32, tokens=6, keep=same)
        assert rows == ()
        assert note is not None
        assert "slots" in note
        assert not re.findall(r"\d slots", note)

    run(scene)


@pytest.mark.parametrize(
    ("streams", "expected"),
    [
        ([[(0.0, 1), (1.0, 1), (2.0, 1)]], 1.0),
        ([[(0.0, 1), (2.0, 4)], [(0.0, 1), (2.0, 2)]], 3.0),
        ([[(0.0, 1), (4.0, 4)], [(2.0, 1), (4.0, 4)]], 3.0),  # only while both write: half of four, and four
        ([[(0.0, 1), (1.0, 1)], [(2.0, 1), (3.0, 1)]], None),  # never both concurrently
        ([[(0.0, 9)]], None),
        ([], None),
    ],
)
def test_speed_while_all_write(streams: list[list[tuple[float, int]]], expected: float | None) -> None:
    found = rate_seen(streams)
    assert found == (None if expected is None else pytest.approx(expected))


def test_speed_by_the_engines_clock_is_that_of_the_one_begun_last() -> None:
    early = Served(10, 9, 5, 0.1, 2.0, 2.1, 4, engine_decode_s=2.0)
    late = Served(10, 9, 5, 0.9, 1.0, 1.9, 4, engine_decode_s=1.0)
    assert rate([(early, ()), (late, ())]) == 8.0
    silent = Served(10, 9, 5, 0.9, 1.0, 1.9, 4)
    assert rate([(early, [(0.0, 1), (2.0, 2)]), (silent, [(0.0, 1), (2.0, 4)])]) == 3.0


# ---- energy


@pytest.mark.parametrize(
    ("text", "per_kwh", "currency"),
    [
        ("0.30/kWh", 0.30, ""),
        ("0,30 EUR/kWh", 0.30, "EUR"),
        ("$0.12", 0.12, "$"),
        ("12 ct / KWH", 12.0, "ct"),
        ("1", 1.0, ""),
    ],
)
def test_prices(text: str, per_kwh: float, currency: str) -> None:
    assert parse_price(text) == Price(per_kwh, currency)


@pytest.mark.parametrize("text", ["", "cheap", "-1", "0.3/MWh", "0.3.1"])
def test_invalid_prices(text: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_price(text)
    assert caught.value.code == "invalid_price"
    assert repr(text) in caught.value.message


def test_a_million_tokens_at_36_joules_are_ten_kilowatt_hours() -> None:
    assert Price(0.30).of_million(36.0) == pytest.approx(3.0)


class Joulemeter:
    def __init__(self, *readings: Joules) -> None:
        self.readings = list(readings)

    def start(self) -> None:
        pass

    def stop(self) -> Joules:
        return self.readings.pop(0)


def test_prefill_and_decode_are_metered_apart() -> None:
    async def scene() -> None:
        meter = Joulemeter(Joules(1.0), Joules(cpu=101.0, gpu=101.0), Joules(cpu=40.0))
        found = await energy(rig_of(PrefixEngine(), repeat=1), prompt=100, tokens=4, meter=meter)
        assert found.prefill_j is not None
        assert found.decode_j is not None
        assert (found.prefill_j.median, found.decode_j.median) == (2.0, 10.0)

    run(scene)


def test_unreadable_counters_are_reported_once_without_requests() -> None:
    async def scene() -> None:
        engine = PrefixEngine()
        found = await energy(rig_of(engine), prompt=100, tokens=4, meter=Joulemeter(Joules(why_not="root alone")))
        assert found == Energy(why_not="root alone")
        assert not engine.requests

    run(scene)


def test_a_wall_meters_figure_takes_the_counters_place() -> None:
    async def scene() -> None:
        meter = Joulemeter(*[Joules(why_not="none")] * 4)
        found = await energy(rig_of(PrefixEngine(), repeat=1), prompt=100, tokens=4, watts=100.0, meter=meter)
        assert found.why_not is None
        assert "100 W" in (found.source or "")
        assert found.decode_j is not None
        assert found.decode_j.median > 0

    run(scene)


def test_energy_of_writing_is_not_known_where_the_prompt_is_computed_again() -> None:
    async def scene() -> None:
        engine = PrefixEngine()
        engine.keeps = False
        meter = Joulemeter(Joules(1.0), Joules(101.0), Joules(140.0))
        found = await energy(rig_of(engine, repeat=1), prompt=100, tokens=4, meter=meter)
        assert found.decode_j is None
        assert found.prefill_j is not None

    run(scene)


# ---- all of it


def test_a_whole_benchmark_has_a_row_for_each_point() -> None:
    async def scene() -> None:
        engine = TurnedEngine(slots=2)
        order = BenchOptions(PARTS, depth=200, step=100, tokens=4, threads=(1, 2), watts=50.0)
        done = await bench(rig_of(engine), order, PLACE)
        assert [row.what for row in done.rows] == [
            "first",
            "cold",
            "again",
            "tail",
            "sweep",
            "sweep",
            "threads",
            "threads",
            "sequences",
            "sequences",
        ]
        assert done.cache is not None
        assert done.energy is not None
        assert done.notes == ()
        assert all(row.predicted_tg_tok_s is None for row in done.rows)

    run(scene)


def test_an_unknown_server_is_benchmarked_by_words_alone() -> None:
    async def scene() -> None:
        engine = PrefixEngine(kind="url", context=None, slots=None)
        done = await bench(
            rig_of(engine), BenchOptions(("cache", "sweep", "threads", "sequences"), 200, 100, 4, (1,)), PLACE
        )
        assert {row.what for row in done.rows} == {"cold", "again", "tail", "sweep"}
        assert len(done.notes) == 2
        assert all(isinstance(request.prompt, str) and not request.ignore_eos for request in engine.requests)

    run(scene)


def test_a_first_request_and_disturbed_points_stay_out_of_the_history() -> None:
    async def scene() -> None:
        kept: list[SpeedRecord] = []
        engine = PrefixEngine()
        done = await bench(rig_of(engine), BenchOptions(("first", "sweep"), 100, 100, 4), PLACE, record=kept.append)
        assert kept == []  # without a plan the settings are not known
        assert [belongs(row) for row in done.rows] == [False, True, True, True, True]

    run(scene)


@pytest.mark.parametrize(
    ("computed", "depth", "ubatch", "expected"),
    [
        (512, 2048, 512, True),
        (501, 501, 512, True),
        (64, 576, 512, False),
        (1, 512, 512, False),
        (2048, 2048, 512, False),
    ],
)
def test_a_speed_of_prefill_is_that_of_a_last_micro_batch(
    computed: int, depth: int, ubatch: int, expected: bool
) -> None:
    assert last_part(computed, depth, ubatch) is expected
