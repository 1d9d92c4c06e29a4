"""The trial loop: every outcome is a trial, the engine is restarted, and only a model that never loads ends the
loop.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cache

import pytest

from support.plans import placed, settings
from support.run_models import model
from support.ticking_engine import Ticking
from tokenmill.engine.engine import Engine
from tokenmill.errors import EngineDied, EngineError, EngineTimeout, RequestRefused, TokenmillError
from tokenmill.planner.plan import Plan
from tokenmill.tuner.energy import Joules, Meter
from tokenmill.tuner.measure import MeasureOptions
from tokenmill.tuner.noise_monitor import NoiseMonitor
from tokenmill.tuner.point import Aim, Trial, TrialOutcome, TrialSettings
from tokenmill.tuner.trial_run import MAX_FAILED_LOADS, MAX_KILLS, TrialContext, TrialStep, attempt, drive, outcome_of
from tokenmill.tuner.work import GeneratedJobs, TuneRequests

DIALS = TrialSettings(1, 1, 2, 512, 1024)
KILLED = "the native engine was probably killed by the OOM killer while using 20 GiB"
CRASHED = "the native engine was killed by SIGSEGV (invalid memory access: a bug or a broken build)"
SHOT = "the native engine was killed by SIGKILL (by another process; the kernel counted no out-of-memory kill)"


@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        (EngineDied(KILLED), "out of memory"),
        (EngineDied(CRASHED), "died"),
        (EngineDied(SHOT), "died"),
        (EngineDied(CRASHED, hint="last lines of engine.log:\n  cudaMalloc failed: out of memory"), "out of memory"),
        (EngineDied("the native engine hung: a step had been running for 181.0 s, and 180 s are allowed"), "hung"),
        (EngineTimeout("it took longer"), "hung"),
        (
            EngineError("llama.cpp refuses a context of 9 cells: failed to allocate buffer for kv cache"),
            "out of memory",
        ),
        (EngineError("llama.cpp refuses a context of 9 cells: quantized V cache requires flash_attn"), "refused"),
        (RequestRefused("no"), "refused"),
    ],
)
def test_what_an_error_says_of_a_trial(error: TokenmillError, outcome: TrialOutcome) -> None:
    assert outcome_of(error) == outcome


@dataclass
class FakeStand:
    """Loads as told: an error, or an engine; and refuses or kills at marked dials."""

    loading: list[EngineError | None] = field(default_factory=list)  # of each load in turn; then all succeed
    refused: frozenset[int] = frozenset()  # sequences that cannot be set
    deadly: frozenset[int] = frozenset()  # sequences at which the engine dies
    killed: list[EngineDied] = field(default_factory=list)  # when it is set up, as often as there are errors
    loads: int = 0
    losses: int = 0
    engine: Ticking | None = None
    sequences: int = 0

    async def ready(self, dials: TrialSettings) -> Engine:
        if self.engine is None:
            self.loads += 1
            error = self.loading.pop(0) if self.loading else None
            if error is not None:
                raise error
            self.engine = Ticking()
        return self.engine

    async def turn(self, dials: TrialSettings) -> None:
        if dials.sequences in self.refused:
            raise EngineError("llama.cpp refuses a context of 4096 cells: it does not like it")
        if self.killed:
            raise self.killed.pop(0)
        assert self.engine is not None
        self.engine.dies_after = 0 if dials.sequences in self.deadly else None

    async def lost(self) -> None:
        self.losses += 1
        self.engine = None

    async def close(self) -> None:
        self.engine = None


class Loud(NoiseMonitor):
    """A machine on which something else runs."""

    def stop(self) -> str | None:
        return "python3 (pid 7) used 0.8 cores"


class Steady(Meter):
    """Seven joules, however long."""

    def stop(self) -> Joules:
        return Joules(7.0)


@cache
def plan() -> Plan:
    return placed(model("llama-3.3-70b:Q4_K_M"), settings())


def bed(rig: FakeStand, watch: type[NoiseMonitor] | None = None) -> TrialContext:
    return TrialContext(plan(), rig, MeasureOptions(seconds=0.02), watch=watch)


async def work(_engine: Engine) -> TuneRequests:
    return GeneratedJobs(Aim(prompt_tokens=8, tail_tokens=2, output_tokens=4), tuple(range(50)))


def tried(rig: FakeStand, *sequences: int, watch: type[NoiseMonitor] | None = None) -> list[Trial]:
    async def all_of_them() -> list[Trial]:
        on = bed(rig, watch)
        async with asyncio.timeout(30):
            return [await attempt(on, replace(DIALS, sequences=count), work, at) for at, count in enumerate(sequences)]

    return asyncio.run(all_of_them())


def test_a_trial_has_figures_and_says_what_it_took() -> None:
    first, second = tried(FakeStand(), 2, 3)
    assert (first.outcome, first.loaded, second.loaded) == ("measured", True, False)
    assert first.counts
    assert first.figures.jobs_tok_s
    assert first.seconds > 0
    assert first.when is not None
    assert first.when.endswith("+00:00")


def test_a_disturbed_trial_keeps_its_figures_and_does_not_count() -> None:
    (found,) = tried(FakeStand(), 2, watch=Loud)
    assert found.disturbed == "python3 (pid 7) used 0.8 cores"
    assert found.figures.jobs_tok_s
    assert not found.counts


def test_energy_per_token_or_the_reason_without() -> None:
    async def metered() -> Trial:
        on = TrialContext(plan(), FakeStand(), MeasureOptions(seconds=0.02), watch=None, meter=Steady)
        return await attempt(on, DIALS, work, 0)

    assert asyncio.run(metered()).figures.joules_per_token


def test_an_engine_that_dies_is_an_outcome_and_the_next_trial_loads_again() -> None:
    rig = FakeStand(deadly=frozenset({8}))
    dead, alive = tried(rig, 8, 2)
    assert dead.outcome == "died"
    assert dead.detail is not None
    assert "SIGSEGV" in dead.detail
    assert (alive.outcome, alive.loaded) == ("measured", True)
    assert (rig.loads, rig.losses) == (2, 1)


def killed(where: str = "") -> EngineDied:
    return EngineDied(f"{where}{SHOT}", from_outside=True)


def test_a_trial_whose_engine_another_process_kills_is_repeated() -> None:
    rig = FakeStand(killed=[killed(), killed()])
    (found,) = tried(rig, 2)
    assert (found.outcome, found.loaded, rig.loads, rig.losses) == ("measured", True, 3, 2)


def test_a_kill_while_the_model_loads_is_no_failed_load() -> None:
    rig = FakeStand(loading=[killed("while starting, "), None])
    (found,) = tried(rig, 2)
    assert (found.outcome, rig.loads) == ("measured", 2)


def test_an_engine_that_is_killed_again_and_again_ends_the_tuning_and_nothing_is_kept() -> None:
    search, kept = Listed(2), list[Trial]()
    on = bed(FakeStand(killed=[killed()] * MAX_KILLS))

    async def whole() -> None:
        async with asyncio.timeout(30):
            await drive(on, search, work, keep=kept.append, tell=lambda _: None)

    with pytest.raises(EngineError, match=str(MAX_KILLS)) as caught:
        asyncio.run(whole())
    assert caught.value.hint
    assert kept == search.told == []


def test_dials_that_the_engine_refuses_cost_no_load() -> None:
    rig = FakeStand(refused=frozenset({8}))
    refused, after = tried(rig, 8, 2)
    assert refused.outcome == "refused"
    assert (after.outcome, after.loaded, rig.loads, rig.losses) == ("measured", False, 1, 0)


def test_what_the_ledger_has_no_room_for_is_not_tried() -> None:
    rig = FakeStand()
    (found,) = tried(rig, 100_000)
    assert found.outcome == "out of memory"
    assert found.detail is not None
    assert found.detail.startswith("not tried")
    assert rig.loads == 0


def test_a_model_that_does_not_load_at_first_ends_it() -> None:
    with pytest.raises(EngineError, match="no such file"):
        tried(FakeStand(loading=[EngineError("no such file")]), 2)


def test_a_load_that_fails_later_is_an_outcome_until_it_fails_again_and_again() -> None:
    bad: Sequence[EngineError] = [EngineError("killed while loading")] * MAX_FAILED_LOADS
    rig = FakeStand(loading=[None, bad[0], None], deadly=frozenset({8}))
    assert [trial.outcome for trial in tried(rig, 8, 2, 2)] == ["died", "refused", "measured"]
    with pytest.raises(EngineError, match="while loading"):
        tried(FakeStand(loading=[None, *bad], deadly=frozenset({8})), 8, 2, 2, 2)


class Listed:
    """A search that asks for what it was given."""

    def __init__(self, *sequences: int) -> None:
        self.left = [replace(DIALS, sequences=count) for count in sequences]
        self.told: list[Trial] = []
        self.reason = "the list is over"

    def ask(self) -> TrialSettings | None:
        return self.left.pop(0) if self.left else None

    def tell(self, trial: Trial) -> None:
        self.told.append(trial)

    def best(self) -> Trial | None:
        return max((each for each in self.told if each.counts), key=lambda each: each.dials.sequences, default=None)

    def remaining(self) -> int:
        return len(self.left)


def test_the_loop_keeps_every_trial_before_it_counts_and_takes_up_old_ones() -> None:
    old = Trial(replace(DIALS, sequences=16), "died")
    search, kept, steps = Listed(2, 8, 3), list[Trial](), list[TrialStep]()

    def keep(trial: Trial) -> None:
        assert trial not in search.told
        kept.append(trial)

    async def whole() -> tuple[Trial, ...]:
        async with asyncio.timeout(30):
            on = bed(FakeStand(deadly=frozenset({8})))
            return await drive(on, search, work, known=[old], keep=keep, tell=steps.append)

    made = asyncio.run(whole())
    assert made == (old, *kept) == tuple(search.told)
    assert [trial.outcome for trial in kept] == ["measured", "died", "measured"]
    assert [(step.number, step.remaining) for step in steps] == [(2, 2), (3, 1), (4, 0)]
    assert steps[-1].best is not None
    assert steps[-1].best.dials.sequences == 3
