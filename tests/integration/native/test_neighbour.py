"""A busy neighbour beside a real batch: it loses less when the batch leaves a core to it.

The neighbour does pure work, counts it, may run anywhere, and yields to the engines (nice), as what must not be noticed
does. Two engines on the same generated MoE take turns beside it: one with a thread on every core, one that leaves a
core. Whatever else the machine does slows both kinds of turn, so they alternate, and there are as many as it takes for
one kind to be ahead more often than chance would have it. Where that is allowed, all run before the rest of the machine.
"""

import asyncio
import mmap
import os
import struct
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from itertools import count
from math import comb
from pathlib import Path
from statistics import median

import pytest

from support.native_engine import GREEDY, native, run, this_machine
from support.own_cpus import own_cpus_restored
from tokenmill.config import EngineConfig
from tokenmill.engine.engine import Request, answer
from tokenmill.engine.native.engine import NativeEngine
from tokenmill.engine.native.order import goal_for
from tokenmill.model import synth
from tokenmill.model.read import read
from tokenmill.plan.goal import Goal
from tokenmill.plan.make import make
from tokenmill.plan.plan import Plan

TURN_S, LANES = 0.35, 4
LEAST_TURNS, MOST_TURNS, LIMIT_S = 7, 60, 40.0
CHANCE = 0.01
FIRST, YIELDS = -20, 10  # nice, and how much nicer the neighbour is
NEIGHBOUR = """
import hashlib, mmap, struct, sys
with open(sys.argv[1], "r+b") as file:
    seen = mmap.mmap(file.fileno(), 8)
done, data = 0, bytes(16384)
print("works", flush=True)
while True:
    hashlib.sha256(data).digest()
    done += 1
    seen[:] = struct.pack("<Q", done)
"""


@dataclass(frozen=True)
class Turn:
    """What was seen in a fraction of a second."""

    done_s: float  # the neighbour's work in a second of wall time
    rivals: int  # threads of the engine that ran or waited to run on the core that may be left, at all looks together


class Neighbour:
    """Another process, and how far it has come."""

    def __init__(self, pid: int, seen: mmap.mmap) -> None:
        self.pid, self._seen = pid, seen

    def done(self) -> int:
        return int(struct.unpack("<Q", self._seen[:])[0])

    async def beside(self, engine: int, left: set[int]) -> Turn:
        """One turn beside an engine's process."""
        before, began, rivals = self.done(), time.monotonic(), 0
        while (spent := time.monotonic() - began) < TURN_S:
            rivals += sum(state == "R" and cpu in left for state, cpu in threads_of(engine))
            await asyncio.sleep(TURN_S / 20)
        return Turn((self.done() - before) / spent, rivals)


def threads_of(pid: int) -> list[tuple[str, int]]:
    """State and latest CPU of every thread."""
    found = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        with suppress(OSError):  # it has ended
            fields = (task / "stat").read_text().rpartition(")")[2].split()
            found.append((fields[0], int(fields[36])))
    return found


@contextmanager
def neighbour(folder: Path) -> Iterator[Neighbour]:
    counter = folder / "count"
    counter.write_bytes(bytes(8))
    words = [sys.executable, "-c", NEIGHBOUR, str(counter)]
    with (
        counter.open("r+b") as file, mmap.mmap(file.fileno(), 8) as seen,
        subprocess.Popen(words, stdout=subprocess.PIPE, start_new_session=True) as process,
    ):  # fmt: skip
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == b"works\n"
            yield Neighbour(process.pid, seen)
        finally:
            process.kill()


@pytest.fixture(scope="module")
def moe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "moe.gguf"
    synth.write("moe", synth.sizes("moe", {"layers": 4, "embed": 512}), path)
    return path


def plan_of(model: Path, *, threads: int, reserve: int) -> Plan:
    goal = Goal(context=512, sequences=LANES, ubatch=256, threads=threads, reserve_cores=reserve, cpu_only=True)
    return make(this_machine(), read(str(model)), goal_for(goal))


def may_be_first() -> bool:
    """Whether this process may run before others."""
    usual = os.getpriority(os.PRIO_PROCESS, 0)
    try:
        os.setpriority(os.PRIO_PROCESS, 0, FIRST)
    except PermissionError:
        return False
    os.setpriority(os.PRIO_PROCESS, 0, usual)
    return True


def prefer(nice: int, *pids: int) -> None:
    """Set how early processes run: nice counts inside a session alone where the kernel groups by sessions."""
    for pid in pids:
        os.setpriority(os.PRIO_PROCESS, pid, nice)
        group = Path(f"/proc/{pid}/autogroup")
        while group.exists():
            try:
                group.write_text(str(nice))
            except BlockingIOError:  # it takes ten of these a second
                time.sleep(0.02)
            else:
                break


_numbers = count()


@asynccontextmanager
async def batch_on(engine: NativeEngine) -> AsyncIterator[int]:
    """Jobs without end on every lane, no two alike, and the engine computes; afterwards it is idle again."""

    async def lane() -> None:
        while True:
            text = " ".join(f"t{next(_numbers) % 500}" for _ in range(60))
            await answer(engine, Request(text, GREEDY, max_tokens=8, ignore_eos=True))

    pid = engine.identity.pid
    assert pid is not None
    lanes = [asyncio.create_task(lane()) for _ in range(LANES)]
    try:
        while all(state != "R" for state, _ in threads_of(pid)):
            await asyncio.sleep(0.005)
        yield pid
    finally:
        for task in lanes:
            task.cancel()
        await asyncio.gather(*lanes, return_exceptions=True)
        while (await engine.status()).counters.running:
            await asyncio.sleep(0.005)


def by_chance(ahead: int, turns: int) -> float:
    """How likely equals are ahead of each other so often (sign test)."""
    return float(sum(comb(turns, number) for number in range(ahead, turns + 1)) / 2**turns)


async def turns_of(
    other: Neighbour, everywhere: NativeEngine, kept: NativeEngine, left: set[int]
) -> list[tuple[Turn, Turn]]:
    """Pairs of turns, beside all cores taken and beside a reserve, until one kind is ahead beyond chance."""
    pairs: list[tuple[Turn, Turn]] = []
    until = time.monotonic() + LIMIT_S
    while len(pairs) < LEAST_TURNS or (len(pairs) < MOST_TURNS and time.monotonic() < until):
        turns = []
        for engine in (everywhere, kept):
            async with batch_on(engine) as pid:
                turns.append(await other.beside(pid, left))
        pairs.append((turns[0], turns[1]))
        ahead = sum(after.done_s > before.done_s for before, after in pairs)
        if len(pairs) >= LEAST_TURNS and by_chance(max(ahead, len(pairs) - ahead), len(pairs)) < CHANCE:
            break
    return pairs


def test_a_neighbour_loses_less_beside_a_batch_that_leaves_it_a_core(moe: Path, tmp_path: Path) -> None:
    usual = os.getpriority(os.PRIO_PROCESS, 0)
    first = FIRST if may_be_first() else usual

    async def scene() -> list[tuple[Turn, Turn]]:
        with own_cpus_restored() as cpus, neighbour(tmp_path) as other:
            per_core = this_machine().cpu.threads_per_core or 1
            greedy = plan_of(moe, threads=len(cpus), reserve=0)
            leaving = plan_of(moe, threads=len(cpus) - per_core, reserve=1)
            config = EngineConfig(nice=first)
            async with (
                native(moe, tmp_path / "state", plan=greedy, config=config, name="all") as everywhere,
                native(moe, tmp_path / "state", plan=leaving, config=config, name="some") as kept,
            ):
                left = cpus - os.sched_getaffinity(0)  # we keep off it too, since that start
                assert len(left) == per_core
                assert os.sched_getaffinity(other.pid) == cpus
                prefer(first, os.getpid(), everywhere.identity.pid or 0, kept.identity.pid or 0)
                prefer(min(19, first + YIELDS), other.pid)
                try:
                    return await turns_of(other, everywhere, kept, left)
                finally:
                    prefer(usual, os.getpid())

    pairs = run(scene)
    assert sum(beside.rivals for beside, _ in pairs) > len(pairs)
    assert sum(beside.rivals for _, beside in pairs) == 0
    beside_all, beside_some = (median(turn.done_s for turn in turns) for turns in zip(*pairs, strict=True))
    assert beside_some > beside_all, f"{len(pairs)} pairs: {pairs}"
