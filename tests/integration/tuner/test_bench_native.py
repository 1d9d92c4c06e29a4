"""A benchmark and a soak on the real native engine with a small generated MoE, and their result if the engine dies."""

import os
import re
import signal
from pathlib import Path

import pytest

from support.native_engine import native, plan_for, run
from tokenmill.model.synthetic import generate
from tokenmill.tuner import history
from tokenmill.tuner.bench.rig import Rig, pids_of
from tokenmill.tuner.bench.run import BenchOptions, BenchSection, bench
from tokenmill.tuner.bench.served import Prose
from tokenmill.tuner.point import PointScope
from tokenmill.tuner.soak.judge import Limit, SoakStep
from tokenmill.tuner.soak.memory_watch import Gauge
from tokenmill.tuner.soak.run import fill

PLACE = PointScope("box", "m", "moe", "id", "native", "build 1")


@pytest.fixture(scope="module")
def moe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "moe.gguf"
    generate.write("moe", generate.sizes("moe", {"layers": 2, "embed": 256}), path)
    return path


def test_every_part_on_the_served_path(moe: Path, tmp_path: Path) -> None:
    plan = plan_for(moe, context=256, sequences=2, ubatch=64)
    parts: tuple[BenchSection, ...] = ("first", "cache", "sweep", "threads", "sequences")

    async def scene() -> None:
        async with native(moe, tmp_path, plan=plan) as engine:
            rig = Rig(engine, Prose(engine, 5), 2)
            order = BenchOptions(parts, depth=192, step=64, tokens=8, threads=(1,), sequences=(1, 3))
            done = await bench(rig, order, PLACE, plan=plan, record=lambda speed: history.append(tmp_path, speed))
            assert [row.what for row in done.rows] == [
                "first",
                "cold",
                "again",
                "tail",
                "sweep",
                "sweep",
                "sweep",
                "threads",
                "sequences",
                "sequences",
            ]
            sweep = done.of("sweep")
            assert [row.pp for row in sweep] == pytest.approx([64, 64, 64], abs=2)
            assert [row.n_kv for row in sweep] == pytest.approx([0, 64, 128], abs=2)
            assert all(row.tg == 8 and row.s_tg_tok_s is not None and row.s_tg_tok_s.low > 0 for row in done.rows[:8])
            again = done.of("again")[0]
            assert again.n_kv == again.prompt_tokens - 1
            assert done.cache is not None
            assert done.cache.saved_tokens == again.n_kv
            assert done.cache.state_bytes is not None
            assert done.cache.predicted_state_bytes is not None
            # a saved head has a few numbers for each cell beside its keys and values
            assert 0.9 < done.cache.state_bytes / done.cache.predicted_state_bytes < 1.5
            assert [row.sequences for row in done.of("sequences")] == [1, 3]
            assert done.of("sequences")[1].tg == 24
            assert (engine.hello.threads, engine.identity.slots) == (1, 2)  # all is as it was

    run(scene)
    kept = history.read(tmp_path)
    assert len(kept) == 9
    assert {speed.source for speed in kept} == {"bench"}
    assert {speed.dials.threads for speed in kept} == {1}
    assert [speed.dials.sequences for speed in kept[7:]] == [1, 3]
    assert all(speed.figures.decode_tok_s is not None for speed in kept)


def test_a_soak_fills_one_sequence_and_then_all_slots(moe: Path, tmp_path: Path) -> None:
    plan = plan_for(moe, context=256, sequences=2, ubatch=64)
    told: list[SoakStep] = []

    async def scene() -> None:
        async with native(moe, tmp_path, plan=plan) as engine:
            rig = Rig(engine, Prose(engine, 5), 1)
            gauge = Gauge(lambda: pids_of(engine), plan)
            limit = Limit(256 - rig.prose.prefix_tokens, 64)
            alone = await fill(rig, limit, gauge.read, tell=told.append)
            together = await fill(rig, limit, gauge.read, sequences=2, tell=told.append)
            assert (alone.ended, alone.verdict.usable_context) == ("goal", limit.goal)
            assert (together.ended, together.verdict.usable_context) == ("goal", limit.goal)
            counters = (await engine.status()).counters
            assert counters.preemptions == 0

    run(scene)
    assert [(step.depth, step.sequences) for step in told] == [(d, n) for n in (1, 2) for d in (64, 128, 192, 256)]
    assert all(step.decode_tok_s is not None and step.decode_tok_s > 0 for step in told)
    held = [step.memory[0].measured_bytes or 0 for step in told]
    assert min(held) > sum(row.bytes for row in plan.ledger.after_load if row.item in ("kv", "repack"))


def test_an_engine_that_is_killed_is_a_result(moe: Path, tmp_path: Path) -> None:
    plan = plan_for(moe, context=256, sequences=1, ubatch=64)

    async def scene() -> None:
        async with native(moe, tmp_path, plan=plan) as engine:
            rig = Rig(engine, Prose(engine, 5), 1)

            def tell(step: SoakStep) -> None:
                assert engine.identity.pid is not None
                os.kill(engine.identity.pid, signal.SIGKILL if step.depth == 128 else 0)

            found = await fill(rig, Limit(256, 64), lambda _: (), tell=tell)
        assert (found.ended, found.verdict.usable_context) == ("died", 128)
        assert re.findall(r"\d+", found.verdict.reason) == ["192", "128"]
        assert found.last_words is not None
        assert "SIGKILL" in found.last_words

    run(scene)
