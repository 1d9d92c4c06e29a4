"""Real engines with a reserved core: no thread of the engine or of tokenmill uses it."""

import asyncio
import json
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from support.own_cpus import own_cpus_restored
from support.servers import EMBEDDED, run, small_plan
from tokenmill.cli import run as command
from tokenmill.config import EngineConfig
from tokenmill.engine import restart
from tokenmill.engine.engine import Request, Sampling, answer
from tokenmill.engine.limits.start import current_limits, start_limited
from tokenmill.engine.loading.progress import LoadProgress
from tokenmill.engine.process import registry
from tokenmill.engine.process.identity import descendants
from tokenmill.native.launching import start, start_restarting
from tokenmill.planner.plan import Plan
from tokenmill.units import GIB, format_ranges

GREEDY = Sampling(temperature=0.0)
NATIVE = EngineConfig()


@pytest.fixture(autouse=True)
def cpus() -> Iterator[set[int]]:
    with own_cpus_restored() as before:
        yield before


def leaving_plan(model: Path) -> Plan:
    plan = small_plan(model)
    return replace(plan, goal=replace(plan.goal, reserve_cores=1, reserve_ram_bytes=GIB))


def allowed(*pids: int) -> set[frozenset[int]]:
    """The distinct affinities of the threads of processes."""
    tasks = [task for pid in pids for task in Path(f"/proc/{pid}/task").iterdir()]
    return {frozenset(os.sched_getaffinity(int(task.name))) for task in tasks}


@pytest.mark.parametrize("config", [NATIVE, EMBEDDED], ids=["native", "llama-server"])
def test_every_thread_keeps_off_the_reserved_core(
    config: EngineConfig, tmp_path: Path, smollm2_path: Path, cpus: set[int]
) -> None:
    notes: list[str] = []

    def progress(now: LoadProgress) -> None:
        if now.phase == "starting" and now.detail and now.bytes_total is None:
            notes.append(now.detail)

    async def scene() -> None:
        engine = await start(
            leaving_plan(smollm2_path),
            model_path=smollm2_path,
            config=config,
            state=tmp_path,
            name="a",
            progress=progress,
        )
        try:
            await answer(engine, Request("Once", GREEDY, max_tokens=2))
            pid = engine.identity.pid
            assert pid is not None
            [kept] = allowed(pid, *descendants(pid))
            assert len(kept) < len(cpus)
            assert allowed(os.getpid()) == {kept}
            [record] = registry.listed(tmp_path)
            now = current_limits(tmp_path, record)
            assert now is not None
            assert set(now.cpus or ()) == kept
            assert tuple(notes) == now.describe()
            assert notes[0].startswith("1 core (CPU")
            assert "1.0 GiB" in notes[1]
            os.sched_setaffinity(pid, cpus)  # an engine that changes its affinity is detected; a cpuset prevents it
            strayed = current_limits(tmp_path, record)
            assert strayed is not None
            assert (strayed.cpus is None) == (now.cores_by == "affinity")
            noted = any(note.startswith("1 thread ") for note in strayed.lacking)
            assert noted == (now.cores_by == "affinity")
        finally:
            await engine.close()

    run(scene)


def test_vllm_gets_the_cpus_that_it_may_use(tmp_path: Path, smollm2_path: Path) -> None:
    async def scene() -> None:
        process = await start_limited(
            ["sh", "-c", "echo bound to $VLLM_CPU_OMP_THREADS_BIND; exec sleep 60"],
            leaving_plan(smollm2_path),
            NATIVE,
            state=tmp_path,
            name="a",
            env={"VLLM_CPU_OMP_THREADS_BIND": "0-99"},
        )
        while not process.tail(1):
            await asyncio.sleep(0.01)
        await process.stop()
        assert process.tail(1) == (f"bound to {format_ranges(os.sched_getaffinity(0))}",)

    run(scene)


def test_one_that_is_started_again_leaves_the_same_core(
    tmp_path: Path, smollm2_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(restart, "delay_s", lambda *_: 0.0)

    async def scene() -> None:
        engine = await start_restarting(
            leaving_plan(smollm2_path), model_path=smollm2_path, config=NATIVE, state=tmp_path, name="a"
        )
        first = engine.identity.pid
        assert first is not None
        before = allowed(first)
        os.kill(first, 9)
        while engine.identity.pid == first or (await engine.status()).state != "ready":
            await asyncio.sleep(0.02)
        assert engine.identity.pid is not None
        assert allowed(engine.identity.pid) == before
        await engine.close()

    run(scene)


def test_doctor_and_status_show_what_holds(
    tmp_path: Path, smollm2_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = tmp_path / "tokenmill.toml"
    settings.write_text(f'state_dir = "{tmp_path}"\n[reserve]\ncores = 1\nram_bytes = "1 GiB"\n')

    def said(*words: str) -> str:
        command([*words, "--config", str(settings)])
        return capsys.readouterr().out

    async def scene() -> None:
        engine = await start(
            leaving_plan(smollm2_path), model_path=smollm2_path, config=NATIVE, state=tmp_path, name="a"
        )
        try:
            found = json.loads(await asyncio.to_thread(said, "doctor", "--json"))["findings"]
            checks = {finding["check"]: finding for finding in found}
            assert checks["reserve-cores"]["severity"] == "fine"
            assert "1.0 GiB" in checks["reserve-ram"]["seen"]
            assert checks["reserve"]["seen"].startswith("engine a: 1 core (CPU")
            shown = " ".join((await asyncio.to_thread(said, "status")).split())
            assert "engine a: 1 core (CPU" in shown
        finally:
            await engine.close()

    run(scene)
