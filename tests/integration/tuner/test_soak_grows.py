"""A soak of an engine that allocates memory for every token ends before the limit."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from support.native_engine import run
from support.prefix_engine import GrowingEngine
from tokenmill.measurements import journal_path, read_json
from tokenmill.tuner.bench.rig import Rig, pids_of
from tokenmill.tuner.bench.served import Prose
from tokenmill.tuner.soak.judge import Limit, SoakResult, SoakStep, growth
from tokenmill.tuner.soak.memory_watch import Gauge
from tokenmill.tuner.soak.run import Filled, fill
from tokenmill.tuner.soak.store import load, save
from tokenmill.units import KIB, MIB

PER_TOKEN = 32 * KIB
KEEP = 2 * MIB


def soaked(engine_of: Callable[[], GrowingEngine], goal: int, step: int, limit_bytes: int | None) -> Filled:
    async def scene() -> Filled:
        engine = engine_of()
        try:
            before = Gauge(lambda: pids_of(engine), None).read(0)[0].measured_bytes or 0
            gauge = Gauge(
                lambda: pids_of(engine), None, limit_bytes=None if limit_bytes is None else before + limit_bytes
            )
            rig = Rig(engine, Prose(engine, 1), 1)
            return await fill(rig, Limit(goal, step, (("dram", KEEP),)), gauge.read)
        finally:
            await engine.close()

    return run(scene)


def test_it_stops_before_the_limit_and_says_how_far_one_can_go() -> None:
    # 34 MiB at 32 KiB a token, less the reserve, are 1024 tokens; steps of 256 take 8 MiB
    found = soaked(lambda: GrowingEngine(PER_TOKEN), 2048, 256, 34 * MIB)
    assert found.ended == "memory"
    assert all(step.whole for step in found.steps)
    slope = growth(found.steps, "dram")
    assert slope == pytest.approx(PER_TOKEN, rel=0.2)
    assert 512 <= found.verdict.usable_context <= 1024
    assert found.steps[-1].depth in (512, 768, 1024)
    assert found.verdict.left_bytes is not None
    assert found.verdict.left_bytes >= KEEP
    assert "host memory" in found.verdict.reason
    assert "the reserve is 2.0 MiB" in found.verdict.reason


def test_without_a_limit_the_goal_is_reached() -> None:
    found = soaked(lambda: GrowingEngine(PER_TOKEN), 512, 256, None)
    assert (found.ended, found.verdict.usable_context, len(found.steps)) == ("goal", 512, 2)


def test_an_engine_that_dies_of_it_is_a_result_with_its_last_words() -> None:
    found = soaked(lambda: GrowingEngine(KIB, dies_at=600), 2048, 256, None)
    assert (found.ended, found.verdict.usable_context) == ("died", 512)
    assert found.last_words == "the engine was killed by SIGKILL (out of memory)\nits last words: no more"


def test_a_result_is_kept_whole_and_read_back(tmp_path: Path) -> None:
    found = soaked(lambda: GrowingEngine(PER_TOKEN), 512, 256, None)
    result = SoakResult(
        "box",
        "machine",
        "model",
        "some/model:1",
        "native",
        "build 1",
        "2026-11-15T10:00:00+00:00",
        512,
        found.steps,
        found.verdict.usable_context,
        found.verdict.reason,
        found.ended,
        reserve_bytes=(("dram", KEEP),),
    )
    assert load(tmp_path, "machine", "some/model:1") is None
    assert save(tmp_path, replace(result, goal=256)) == journal_path(tmp_path)
    save(tmp_path, result)
    assert load(tmp_path, "machine", "some/model:1") == result
    assert load(tmp_path, "machine", "some/model:2") is None
    assert len(read_json(tmp_path, "soak")) == 1


def test_a_step_that_would_break_the_limit_is_broken_off() -> None:
    steps: list[SoakStep] = []

    async def scene() -> Filled:
        engine = GrowingEngine(MIB)
        try:
            before = Gauge(lambda: pids_of(engine), None).read(0)[0].measured_bytes or 0
            gauge = Gauge(lambda: pids_of(engine), None, limit_bytes=before + 20 * MIB)
            rig = Rig(engine, Prose(engine, 1), 1)
            return await fill(rig, Limit(512, 64, (("dram", KEEP),)), gauge.read, tell=steps.append)
        finally:
            await engine.close()

    found = run(scene)
    assert (found.ended, found.verdict.usable_context) == ("memory", 0)
    assert [step.depth for step in steps] == [64]
    assert "at 64 tokens host memory had" in found.verdict.reason
