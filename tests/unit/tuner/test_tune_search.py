"""The search: its requests, its reaction to crashes and disturbances, and its end."""

from collections import Counter
from dataclasses import replace
from itertools import groupby
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.tune_surfaces import RECORDED, MadeUp, Surface, exhaustive, made_up, run, tok_s, tried
from tokenmill.tuner.point import Aim, AimKind, Figures, Trial, TrialOutcome, TrialSettings
from tokenmill.tuner.search.noise import Standing, standings
from tokenmill.tuner.search.objectives import choose, yardstick
from tokenmill.tuner.search.search import Search
from tokenmill.tuner.search.space import Space
from tokenmill.tuner.search.trial_log import needs_as_much

START = TrialSettings(15, 15, 8, 512, 8192)


def best_of_all(space: Space, surface: Surface, aim: Aim) -> Standing:
    everything = [tried(surface, dials, Random(0)) for dials in space.combinations()]
    found = choose(yardstick(aim, everything), standings(everything), 0.0)
    assert found is not None
    return found


def test_begins_with_the_start_and_repeats_it_until_its_result() -> None:
    space, surface = RECORDED["experts on cpu"]
    search = Search(space, Aim(), START)
    assert search.ask() == START
    assert search.ask() == START
    assert search.best() is None
    search.tell(tried(surface, START, Random(0)))
    assert search.ask() != START
    assert search.best() is not None


def test_start_outside_the_grid_is_moved_onto_it() -> None:
    space, _ = RECORDED["experts on cpu"]
    asked = Search(space, Aim(), TrialSettings(3, 5, 100, 4096, 100)).ask()
    assert asked is not None
    assert space.holds(asked)
    assert (asked.threads, asked.threads_batch, asked.sequences) == (4, 4, 64)


@settings(max_examples=25, deadline=None, derandomize=True)
@given(seed=st.integers(0, 1000), waiting=st.integers(1, 4), cliff=st.booleans())
def test_tells_may_come_in_any_order(seed: int, waiting: int, cliff: bool) -> None:
    """Several questions open at a time, answered in any order: it asks for the same in the end."""
    surface, draw = made_up(seed, cliff=cliff), Random(seed)
    search = Search(surface.space, Aim(), surface.start())
    opened: list[TrialSettings] = []
    runs = 0
    while True:
        while len(opened) < waiting and (dials := search.ask()) is not None and dials not in opened:
            assert surface.space.holds(dials)
            opened.append(dials)
        if not opened:
            break
        draw.shuffle(opened)
        search.tell(tried(surface, opened.pop(), draw))
        runs += 1
    assert search.ask() is None
    assert runs == run(surface.space, surface, surface.start()).runs


@settings(max_examples=25, deadline=None, derandomize=True)
@given(seed=st.integers(0, 1000), after=st.integers(1, 25))
def test_interrupted_search_goes_on_where_it_was(seed: int, after: int) -> None:
    surface = made_up(seed, cliff=True)
    whole = run(surface.space, surface, surface.start())
    begun = run(surface.space, surface, surface.start(), stop_after=after)
    ended = run(surface.space, surface, surface.start(), told=begun.trials)
    assert abs(begun.runs + ended.runs - whole.runs) <= 2  # it may take another way to the same place
    assert ended.best is not None
    assert whole.best is not None
    assert tok_s(surface, ended.best.dials) == pytest.approx(tok_s(surface, whole.best.dials), rel=0.02)


def test_trials_that_were_never_asked_for_count() -> None:
    surface = MadeUp(cliff_at=16)
    everything = tuple(tried(surface, dials, Random(0)) for dials in surface.space.combinations())
    ran = run(surface.space, surface, surface.start(), told=everything, max_trials=1000)
    assert ran.best is not None
    assert tok_s(surface, ran.best.dials) >= 0.985 * exhaustive(surface.space, surface)
    assert {trial.dials for trial in ran.trials} <= {trial.dials for trial in everything}  # repeats only
    assert ran.runs <= 12


@pytest.mark.parametrize("cells", [1, 3, 9, 20, 40])
def test_out_of_memory_is_a_result_and_more_is_not_tried(cells: int) -> None:
    plain = MadeUp(ubatches=(256, 512, 1024))
    space = replace(plain.space, cache_types=(("f16", "f16"), ("q8_0", "q8_0")))

    def surface(dials: TrialSettings) -> Figures | TrialOutcome:
        size = 1 if dials.cache_type_k == "f16" else 0.53
        return plain(dials) if dials.sequences * size <= cells else "out of memory"

    ran = run(space, surface, plain.start())
    crashed = [trial.dials for trial in ran.trials if trial.outcome != "measured"]
    for at, dials in enumerate(crashed):
        assert not any(needs_as_much(dials, before) for before in crashed[:at])
    assert ran.best is not None
    assert tok_s(surface, ran.best.dials) >= 0.95 * exhaustive(space, surface)
    assert len(crashed) <= 8


def test_memory_is_compared_only_where_it_can_be() -> None:
    base = TrialSettings(8, 8, 16, 512, 8192)
    more = [
        replace(base, threads=2),
        replace(base, sequences=24),
        replace(base, ubatch=1024),
        replace(base, context=9000),
    ]
    less = [
        replace(base, sequences=12),
        replace(base, ubatch=256),
        replace(base, context=4096),
        replace(base, sequences=64, cache_type_k="q8_0", cache_type_v="q8_0"),
        replace(base, flash_attention=False),
        replace(base, mmap=False),
        replace(base, placement="other"),
        replace(base, sequences=64, context=100),
        replace(base, cache_type_k="fp8"),
    ]
    assert all(needs_as_much(dials, base) for dials in more)
    assert not any(needs_as_much(dials, base) for dials in less)
    assert needs_as_much(base, replace(base, cache_type_k="q8_0", cache_type_v="q8_0"))


def test_refused_dials_are_left_alone_and_others_go_on() -> None:
    plain = MadeUp()
    space = replace(plain.space, flash_attention=(True, False))
    ran = run(space, lambda dials: plain(dials) if dials.flash_attention else "refused", plain.start())
    assert ran.best is not None
    assert Counter(trial.outcome for trial in ran.trials)["refused"] == 1
    # the start is refused as well: a load setting is changed
    ran = run(space, lambda dials: "refused" if dials.flash_attention else plain(dials), plain.start())
    assert ran.best is not None
    assert not ran.best.dials.flash_attention


def test_nothing_runs_at_all() -> None:
    ran = run(MadeUp().space, lambda _: "died", MadeUp().start())
    assert ran.best is None
    assert "made to fail" in ran.search.reason
    assert ran.runs <= 8
    assert ran.search.remaining() == 0


def test_disturbed_trials_are_asked_for_again_and_never_believed() -> None:
    plain, draw = MadeUp(), Random(3)
    search = Search(plain.space, Aim(), plain.start())
    disturbed: Counter[TrialSettings] = Counter()
    runs = 0
    while (dials := search.ask()) is not None:
        trial, runs = tried(plain, dials, draw), runs + 1
        if draw.random() < 0.25:
            wrong = Figures(decode_tok_s=1e6, jobs_tok_s=1e6)
            trial = replace(trial, figures=wrong, disturbed="python3 (pid 1) used 2 cores")
            disturbed[dials] += 1
        search.tell(trial)
    best = search.best()
    assert best is not None
    assert best.figures.jobs_tok_s == pytest.approx(tok_s(plain, best.dials))
    assert tok_s(plain, best.dials) >= 0.95 * exhaustive(plain.space, plain)
    assert max(disturbed.values()) <= 9


def test_machine_that_is_never_quiet_ends_it() -> None:
    plain = MadeUp()
    search = Search(plain.space, Aim(), plain.start())
    runs = 0
    while (dials := search.ask()) is not None:
        search.tell(replace(tried(plain, dials, Random(0)), disturbed="trino used 3 cores"))
        runs += 1
    assert runs == 3
    assert search.best() is None
    assert "trino used 3 cores" in search.reason


@pytest.mark.parametrize("most", [1, 2, 3, 7, 12])
def test_limit_is_kept(most: int) -> None:
    surface = MadeUp()
    ran = run(surface.space, surface, surface.start(), max_trials=most)
    assert ran.runs == most
    assert ran.best is not None
    assert f"after {most} trials" in ran.search.reason


def test_trials_of_another_aim_leave_a_search_its_number() -> None:
    surface = MadeUp(cliff_at=16)
    others = [tried(surface, dials, Random(0)) for dials in surface.space.combinations() if dials.threads == 1]
    search = Search(surface.space, Aim(), surface.start(), max_trials=7)
    for trial in others:
        search.tell(trial)
    search.exclude(len(others))
    runs = 0
    while (dials := search.ask()) is not None:
        search.tell(tried(surface, dials, Random(0)))
        runs += 1
    assert len(others) > 7
    assert 6 <= runs <= 7
    assert f"after {runs} trials" in search.reason


def test_remaining_ends_at_nothing() -> None:
    surface = MadeUp()
    search = Search(surface.space, Aim(), surface.start())
    first = search.remaining()
    assert 10 <= first <= 40
    while (dials := search.ask()) is not None:
        assert search.remaining() >= 1
        search.tell(tried(surface, dials, Random(0)))
    assert search.remaining() == 0


def test_settings_near_the_best_are_repeated() -> None:
    surface = MadeUp()
    ran = run(surface.space, surface, surface.start(), noise=0.02)
    assert ran.best is not None
    often = Counter(trial.dials for trial in ran.trials)
    assert often[ran.best.dials] >= 2
    assert max(often.values()) <= 3


def test_noise_is_what_repeats_show() -> None:
    surface = MadeUp()
    assert run(surface.space, surface, surface.start()).search.noise == 0.03
    assert run(surface.space, surface, surface.start(), noise=0.12, seed=1).search.noise > 0.05


def test_loads_are_known_beforehand_and_none_is_done_twice() -> None:
    space, surface = RECORDED["experts on cpu, offload threshold"]
    search = Search(space, Aim(), START)
    assert [dials.offload_min_batch for dials in search.loads_needed()] == [128]
    for noise, seed in ((0.0, 0), (0.03, 1), (0.03, 2), (0.03, 3)):
        ran = run(space, surface, START, noise=noise, seed=seed)
        loads = [value for value, _ in groupby(trial.dials.offload_min_batch for trial in ran.trials)]
        assert loads == [None, 128]
        assert ran.search.loads_needed() == ()


def test_load_that_the_forecast_speaks_against_is_not_done() -> None:
    space, surface = RECORDED["experts on cpu, offload threshold"]
    ran = run(space, surface, START, forecast=lambda dials: 100.0 if dials.offload_min_batch is None else 99.0)
    assert ran.search.loads_needed() == ()
    assert {trial.dials.offload_min_batch for trial in ran.trials} == {None}


def test_load_that_wins_is_climbed_on() -> None:
    plain = MadeUp(cliff_at=16, cliff_by=5.0)
    space = replace(plain.space, offload_min_batch=(None, 128), repack=(True, False))

    def surface(dials: TrialSettings) -> Figures | TrialOutcome:
        if not dials.repack:
            return "died"
        return (plain if dials.offload_min_batch is None else replace(plain, cliff_at=None))(dials)

    ran = run(space, surface, plain.start())
    assert ran.best is not None
    assert ran.best.dials.offload_min_batch == 128
    assert tok_s(surface, ran.best.dials) >= 0.95 * exhaustive(space, surface)
    assert Counter(trial.outcome for trial in ran.trials)["died"] == 1


def test_fewest_cores_within_a_tenth() -> None:
    """16 cores, of which 13 are enough: what the curve with 14 as its peak says."""
    space, surface = RECORDED["experts on cpu"]
    aim = Aim("cores", within=0.10)
    for noise, seed in ((0.0, 0), (0.01, 1), (0.01, 2)):
        ran = run(space, surface, START, aim, noise=noise, seed=seed)
        assert ran.best is not None
        assert ran.best.dials.threads == best_of_all(space, surface, aim).dials.threads == 13
        assert ran.runs <= space.all() / 5


def test_cores_that_do_nothing_are_all_given_back() -> None:
    space, surface = RECORDED["all on gpu"]
    ran = run(space, surface, START, Aim("cores"))
    assert ran.best is not None
    assert ran.best.dials.threads == min(space.threads)


@pytest.mark.parametrize("limit", [0.3, 0.5, 1.0, 3.0])
def test_first_token_in_time(limit: float) -> None:
    """More sequences and larger micro-batches are faster in total, with a later first token."""
    plain = MadeUp(ubatches=(128, 256, 512, 1024, 2048), shared=0.02)

    def surface(dials: TrialSettings) -> Figures:
        return replace(plain(dials), first_token_s=0.05 + 0.02 * dials.sequences + 0.0005 * dials.ubatch)

    aim = Aim("latency", first_token_s=limit)
    for seed, sequences in enumerate((1, 8, 64)):
        ran = run(plain.space, surface, plain.start(sequences), aim, seed=seed)
        assert ran.best is not None
        assert ran.best.figures.first_token_s is not None
        assert ran.best.figures.first_token_s <= limit
        best = best_of_all(plain.space, surface, aim)
        assert tok_s(surface, ran.best.dials) >= 0.95 * tok_s(surface, best.dials)
        assert ran.runs <= plain.space.all() / 5


def test_nothing_is_in_time() -> None:
    plain = MadeUp()

    def surface(dials: TrialSettings) -> Figures:
        return replace(plain(dials), first_token_s=5.0 + 0.1 * dials.sequences)

    ran = run(plain.space, surface, plain.start(), Aim("latency", first_token_s=2.0))
    assert ran.best is not None
    assert ran.best.dials.sequences == 1


def test_least_energy() -> None:
    plain = MadeUp()

    def surface(dials: TrialSettings) -> Figures:
        figures = plain(dials)
        return replace(figures, joules_per_token=(90 + 12 * dials.threads) / (figures.jobs_tok_s or 1.0))

    aim = Aim("energy")
    ran = run(plain.space, surface, plain.start(), aim)
    best = best_of_all(plain.space, surface, aim)
    assert ran.best is not None
    assert ran.best.figures.joules_per_token is not None
    assert best.figures.joules_per_token is not None
    assert ran.best.figures.joules_per_token <= 1.05 * best.figures.joules_per_token
    assert ran.best.dials.threads < run(plain.space, plain, plain.start()).best.dials.threads  # type: ignore[union-attr]


@pytest.mark.parametrize("aim", [Aim("energy"), Aim("latency", first_token_s=1.0)])
def test_missing_figures_are_not_compared(aim: Aim) -> None:
    surface = MadeUp()
    ran = run(surface.space, surface, surface.start(), aim)
    assert ran.best is not None
    assert tok_s(surface, ran.best.dials) >= 0.95 * exhaustive(surface.space, surface)


@pytest.mark.parametrize("room", [8, 40, 100, 1000])
def test_most_context(room: int) -> None:
    """Memory for a number of thousand cells: a longer context leaves fewer sequences, a smaller cache type more."""
    plain = MadeUp(shared=0.02)
    space = replace(
        plain.space, context=(4096, 8192, 16384, 32768, 65536), cache_types=(("f16", "f16"), ("q8_0", "q8_0"))
    )

    def surface(dials: TrialSettings) -> Figures | TrialOutcome:
        size = 1 if dials.cache_type_k == "f16" else 0.53
        if dials.sequences * dials.context * size > room * 1024:
            return "out of memory"
        figures = plain(dials)
        return replace(figures, jobs_tok_s=(figures.jobs_tok_s or 0.0) * (1 if size == 1 else 0.98))

    aim = Aim("context", within=0.2)
    ran = run(space, surface, replace(plain.start(1), context=8192), aim)
    best = best_of_all(space, surface, aim)
    assert ran.best is not None
    assert ran.best.dials.context == best.dials.context
    assert ran.runs <= space.all() / 5


def test_least_context_and_sequences_bind_whatever_the_aim() -> None:
    trials = [
        Trial(
            TrialSettings(8, 8, sequences, 512, context),
            "measured",
            Figures(decode_tok_s=100 / sequences + 1000 / context),
        )
        for sequences in (1, 4)
        for context in (1024, 4096)
    ]
    aim = Aim(least_context=2048, least_sequences=2)
    found = choose(yardstick(aim, trials), standings(trials), 0.03)
    assert found is not None
    assert (found.dials.sequences, found.dials.context) == (4, 4096)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 10_000),
    kind=st.sampled_from(("throughput", "latency", "cores", "context", "energy")),
    limited=st.booleans(),
)
def test_whatever_happens_it_ends(seed: int, kind: AimKind, limited: bool) -> None:
    """Random outcomes, disturbances, missing figures and speeds: no question outside the space, and an end."""
    draw = Random(seed)
    space = Space(
        tuple(range(1, draw.choice((2, 5, 17)))),
        (1, 2, 4, 8, 16)[: draw.randrange(1, 6)],
        (256, 512)[: draw.randrange(1, 3)],
        (4096, 8192, 16384)[: draw.randrange(1, 4)],
        cache_types=(("f16", "f16"), ("q8_0", "q8_0"))[: draw.randrange(1, 3)],
        flash_attention=(True, False)[: draw.randrange(1, 3)],
        mmap=(True, False)[: draw.randrange(1, 3)],
    )
    search = Search(space, Aim(kind, first_token_s=1.0), START, max_trials=9 if limited else None)
    failing, disturbed, unknown = draw.random() * 0.5, draw.random() * 0.5, draw.random() * 0.3
    runs = 0
    while (dials := search.ask()) is not None:
        assert space.holds(dials)
        outcome: TrialOutcome = (
            draw.choice(("out of memory", "died", "hung", "refused")) if draw.random() < failing else "measured"
        )
        some = [None if draw.random() < unknown else draw.uniform(0.0, 10.0) for _ in range(5)]
        figures = Figures(some[0], some[1], some[2], some[3], some[4])
        search.tell(Trial(dials, outcome, figures, disturbed="x" if draw.random() < disturbed else None))
        runs += 1
        assert runs <= max(16, space.all() // 5) if not limited else runs <= 9
    assert search.remaining() == 0
    assert search.reason
