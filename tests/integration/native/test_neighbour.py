"""A batch that leaves a core free: which threads of real engines may run where, and where they run.

The effect on the speed of other processes is measured by bench/neighbour.py.
"""

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

from support.native_engine import GREEDY, native, run, this_machine
from support.own_cpus import own_cpus_restored
from support.tiny_models import write_moe
from tokenmill.engine.engine import Request, answer
from tokenmill.model.read import read
from tokenmill.native.client import NativeEngine
from tokenmill.native.worker_config import goal_for
from tokenmill.planner.goal import Goal
from tokenmill.planner.make import make
from tokenmill.planner.plan import Plan

SLOTS, LOOKS = 4, 40


def plan_of(model: Path, *, threads: int, reserve: int) -> Plan:
    goal = Goal(context=512, sequences=SLOTS, ubatch=256, threads=threads, reserve_cores=reserve, cpu_only=True)
    return make(this_machine(), read(str(model)), goal_for(goal))


def threads_of(pid: int) -> list[tuple[str, int, set[int]]]:
    """State, latest CPU and allowed CPUs of every thread."""
    found = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        with suppress(OSError):  # it has ended
            fields = (task / "stat").read_text().rpartition(")")[2].split()
            found.append((fields[0], int(fields[36]), os.sched_getaffinity(int(task.name))))
    return found


@asynccontextmanager
async def batch_on(engine: NativeEngine) -> AsyncIterator[int]:
    """Endless jobs on every slot, all different."""

    async def slot(number: int) -> None:
        turn = 0
        while True:
            turn += 1
            text = f"{number} {turn} " + " ".join(f"t{(turn + word) % 500}" for word in range(60))
            await answer(engine, Request(text, GREEDY, max_tokens=8, ignore_eos=True))

    pid = engine.identity.pid
    assert pid is not None
    slots = [asyncio.create_task(slot(number)) for number in range(SLOTS)]
    try:
        yield pid
    finally:
        for task in slots:
            task.cancel()
        await asyncio.gather(*slots, return_exceptions=True)


async def looked_at(engine: NativeEngine) -> tuple[set[int], set[int]]:
    """CPUs on which threads of a busy engine may run, and those on which they ran or waited."""
    may, did, looks = set[int](), set[int](), 0
    async with batch_on(engine) as pid:
        while looks < LOOKS:
            threads = threads_of(pid)
            running = {cpu for state, cpu, _ in threads if state == "R"}
            looks += bool(running)
            did |= running
            may = may.union(*(allowed for _, _, allowed in threads))
            await asyncio.sleep(0.005)
    return may, did


def test_a_batch_that_leaves_a_core_never_runs_on_it(tmp_path: Path) -> None:
    moe = write_moe(tmp_path)

    async def scene() -> None:
        with own_cpus_restored() as cpus:
            per_core = this_machine().cpu.threads_per_core or 1
            greedy = plan_of(moe, threads=len(cpus), reserve=0)
            leaving = plan_of(moe, threads=len(cpus) - per_core, reserve=1)
            async with (
                native(moe, tmp_path / "state", plan=greedy, name="all") as everywhere,
                native(moe, tmp_path / "state", plan=leaving, name="some") as kept,
            ):
                left = cpus - os.sched_getaffinity(0)  # we keep off it too, since that start
                assert len(left) == per_core
                may, did = await looked_at(kept)
                assert may == cpus - left
                assert did <= may
                may, did = await looked_at(everywhere)
                assert may == cpus
                assert did <= may

    run(scene)
