"""Batches with shared digests and experts in host memory: the native engine at its tuned point, and llama-server.

Servers run with clients that send jobs in the order of the file, one per slot, each after its last answer: -np 1 and
-np 8 with the plan's settings, -np 32 with the engine's defaults. Before the measurement, the digest is cached in every
slot and in the native engine; -np 32, which would compute it for minutes, gets jobs without it, which can only make it
faster. Servers are measured for a limited time, including tokens of unfinished answers; the native engine runs a whole
file through store and worker, as in `tokenmill run`.
"""

import asyncio
import json
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
from prove_engine import Bench, held_as, keep_log, say, up
from prove_plans import MARGIN, Case, placed
from prove_rows import Clock

from tokenmill.config import EngineConfig
from tokenmill.engine.engine import answer
from tokenmill.engine.server.client import ServerEngine
from tokenmill.errors import TokenmillError
from tokenmill.hardware.machine import Machine
from tokenmill.jobs.ingest.line import call_of
from tokenmill.model.profile import Profile
from tokenmill.native.launching import start
from tokenmill.native.worker_config import goal_for
from tokenmill.planner.goal import Goal
from tokenmill.planner.make import make
from tokenmill.planner.plan import Plan
from tokenmill.units import GIB

sys.path.insert(0, str(Path(__file__).parents[2]))

from bench.batch_loads import WORDS, Line, Size, write
from bench.batch_ways import by_worker

LOADS = ("one digest", "four digests shuffled")
SIZE = Size(jobs=32, alone_jobs=8, digest_tokens=1024, tail_tokens=32, alone_tokens=64, output_tokens=64)
TINY = Size(jobs=6, alone_jobs=4, digest_tokens=200, tail_tokens=8, alone_tokens=16, output_tokens=8)
CONTEXT = 2048
TINY_CONTEXT = 1024
NATIVE = "native, tuned"
WAYS: dict[str, int] = {"-np 1": 1, "-np 32, untuned": 32, "-np 8": 8}
WINDOWS_S = {"one digest": 28.0, "four digests shuffled": 20.0}
READY_S = 600.0


@dataclass(frozen=True, slots=True)
class Work:
    """What to run, and where."""

    machine: Machine
    profile: Profile
    server: Path
    dials: dict[str, Any]  # of the tuned point
    folder: Path  # for job files and stores
    tiny: bool

    @property
    def context(self) -> int:
        """Maximum tokens of one job."""
        return TINY_CONTEXT if self.tiny else CONTEXT


def plan_of(work: Work, way: str) -> Plan:
    """The plan of a way: experts in host memory, with the settings of that way."""
    threads = 1 if work.tiny else None
    goal = Goal(context=work.context, cpu_only=work.tiny, gpu_margin_bytes=MARGIN, threads=threads)
    where = None if work.tiny else placed(work.machine, work.profile, [])
    if way == NATIVE:
        kept = ("threads", "threads_batch", "sequences", "ubatch", "cache_type_k", "cache_type_v", "offload_min_batch")
        own = replace(goal, **{name: work.dials[name] for name in kept if name in work.dials})
        return make(work.machine, work.profile, goal_for(own), placement=where)
    slots = WAYS[way]
    goal = replace(goal, sequences=slots, cache_ram_bytes=(1 if work.tiny else 8) * GIB)
    if "untuned" in way:
        goal = replace(goal, threads=threads or work.machine.cpu.cores, ubatch=512, mmap=True)
    return make(work.machine, work.profile, goal, placement=where)


def lines_of(work: Work, load: str) -> tuple[Path, list[Line]] | None:
    """The path of a load's job file and its lines; None if it does not exist yet."""
    path = work.folder / f"{load.replace(' ', '-')}.jsonl"
    if not path.is_file():
        return None
    return path, [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def warm_lines(lines: list[Line], slots: int) -> list[Line]:
    """Jobs with a few tokens for each slot, to cache the digest: the file's first lines with other questions."""
    return [
        {
            **line,
            "messages": [*line["messages"][:-1], {"role": "user", "content": f"{number} times nothing"}],
            "max_tokens": 2,
        }
        for number, line in enumerate((lines * slots)[:slots])
    ]


def bare(line: Line) -> Line:
    """A line without its digest."""
    return {**line, "messages": line["messages"][-1:]}


async def batches(bench: Bench, work: Work, clock: Clock) -> None:
    """Measure every way that is missing, the native engine first, which determines the tokens per word."""
    work.folder.mkdir(parents=True, exist_ok=True)
    for way in (NATIVE, *WAYS):
        loads = LOADS[:1] if "untuned" in way else LOADS
        left = [load for load in loads if not bench.rows.has("batch", f"{load} / {way}")]
        if not left or (way != NATIVE and lines_of(work, LOADS[0]) is None):
            continue
        if not clock.allows(bench.load_s + WINDOWS_S[left[0]] if not work.tiny else 5.0):
            say(f"batch, {way}: left out, {clock.left_s:.0f} s are too few")
            continue
        others = sum(not bench.rows.has("batch", f"{LOADS[0]} / {other}") for other in WAYS)
        spare = clock.left_s - others * (bench.load_s + WINDOWS_S[LOADS[0]] + 15)
        try:
            await (
                _native(bench, work, left, clock, spare)
                if way == NATIVE
                else _served(bench, work, way, left, clock, spare)
            )
        except (TokenmillError, httpx.HTTPError, RuntimeError) as error:
            say(f"batch, {way}: {error}")
            bench.rows.add("batch", f"failed / {way}", way=way, error=str(error))


async def _native(bench: Bench, work: Work, left: list[str], clock: Clock, spare: float) -> None:
    async with up(bench, plan_of(work, NATIVE), "batch") as one:
        engine = one.engine
        words_per_token = len(WORDS) / len(await engine.tokenize(" ".join(WORDS)))
        size = replace(TINY if work.tiny else SIZE, words_per_token=words_per_token)
        size = replace(size, jobs=max(size.jobs, work.dials["sequences"]))
        for number, load in enumerate(left):
            if number and spare < 60 and not work.tiny:
                return
            path = work.folder / f"{load.replace(' ', '-')}.jsonl"
            lines = write(path, load, size, "proof")
            await engine.set_context(streams=False)
            warm_s = 0.0
            if load == LOADS[0]:
                began = time.monotonic()
                await answer(engine, call_of(json.dumps(warm_lines(lines, 1)[0])).request("batch"))
                warm_s = time.monotonic() - began
            store = work.folder / f"{path.stem}-{int(time.time())}.jsonl"  # a new store for each attempt
            store.write_bytes(path.read_bytes())
            done = await by_worker(engine, store, work.dials["sequences"], counted=True)
            _keep(
                bench,
                load,
                NATIVE,
                done.written_tokens,
                done.seconds,
                done.computed_tokens,
                warm_s,
                jobs=len(lines),
                lanes=work.dials["sequences"],
                decode_share=done.decode_share,
            )
            if not clock.allows(30.0):
                return


async def _served(bench: Bench, work: Work, way: str, left: list[str], clock: Clock, spare: float) -> None:
    slots = WAYS[way]
    untuned = "untuned" in way
    async with server(bench, work, plan_of(work, way), f"np{slots}", untuned=untuned) as one:
        for number, load in enumerate(left):
            found = lines_of(work, load)
            if found is None or (number and spare < 60 and not work.tiny):
                return
            lines = [bare(line) for line in found[1]] if untuned else found[1]
            began = time.monotonic()
            warmed = Sent()
            if load == LOADS[0] and not untuned:
                warmed = await sent(one, warm_lines(lines, slots), slots, clock)
            warm_s = time.monotonic() - began
            window = clock.part(5.0 if work.tiny else WINDOWS_S[load])
            began = time.monotonic()
            done = await sent(one, lines, slots, window)
            _keep(
                bench,
                load,
                way,
                done.written,
                time.monotonic() - began,
                done.computed,
                warm_s,
                jobs=done.jobs,
                lanes=slots,
                warm_computed=warmed.computed,
            )


def _keep(
    bench: Bench, load: str, way: str, written: int, seconds: float, computed: int, warm_s: float, **more: Any
) -> None:
    rate = written / seconds if seconds else 0.0
    bench.rows.add(
        "batch",
        f"{load} / {way}",
        load=load,
        way=way,
        tok_s=rate,
        written=written,
        seconds=seconds,
        computed=computed,
        warm_s=warm_s,
        **more,
    )
    say(f"  {load}, {way}: {rate:.1f} tok/s ({written} in {seconds:.1f} s, {computed} prompt tokens computed)")


@asynccontextmanager
async def server(bench: Bench, work: Work, plan: Plan, slug: str, *, untuned: bool = False) -> AsyncIterator[str]:
    """Start llama-server of the same build for a plan; yields its address."""
    config = EngineConfig(kind="llama-server", binary=str(program(work, untuned=untuned)), port=0, warm=False)
    name = f"prove-{slug}"
    try:
        began = time.monotonic()
        engine = await start(plan, model_path=bench.model, config=config, state=bench.state, name=name)
        load_s = time.monotonic() - began
        say(f"llama-server {slug}: loaded in {load_s:.1f} s")
        try:
            if not isinstance(engine, ServerEngine):
                raise TokenmillError("the engine has no HTTP server")
            yield engine.identity.address
            case = Case(f"llama-server, {slug}", plan)
            if not bench.rows.has("ledger", case.name):
                await held_as(bench, case, engine, name, load_s=load_s)
        finally:
            await engine.close()
    finally:
        keep_log(bench, name)


def program(work: Work, *, untuned: bool) -> Path:
    """Configuration of llama-server; untuned without the offload threshold, as users start it."""
    if not untuned:
        return work.server
    script = work.folder / "llama-server"
    script.write_text(f'#!/bin/sh\nunset GGML_OP_OFFLOAD_MIN_BATCH\nexec "{work.server}" "$@"\n', encoding="utf-8")
    script.chmod(0o755)
    return script


@dataclass(slots=True)
class Sent:
    """Totals over the clients."""

    written: int = 0  # generated tokens
    computed: int = 0  # prompt tokens
    jobs: int = 0  # complete answers


async def sent(address: str, lines: list[Line], clients: int, clock: Clock) -> Sent:
    """Send lines in the order of the file until all are sent or the time is over."""
    left = iter(lines)
    seen = Sent()
    once = httpx.Limits(max_keepalive_connections=0)  # the server closes idle connections, which a request may hit
    async with httpx.AsyncClient(base_url=address, timeout=READY_S, trust_env=False, limits=once) as http:
        tasks = [asyncio.create_task(_client(http, left, seen)) for _ in range(clients)]
        try:
            done, _ = await asyncio.wait(tasks, timeout=clock.left_s)
            for task in done:
                task.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
    return seen


async def _client(http: httpx.AsyncClient, left: Any, seen: Sent) -> None:
    for line in left:
        body = {key: value for key, value in line.items() if key != "custom_id"}
        body |= {"stream": True, "timings_per_token": True}
        written = computed = 0
        async with http.stream("POST", "/v1/chat/completions", json=body) as reply:
            reply.raise_for_status()
            async for text in reply.aiter_lines():
                found = counted(text)
                if found is not None:
                    seen.written += found[0] - written
                    seen.computed += found[1] - computed
                    written, computed = found
        seen.jobs += 1


def counted(text: str) -> tuple[int, int] | None:
    """Generated and computed prompt tokens so far, from a line of a stream; None if it has none."""
    if not text.startswith("data: {"):
        return None
    times = json.loads(text[6:]).get("timings")
    return None if not times else (int(times["predicted_n"]), int(times["prompt_n"]))
