"""How much a batch slows down another process: a batch on every core, and one that leaves a core free.

    python bench/neighbour.py [--turns 20] [--seconds 0.35]

The other process counts units of CPU work, may run on any core, and has a lower priority than the engines (nice). Two
engines on the same generated MoE take turns: one with a thread on every core, one that leaves a core free. They
alternate, so that other load on the machine affects both kinds of turns. If permitted, all of them run at a higher
priority than the rest of the machine. Prints the work done with each engine, the ratio, and the probability of that
many wins between equals (sign test). Needs two cores.
"""

import argparse
import asyncio
import mmap
import os
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from itertools import count
from math import comb
from pathlib import Path
from statistics import median

from tokenmill.config import EngineConfig
from tokenmill.engine.engine import Request, Sampling, answer
from tokenmill.engine.process.preparation import set_session_nice
from tokenmill.hardware.machine import Machine
from tokenmill.hardware.probe import probe
from tokenmill.model.read import read
from tokenmill.model.synthetic import generate
from tokenmill.native.client import NativeEngine
from tokenmill.native.start import start
from tokenmill.native.worker_config import goal_for
from tokenmill.planner.goal import Goal
from tokenmill.planner.make import make
from tokenmill.planner.plan import Plan

LANES = 4
FIRST, YIELDS = -20, 10  # nice values: of all, and the additional one of the other process
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
    """Observations of one turn."""

    done_s: float  # units of work of the other process per second
    rivals: int  # threads of the engine that ran or waited on the reserved core, over all samples


class Neighbour:
    """The other process and its progress."""

    def __init__(self, pid: int, seen: mmap.mmap) -> None:
        self.pid = pid
        self._seen = seen

    def done(self) -> int:
        return int(struct.unpack("<Q", self._seen[:])[0])

    async def beside(self, engine: int, left: set[int], turn_s: float) -> Turn:
        """One turn with an engine's process."""
        before = self.done()
        began = time.monotonic()
        rivals = 0
        while (spent := time.monotonic() - began) < turn_s:
            rivals += sum(state == "R" and cpu in left for state, cpu in threads_of(engine))
            await asyncio.sleep(turn_s / 20)
        return Turn((self.done() - before) / spent, rivals)


def threads_of(pid: int) -> list[tuple[str, int]]:
    """State and last CPU of every thread."""
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
        counter.open("r+b") as file,
        mmap.mmap(file.fileno(), 8) as seen,
        subprocess.Popen(words, stdout=subprocess.PIPE, start_new_session=True) as process,
    ):
        try:
            if process.stdout is None or process.stdout.readline() != b"works\n":
                raise RuntimeError("the other process did not start")
            yield Neighbour(process.pid, seen)
        finally:
            process.kill()


def plan_of(machine: Machine, model: Path, *, threads: int, reserve: int) -> Plan:
    goal = Goal(context=512, sequences=LANES, ubatch=256, threads=threads, reserve_cores=reserve, cpu_only=True)
    return make(machine, read(str(model)), goal_for(goal))


def may_be_first() -> bool:
    """Whether this process may raise its priority."""
    usual = os.getpriority(os.PRIO_PROCESS, 0)
    try:
        os.setpriority(os.PRIO_PROCESS, 0, FIRST)
    except PermissionError:
        return False
    os.setpriority(os.PRIO_PROCESS, 0, usual)
    return True


def prefer(nice: int, *pids: int) -> None:
    """Set the priority of processes; if the kernel groups by sessions, nice has an effect only within a session."""
    for pid in pids:
        os.setpriority(os.PRIO_PROCESS, pid, nice)
        set_session_nice(nice, pid)


_numbers = count()


@asynccontextmanager
async def batch_on(engine: NativeEngine) -> AsyncIterator[int]:
    """Keep every slot busy with different jobs during the block; afterwards the engine is idle."""

    async def lane() -> None:
        while True:
            text = " ".join(f"t{next(_numbers) % 500}" for _ in range(60))
            await answer(engine, Request(text, Sampling(temperature=0.0), max_tokens=8, ignore_eos=True))

    pid = engine.identity.pid
    if pid is None:
        raise RuntimeError("the engine has no process")
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
    """Probability of that many wins between equals (sign test)."""
    return float(sum(comb(turns, number) for number in range(ahead, turns + 1)) / 2**turns)


async def measured(folder: Path, turns: int, turn_s: float) -> list[tuple[Turn, Turn]]:
    """Pairs of turns: with all cores taken, and with a reserved core."""
    model = folder / "moe.gguf"
    generate.write("moe", generate.sizes("moe", {"layers": 4, "embed": 512}), model)
    machine = probe(folder)
    cpus = os.sched_getaffinity(0)
    usual = os.getpriority(os.PRIO_PROCESS, 0)
    first = FIRST if may_be_first() else usual
    config = EngineConfig(nice=first)
    per_core = machine.cpu.threads_per_core or 1
    greedy = plan_of(machine, model, threads=len(cpus), reserve=0)
    leaving = plan_of(machine, model, threads=len(cpus) - per_core, reserve=1)
    pairs: list[tuple[Turn, Turn]] = []
    with neighbour(folder) as other:
        everywhere = await start(greedy, model_path=model, config=config, state=folder, name="all")
        kept = await start(leaving, model_path=model, config=config, state=folder, name="some")
        left = cpus - os.sched_getaffinity(0)  # this process avoids the core as well
        prefer(first, os.getpid(), everywhere.identity.pid or 0, kept.identity.pid or 0)
        prefer(min(19, first + YIELDS), other.pid)
        try:
            for _ in range(turns):
                pair = []
                for engine in (everywhere, kept):
                    async with batch_on(engine) as pid:
                        pair.append(await other.beside(pid, left, turn_s))
                pairs.append((pair[0], pair[1]))
        finally:
            prefer(usual, os.getpid())
            await everywhere.close()
            await kept.close()
    return pairs


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--turns", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=0.35)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        pairs = asyncio.run(measured(Path(folder), asked.turns, asked.seconds))
    beside_all, beside_some = (median(turn.done_s for turn in turns) for turns in zip(*pairs, strict=True))
    ahead = sum(after.done_s > before.done_s for before, after in pairs)
    rivals = [sum(turn.rivals for turn in turns) for turns in zip(*pairs, strict=True)]
    print(f"next to a batch on every core  {beside_all:10,.0f} pieces of work a second")
    print(f"next to one that leaves a core {beside_some:10,.0f}")
    print(
        f"ratio {beside_some / beside_all:.2f}, ahead in {ahead} of {len(pairs)} pairs of turns, "
        f"by chance with {by_chance(ahead, len(pairs)):.2g}"
    )
    print(f"threads of the engine seen on the reserved core: {rivals[0]} and {rivals[1]}")


if __name__ == "__main__":
    main()
