"""Number of sequences that share one long digest on a small GPU: shared KV cells compared with slots.

The GPU is limited to 12 GB, and all experts are in host memory. The native engine runs 96 sequences concurrently with
the digest cached once, as its counters show. llama-server is started with a slot for each of them, and with the maximum
number of slots that the GPU can hold by the size of their KV cache.
"""

import asyncio
import random
import time
from dataclasses import asdict, dataclass, replace

from prove_batch import Work, server
from prove_card import limited
from prove_engine import Bench, say, turn, up
from prove_plans import CARD_12, CARDS, MARGIN, placed
from prove_rows import Clock, Row

from tokenmill.engine.engine import Engine, Request, Sampling, answer
from tokenmill.engine.loading.process import local_vram
from tokenmill.errors import TokenmillError
from tokenmill.native.worker_config import goal_for
from tokenmill.planner.draft import capacity, make_draft
from tokenmill.planner.goal import Goal
from tokenmill.planner.make import make
from tokenmill.planner.plan import Placement, Plan
from tokenmill.tuner.bench.rig import pids_of
from tokenmill.tuner.point import TrialSettings
from tokenmill.tuner.trial_run import outcome_of
from tokenmill.tuner.work import vocabulary

SERVER_S = 30.0
ROOM = 64  # maximum cells of an answer that the native engine reserves before it starts another sequence


@dataclass(frozen=True, slots=True)
class Shape:
    """Length of the digest and number of sequences."""

    digest: int
    tail: int
    out: int
    sequences: int
    ubatch: int

    @property
    def context(self) -> int:
        """Tokens of one sequence, padded as by the engine."""
        return -(-(self.digest + self.tail + self.out) // 256) * 256

    @property
    def cells(self) -> int:
        """Cells of all sequences with a shared digest; the engine starts a sequence only if its answer has room."""
        return -(-(self.digest + self.sequences * (self.tail + max(self.out, ROOM) + 8)) // 256) * 256


FULL = Shape(16384, 48, 16, 96, 2048)
TINY = Shape(512, 8, 120, 8, 128)


def goal_of(work: Work, shape: Shape) -> Goal:
    """The goal on the small GPU, with all relevant settings specified."""
    if work.tiny:
        return Goal(
            context=shape.context, sequences=1, ubatch=shape.ubatch, cache_type_k="f16", threads=1, cpu_only=True
        )
    margin = capacity(work.machine, "gpu0") - CARDS[CARD_12] + MARGIN
    return Goal(context=shape.context, sequences=1, ubatch=shape.ubatch, cache_type_k="f16", gpu_margin_bytes=margin)


def where(work: Work) -> Placement | None:
    """Every expert in host memory."""
    return None if work.tiny else placed(work.machine, work.profile, [])


def most_slots(work: Work, shape: Shape) -> int | None:
    """Maximum slots of the digest's length on the GPU; None without a GPU.

    Free memory with one slot, divided by the cells of a slot; buffers that grow with slots only reduce it.
    """
    if work.tiny:
        return None
    found = make_draft(work.machine, work.profile, server_goal(work, shape, 1), where(work)).ledger
    kv = found.of("gpu0", "kv")
    beside = sum(row.bytes for row in found.full_context if row.tier == "gpu0" and row.item not in ("kv", "reserve"))
    return (CARDS[CARD_12] - beside) // kv


def server_goal(work: Work, shape: Shape, slots: int) -> Goal:
    """A plan with this number of slots and the engine's default micro-batch; mapped, so that a failing load is fast."""
    goal = goal_of(work, shape)
    return replace(goal, sequences=slots, ubatch=min(512, shape.ubatch), mmap=True)


def shared_plan(work: Work, shape: Shape) -> Plan:
    """The plan with the cells of all sequences that share a digest: one sequence of that length."""
    goal = replace(goal_of(work, shape), context=shape.cells)
    return make(work.machine, work.profile, goal_for(goal), placement=where(work))


def server_plan(work: Work, shape: Shape, slots: int) -> Plan:
    """A server with this number of slots on the small GPU."""
    return make(work.machine, work.profile, server_goal(work, shape, slots), placement=where(work))


async def digest(bench: Bench, work: Work, clock: Clock) -> None:
    """Measure every missing row."""
    shape = TINY if work.tiny else FULL
    slots = most_slots(work, shape)
    bench.rows.add(
        "digest",
        "predicted",
        digest=shape.digest,
        context=shape.context,
        slots=slots,
        cells=shape.cells,
        sequences=shape.sequences,
    )
    say(
        f"digest: room for {slots} slots of {shape.context} tokens; {shape.sequences} sequences are to share one digest"
    )
    async with limited(None if work.tiny else CARDS[CARD_12]):
        if not bench.rows.has("digest", "shared") and clock.allows(15 if work.tiny else bench.load_s + 60):
            await _shared(bench, work, shape, clock)
        counts = [("slots for all", shape.sequences), ("slots that there is room for", slots or shape.sequences)]
        for name, count in counts:
            if not bench.rows.has("digest", name) and clock.allows(5 if work.tiny else SERVER_S):
                await _slots(bench, work, shape, name, count)


async def _slots(bench: Bench, work: Work, shape: Shape, name: str, count: int) -> None:
    plan = server_plan(work, shape, count)
    kv = sum(row.bytes for row in plan.ledger.full_context if row.item == "kv")
    outcome = "started"
    detail = None
    try:
        async with server(bench, work, plan, f"digest-np{count}"):
            pass
    except TokenmillError as error:
        outcome = outcome_of(error)
        detail = f"{error.message} {error.hint or ''}"[-600:]
    say(f"  llama-server -np {count}: {outcome}")
    bench.rows.add(
        "digest", name, slots=count, outcome=outcome, detail=detail, predicted_fits=plan.fits, kv_predicted_bytes=kv
    )


async def _shared(bench: Bench, work: Work, shape: Shape, clock: Clock) -> None:
    plan = shared_plan(work, shape)
    try:
        async with up(bench, plan, "digest") as one:
            row = await _asked(work, shape, plan, one.engine, clock)
    except (TokenmillError, TimeoutError) as error:
        why = str(error) or "it did not end in its time"
        say(f"  digest: {why}")
        bench.rows.add("digest", "shared / failed", error=why)
        return
    bench.rows.add("digest", "shared", **row)
    say(
        f"  native: {row['running']} sequences over {shape.digest} shared tokens, {row['cells_used']} cells in use, "
        f"{row['tok_s']:.1f} tok/s"
    )


async def _asked(work: Work, shape: Shape, plan: Plan, engine: Engine, clock: Clock) -> Row:
    """Run all sequences concurrently over one digest."""
    now = plan.settings
    dials = TrialSettings(
        now.threads,
        now.threads_batch,
        shape.sequences,
        shape.ubatch,
        shape.context,
        now.cache_type_k,
        now.cache_type_v,
        now.flash_attention,
        now.mmap,
        now.repack,
    )
    await turn(engine, dials, cells=shape.cells)
    words = await vocabulary(engine)
    drawn = random.Random("digest")
    head = tuple(drawn.choices(words, k=shape.digest))
    greedy = Sampling(temperature=0.0)
    async with asyncio.timeout(max(30.0, clock.left_s)):
        began = time.monotonic()
        await answer(engine, Request(head, greedy, max_tokens=1, ignore_eos=True))
        digest_s = time.monotonic() - began
        asked = [
            Request(head + tuple(drawn.choices(words, k=shape.tail)), greedy, max_tokens=shape.out, ignore_eos=True)
            for _ in range(shape.sequences)
        ]
        began = time.monotonic()
        peak = Peak()
        watching = asyncio.create_task(peak.watch(engine))
        try:
            answers = await asyncio.gather(*(answer(engine, each) for each in asked))
        finally:
            watching.cancel()
        seconds = time.monotonic() - began
    vram = local_vram()(pids_of(engine)) if plan.placement.gpus else None
    buffers = (engine.runtime.buffers if engine.runtime is not None else None) or ()
    return {
        "sequences": shape.sequences,
        **asdict(peak),
        "cached_least": min(each.usage.cached_tokens or 0 for each in answers),
        "digest": shape.digest,
        "digest_s": digest_s,
        "seconds": seconds,
        "tok_s": shape.sequences * shape.out / seconds,
        "kv_bytes": sum(buffer.context_bytes for buffer in buffers),
        "kv_predicted_bytes": sum(row.bytes for row in plan.ledger.full_context if row.item == "kv"),
        "vram": {f"gpu{index}": size for index, size in (vram or {}).items()},
        "vram_predicted": {
            tier: sum(row.bytes for row in plan.ledger.after_load if row.tier == tier and row.item != "reserve")
            for tier in plan.placement.gpus
        },
    }


@dataclass(slots=True)
class Peak:
    """Maximum of each counter in the engine's status."""

    running: int = 0
    cells_used: int = 0
    cells_total: int = 0

    async def watch(self, engine: Engine) -> None:
        """Poll until cancelled."""
        while True:
            now = (await engine.status()).counters
            self.running = max(self.running, now.running or 0)
            self.cells_used = max(self.cells_used, now.cells_used or 0)
            self.cells_total = now.cells_total or self.cells_total
            await asyncio.sleep(0.1)
