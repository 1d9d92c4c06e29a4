"""Trials on the real native engine with a small generated MoE: settings are applied, and faults are outcomes."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from support.native_engine import plan_for, run
from tokenmill.config import EngineConfig
from tokenmill.engine import load_history
from tokenmill.engine.engine import Counters, Engine
from tokenmill.model.synthetic import generate
from tokenmill.native.client import NativeEngine
from tokenmill.tuner.engine_rig import NativeRig, Starter
from tokenmill.tuner.measure import MeasureOptions
from tokenmill.tuner.point import Aim, Trial, TrialSettings
from tokenmill.tuner.trial_run import TrialContext, attempt
from tokenmill.tuner.work import TuneRequests, generated_jobs

AIM = Aim(prompt_tokens=48, tail_tokens=4, output_tokens=8)
DIALS = TrialSettings(1, 1, 2, 128, 512)


@pytest.fixture(scope="module")
def moe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "moe.gguf"
    generate.write("moe-mla", generate.sizes("moe-mla", {"layers": 2, "embed": 256}), path)
    return path


@asynccontextmanager
async def bed(
    moe: Path, state: Path, *, latency: bool = False, step_limit_s: float = 60.0
) -> AsyncIterator[TrialContext]:
    plan = plan_for(moe, context=512, sequences=2)
    starter = Starter(moe, EngineConfig(warm=False, step_limit_s=step_limit_s), state, "tune-test")
    rig = NativeRig(plan, starter, max_sequences=4)
    try:
        yield TrialContext(plan, rig, MeasureOptions(seconds=0.2, latency=latency), watch=None)
    finally:
        await rig.close()


def engine_of(on: TrialContext) -> NativeEngine:
    assert isinstance(on.rig, NativeRig)
    assert isinstance(on.rig.engine, NativeEngine)
    return on.rig.engine


def test_all_dials_that_do_not_move_weights_are_turned_in_one_load(moe: Path, tmp_path: Path) -> None:
    async def work() -> None:
        async with bed(moe, tmp_path, latency=True) as on:
            turned = [
                DIALS,
                replace(DIALS, sequences=4, ubatch=64, context=256),
                replace(DIALS, flash_attention=False),
                replace(DIALS, cache_type_k="q8_0", cache_type_v="q8_0"),
            ]
            made = generated_jobs(AIM)
            for number, dials in enumerate(turned):
                trial = await attempt(on, dials, made, number)
                assert trial.outcome == "measured", trial.detail
                figures = trial.figures
                assert figures.decode_tok_s
                assert figures.prefill_tok_s
                assert figures.first_token_s
                assert figures.jobs_tok_s is not None
                assert figures.jobs_tok_s <= figures.decode_tok_s
                assert figures.host_bytes is not None
                assert figures.host_bytes > moe.stat().st_size
                hello = engine_of(on).hello
                assert (hello.threads, hello.threads_batch) == (dials.threads, dials.threads_batch)
                assert (hello.identity.slots, hello.identity.context) == (dials.sequences, dials.context)
                assert trial.loaded is (number == 0)
            await on.rig.turn(replace(DIALS, threads=2, threads_batch=3))
            assert (engine_of(on).hello.threads, engine_of(on).hello.threads_batch) == (2, 3)
            assert on.rig.loads == 1
            assert on.depth == AIM.prompt_tokens + AIM.tail_tokens

    run(work)
    assert len(load_history.read(tmp_path)) == 1, "the load is in the machine's history"


def test_a_prefix_is_computed_once_in_a_trial_and_again_in_the_next(moe: Path, tmp_path: Path) -> None:
    async def work() -> None:
        async with bed(moe, tmp_path) as on:
            heads = []
            for _ in range(2):  # the very same prompts
                before = await computed(on)
                trial = await attempt(on, DIALS, generated_jobs(AIM), 1)
                assert trial.outcome == "measured", trial.detail
                seen, reused = await computed(on)
                heads.append(seen - before[0])
                # every job reuses the prefix; alone, each would have computed its own
                assert reused - before[1] >= 2 * DIALS.sequences * AIM.prompt_tokens
                assert seen - before[0] < reused - before[1]
            assert min(heads) >= AIM.prompt_tokens

    run(work)


async def computed(on: TrialContext) -> tuple[int, int]:
    """Prompt tokens computed and reused so far."""
    assert isinstance(on.rig, NativeRig)
    if on.rig.engine is None:
        return 0, 0
    counters = await fresh(engine_of(on))
    assert counters.prompt_tokens_computed is not None
    assert counters.prompt_tokens_reused is not None
    return counters.prompt_tokens_computed, counters.prompt_tokens_reused


async def fresh(engine: NativeEngine) -> Counters:
    """Counters of a pulse that came after now."""
    before = engine.heartbeat
    while engine.heartbeat is before:
        await asyncio.sleep(0.02)
    return engine.heartbeat.counters


def test_dials_that_llama_cpp_refuses_are_an_outcome_with_its_words_and_the_engine_lives(
    moe: Path, tmp_path: Path
) -> None:
    async def work() -> None:
        async with bed(moe, tmp_path) as on:
            bad = replace(DIALS, cache_type_k="q8_0", cache_type_v="q8_0", flash_attention=False)
            refused = await attempt(on, bad, generated_jobs(AIM), 0)
            assert refused.outcome == "refused"
            assert refused.detail is not None
            assert "flash_attn" in refused.detail
            good = await attempt(on, DIALS, generated_jobs(AIM), 1)
            assert good.outcome == "measured", good.detail
            assert on.rig.loads == 1

    run(work)


@pytest.mark.parametrize(("number", "outcome"), [(signal.SIGSEGV, "died"), (signal.SIGSTOP, "hung")])
def test_a_worker_that_dies_or_hangs_in_a_trial_is_an_outcome_and_comes_back(
    moe: Path, tmp_path: Path, number: signal.Signals, outcome: str
) -> None:
    async def work() -> None:
        async with bed(moe, tmp_path, step_limit_s=5.0 if outcome == "hung" else 60.0) as on:
            hit: list[int] = []

            async def struck(engine: Engine) -> TuneRequests:
                found = await generated_jobs(AIM)(engine)
                if not hit and engine.identity.pid is not None:
                    hit.append(engine.identity.pid)
                    os.kill(engine.identity.pid, number)
                return found

            bad = await attempt(on, DIALS, struck, 0)
            assert bad.outcome == outcome, bad.detail
            assert bad.detail
            good = await attempt(on, DIALS, struck, 1)
            assert good.outcome == "measured", good.detail
            assert good.loaded
            assert on.rig.loads == 2
            with pytest.raises(ProcessLookupError):
                os.kill(hit[0], 0)

    run(work)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_trial_whose_worker_another_process_kills_is_repeated(
    moe: Path, tmp_path: Path, number: signal.Signals
) -> None:
    async def work() -> None:
        async with bed(moe, tmp_path) as on:
            hit: list[int] = []

            async def struck(engine: Engine) -> TuneRequests:
                found = await generated_jobs(AIM)(engine)
                if len(hit) < 2 and engine.identity.pid is not None:
                    hit.append(engine.identity.pid)
                    os.kill(engine.identity.pid, number)
                return found

            trial = await attempt(on, DIALS, struck, 0)
            assert trial.outcome == "measured", trial.detail
            assert len({*hit}) == 2
            assert on.rig.loads == 3

    run(work)


def test_jobs_that_do_not_fit_the_context_are_an_outcome(moe: Path, tmp_path: Path) -> None:
    async def work() -> Trial:
        async with bed(moe, tmp_path) as on:
            return await attempt(on, replace(DIALS, context=32), generated_jobs(AIM), 0)

    short = run(work)
    assert short.outcome == "refused"
    assert short.detail is not None
    assert "context" in short.detail
