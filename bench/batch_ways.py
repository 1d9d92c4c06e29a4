"""The ways of running a job file that the batch benchmark compares, with the same plan except for the slots.

(a) and (b) are plain HTTP clients that send lines in the order of the file and wait for each whole answer. (c) and
native use the job worker with store and output file, as `tokenmill run` does.
"""

import asyncio
import os
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import httpx
from bench.batch_loads import Line

from tokenmill.config import EngineConfig
from tokenmill.engine.engine import Counters, Engine
from tokenmill.engine.server.client import ServerEngine
from tokenmill.hardware.machine import Machine
from tokenmill.hardware.probe import probe
from tokenmill.jobs.ingest.submit import submit
from tokenmill.jobs.models import Submission
from tokenmill.jobs.output import Output
from tokenmill.jobs.scheduler.shape import shape_of
from tokenmill.jobs.store.store import Store
from tokenmill.jobs.worker.loop import WorkTask, work
from tokenmill.jobs.workload import describe
from tokenmill.model.read import read
from tokenmill.native.client import NativeEngine
from tokenmill.native.launching import start
from tokenmill.native.worker_config import goal_for
from tokenmill.planner.goal import DialectName, Goal
from tokenmill.planner.make import make
from tokenmill.planner.plan import Plan
from tokenmill.tuner.slots import fit
from tokenmill.units import GIB

CONTEXT = 2048
UBATCH = 512
NATIVE_LANES = 16
SERVER = EngineConfig(kind="llama-server", port=0)


@dataclass(frozen=True, slots=True)
class Pass:
    """Result of running a job file once in one way."""

    seconds: float
    computed_tokens: int  # computed prompt tokens
    written_tokens: int
    cpu_s: float  # CPU seconds of the engine
    decode_share: float | None = None  # share of the engine's busy time inside llama.cpp
    lanes: float | None = None  # average number of busy slots


@cache
def machine() -> Machine:
    """This machine, probed once."""
    return probe(Path.cwd())


def plan_for(
    model: Path, *, sequences: int, threads: int, native: bool = False, engine: DialectName = "llama.cpp"
) -> Plan:
    """Settings of all engines: context of a job, micro-batch, threads; servers keep their host cache."""
    goal = Goal(
        engine=engine,
        context=CONTEXT,
        sequences=sequences,
        ubatch=UBATCH,
        threads=threads,
        threads_batch=threads,
        cpu_only=True,
        cache_ram_bytes=0 if native else 8 * GIB,
    )
    return make(machine(), read(str(model)), goal_for(goal) if native else goal)


@dataclass(slots=True)
class Ways:
    """All engines, which run concurrently; idle ones use no CPU time."""

    native: NativeEngine
    alone: ServerEngine
    eight: ServerEngine
    pinned: ServerEngine
    width: int = NATIVE_LANES

    def pids(self) -> dict[str, int]:
        """PIDs of the engines by way."""
        engines: dict[str, Engine] = {
            "a: -np 1": self.alone,
            "b: -np 8": self.eight,
            "c: pinned": self.pinned,
            "native": self.native,
        }
        return {way: engine.identity.pid for way, engine in engines.items() if engine.identity.pid is not None}


@asynccontextmanager
async def up(model: Path, state: Path, threads: int, pinned: int) -> AsyncIterator[Ways]:
    """Start all engines on one model."""
    started: list[Engine] = []

    async def begin(name: str, sequences: int, native: bool = False) -> Engine:
        plan = plan_for(model, sequences=sequences, threads=threads, native=native)
        config = EngineConfig() if native else SERVER
        engine = await start(plan, model_path=model, config=config, state=state, name=name)
        started.append(engine)
        return engine

    try:
        native = await begin("native", NATIVE_LANES, native=True)
        servers = [await begin(name, slots) for name, slots in (("alone", 1), ("eight", 8), ("pinned", pinned))]
        alone, eight, few = (server for server in servers if isinstance(server, ServerEngine))
        assert isinstance(native, NativeEngine)
        yield Ways(native, alone, eight, few)
    finally:
        for engine in started:
            await engine.close()


async def fresh(ways: Ways) -> None:
    """Clear the caches: erase the slots of servers, and create a new native context."""
    await ways.native.set_context(streams=False)
    await ways.native.set_slots(ways.width)
    for server in (ways.alone, ways.eight, ways.pinned):
        for slot in range(server.identity.slots or 1):
            await server.ask("POST", f"/slots/{slot}?action=erase", {})


async def by_clients(server: ServerEngine, lines: Sequence[Line], clients: int) -> Pass:
    """Send lines in the order of the file, one per client, each after the client's last answer."""
    left = iter(lines)
    computed = written = 0

    async def client(http: httpx.AsyncClient) -> None:
        nonlocal computed, written
        for line in left:
            body = {key: value for key, value in line.items() if key != "custom_id"}
            answer = (await http.post("/v1/chat/completions", json=body)).raise_for_status().json()
            computed += answer["timings"]["prompt_n"]
            written += answer["usage"]["completion_tokens"]

    async with httpx.AsyncClient(base_url=server.identity.address, timeout=600, trust_env=False) as http:
        spent = cpu_s(server)
        began = time.perf_counter()
        await asyncio.gather(*(client(http) for _ in range(clients)))
        return Pass(time.perf_counter() - began, computed, written, cpu_s(server) - spent, lanes=clients)


def cpu_s(engine: Engine) -> float:
    """CPU time of an engine's process so far."""
    words = Path(f"/proc/{engine.identity.pid}/stat").read_text().rpartition(")")[2].split()
    return (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK")


async def by_worker(engine: Engine, path: Path, width: int | None, *, counted: bool = False) -> Pass:
    """Run a file through store, scheduler, worker and output file; the time includes submitting.

    In turns (batch_turns.py), submitting takes some 20 ms of another way's turn.

    `counted`: also measure the share of the time inside llama.cpp, which waits before and after the measured time.
    """
    folder = path.parent / f"{path.stem}.store"
    before = await _counters(engine) if counted else None
    spent = cpu_s(engine)
    began = time.perf_counter()
    with Store(folder) as store:
        how = Submission(engine.identity.model_id, output=str(folder / "out.jsonl"))
        batch = submit(store, path, how).batch
        with Output(store, batch) as output:
            await fit(engine, await describe(engine, store, batch, measure=False, adapt_layout=True))
            shape = shape_of(engine.capabilities, engine.identity, width=width)
            report = await work(WorkTask(store, [batch], engine, shape, outputs={batch.id: output}))
    seconds = time.perf_counter() - began
    spent = cpu_s(engine) - spent
    if report.counts.done != report.counts.total:
        raise RuntimeError(f"{report.counts.total - report.counts.done} jobs have no answer")
    share = None
    after = await _counters(engine) if counted else None
    if before is not None and after is not None and after.busy_s and after.decode_s is not None:
        share = (after.decode_s - (before.decode_s or 0.0)) / (after.busy_s - (before.busy_s or 0.0))
    return Pass(seconds, report.tokens.computed, report.tokens.generated, spent, share, report.busy_slots)


async def _counters(engine: Engine) -> Counters:
    """Counters of an idle engine; the native engine reports them five times per second."""
    if isinstance(engine, NativeEngine):
        await asyncio.sleep(0.45)
    return (await engine.status()).counters


WAYS = ("a: -np 1", "b: -np 8", "c: pinned", "native")


async def run(way: str, ways: Ways, path: Path, lines: Sequence[Line], *, counted: bool = False) -> Pass:
    """One pass in one way."""
    if way == "a: -np 1":
        return await by_clients(ways.alone, lines, 1)
    if way == "b: -np 8":
        return await by_clients(ways.eight, lines, 8)
    own = path.with_name(f"{path.stem}-{way[:1]}.jsonl")
    own.write_bytes(path.read_bytes())
    if way == "c: pinned":
        return await by_worker(ways.pinned, own, None, counted=counted)
    return await by_worker(ways.native, own, ways.width, counted=counted)
