"""Chooses the slots and the KV layout of a running engine for one workload; `fit` configures the engine.

The number of slots comes from the first of these that applies: the user's request, the operating point of `tokenmill
tune`, a measurement here, `DEFAULT_SLOTS`. With one of the first two, callers give a workload without requests, so that
nothing is measured. Does not access stores or files.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from tokenmill.engine.engine import Answer, Engine, KvLayout, Request, Sampling, answer
from tokenmill.errors import EngineError, RequestRefused, UsageError
from tokenmill.tuner.point import Figures, SlotPoint, SlotTrial
from tokenmill.units import format_seconds, number_of

DEFAULT_SLOTS = 8  # planned if nothing else is known
FALLBACK_SLOTS = (1, 4, 2)  # planned if the default does not fit; 1 first, because if it does not fit, none does

SLOT_COUNTS = (1, 2, 4, 8, 16)
TRIAL_TOKENS = 24  # per answer; the first one is not counted
MIN_TRIAL_TOKENS = 6  # per answer on a slow engine
LIMIT_S = 60.0
MAX_TIME_SHARE = 0.05  # of the expected time of the batch
ROUNDS = 2  # the faster one is used, because a disturbance only makes a measurement slower
EXTRA_ROUNDS = 4  # maximum, while the figures look disturbed
DISTURBED_RATIO = 0.85  # of the throughput with fewer slots; without a disturbance more slots never cost so much
NEARLY_FASTEST = 0.98
MIN_BATCH_RATIO = 40  # expected output tokens of a batch / tokens of a measurement

PER_SLOT_GAIN = (
    0.04  # share of the time; measured on CPUs with 4 to 16 slots and answers of 64 tokens (24 tokens: 0.08)
)
MAX_SHARED = 0.75 * PER_SLOT_GAIN
MIN_JOBS_PER_SLOT = 4

Report = Callable[[str], None]
"""Receives a short text for each step of a measurement."""


def _ignore(_text: str) -> None:
    pass


@dataclass(frozen=True, slots=True)
class PrefixSharing:
    """Mean tokens of a job."""

    prompt_tokens: float
    shared_tokens: float  # saved by a unified cache; without a short prefix of all prompts, which every slot keeps
    output_tokens: float

    @property
    def share(self) -> float:
        """The share of the work that a unified cache saves."""
        work = self.prompt_tokens + self.output_tokens
        return self.shared_tokens / work if work else 0.0


@dataclass(frozen=True, slots=True)
class Workload:
    """The properties of a batch's pending jobs that determine slots and KV layout."""

    pending_jobs: int
    output_tokens: float = 0.0  # expected total of all pending jobs
    requests: tuple[Request, ...] = ()  # samples with different prompts; empty: the slots must not be measured
    sharing: PrefixSharing | None = None  # None: unknown, or the KV layout must not be changed


async def fit(
    engine: Engine, workload: Workload, *, known: SlotPoint | None = None, report: Report = _ignore
) -> SlotPoint:
    """Configure the slots and the KV layout of an engine for a workload; returns the resulting configuration.

    `known`: the result of an earlier call on this engine; measured slots are kept. If the engine fails during the
    measurement, it keeps its own number of slots.
    """
    point = known if known is not None and known.measured else await _measured(engine, workload, report)
    reason = await _adapt_layout(engine, workload)
    runtime = engine.runtime
    return SlotPoint(
        slots=point.slots if point is not None else engine.identity.slots,
        kv_layout=runtime.kv_layout if runtime is not None else None,
        trials=point.trials if point is not None else (),
        slots_reason=point.slots_reason if point is not None else None,
        layout_reason=reason,
    )


# ---- KV layout


def changes_layout(engine: Engine) -> bool:
    """Whether the KV layout of the engine can be changed now."""
    return engine.capabilities.changes_kv_layout and engine.runtime is not None and engine.liveness == "up"


def layout_for(sharing: PrefixSharing, jobs: int, slots: int) -> KvLayout:
    """The KV layout with which `jobs` finish sooner.

    A unified cache shares prefixes between slots, but scatters the cells of a prompt between those of others. With
    per-slot cells, a slot reuses only the prefix of its own last prompt, or a copy of another slot's:

        loss   shared tokens / (prompt tokens + output tokens): an upper bound, because decoding a token costs more
        gain   PER_SLOT_GAIN of the time

    "per_slot" reserves no slot for interactive requests, so the engine must run a single batch.
    """
    few_shared = sharing.share <= MAX_SHARED
    return "per_slot" if slots > 1 and jobs >= MIN_JOBS_PER_SLOT * slots and few_shared else "unified"


async def _adapt_layout(engine: Engine, workload: Workload) -> str | None:
    """Change the KV layout if the other one suits the workload better; returns the reason, or None if nothing changed.

    The number of slots must be chosen before, because it is measured with a unified cache.
    """
    sharing = workload.sharing
    runtime = engine.runtime
    if sharing is None or runtime is None or not changes_layout(engine):
        return None
    wanted = layout_for(sharing, workload.pending_jobs, engine.identity.slots or 1)
    if wanted == runtime.kv_layout:
        return None
    try:
        await engine.set_kv_layout(wanted)
    except (EngineError, UsageError):  # not supported by the model, or too few cells
        return None
    if wanted == "per_slot":
        return f"KV layout per_slot: a unified cache would save only {sharing.share:.1%} of the work"
    return f"KV layout unified: shared prefixes save {sharing.share:.1%} of the work"


# ---- number of slots


def measurable_slots(engine: Engine) -> int | None:
    """Maximum slots to measure on an engine; None: its slots cannot be changed, or it is not running."""
    can = engine.capabilities
    if not can.shares_prefixes or can.max_slots is None or engine.liveness != "up":
        return None
    return min(can.max_slots, max(SLOT_COUNTS[-1], engine.identity.slots or 1))


def slot_counts(limit: int) -> tuple[int, ...]:
    """Numbers of slots to measure, up to and including `limit`."""
    return tuple(sorted({*(slots for slots in SLOT_COUNTS if slots < limit), limit}))


def trial_tokens(limit: int) -> int:
    """Tokens that a measurement up to `limit` slots generates."""
    return ROUNDS * TRIAL_TOKENS * sum(slot_counts(limit))


def worth_measuring(output_tokens: float, limit: int) -> bool:
    """Whether a batch with `output_tokens` expected tokens is long enough to justify a measurement."""
    return limit > 1 and output_tokens >= MIN_BATCH_RATIO * trial_tokens(limit)


def disturbed(rates: Sequence[float]) -> bool:
    """Whether rates, by ascending slots, fall so much that another process probably used the CPUs."""
    return any(rate < DISTURBED_RATIO * max(rates[:at]) for at, rate in enumerate(rates) if at)


def choose(trials: Sequence[SlotTrial]) -> SlotTrial:
    """The trial with the fewest slots that is nearly as fast as the fastest."""
    fastest = max(_rate(trial) for trial in trials)
    return min((trial for trial in trials if _rate(trial) >= NEARLY_FASTEST * fastest), key=lambda trial: trial.slots)


def _rate(trial: SlotTrial) -> float:
    return trial.figures.decode_tok_s or 0.0


async def _measured(engine: Engine, workload: Workload, report: Report) -> SlotPoint | None:
    limit = measurable_slots(engine)
    if limit is None or not workload.requests or not worth_measuring(workload.output_tokens, limit):
        return None
    try:
        return await measure(engine, workload.requests, limit, expected_tokens=workload.output_tokens, report=report)
    except EngineError:  # a restarted engine has its own number of slots, which is used
        return None


async def measure(
    engine: Engine,
    requests: Sequence[Request],
    limit: int,
    *,
    expected_tokens: float | None = None,
    limit_s: float = LIMIT_S,
    report: Report = _ignore,
) -> SlotPoint:
    """Measure an engine with 1 to `limit` slots, and set the best number.

    The best is the smallest number that is nearly as fast as the fastest: it needs fewer KV cells, leaves fewer slots
    idle at the end of a batch, and answers each request sooner. The measurement takes at most `limit_s`: on a slow
    engine, fewer tokens are generated, then fewer slots are tried.

    The requests must be different jobs of the batch, so that they activate the same experts. If the engine accepts
    fewer than `limit`, only that many slots are tried. `expected_tokens`: output of the batch; limits the measurement
    to MAX_TIME_SHARE of the batch's time.
    """
    own_slots = engine.identity.slots or limit
    sweep = _SlotSweep(engine, requests, limit, limit_s, report)
    try:
        await sweep.run(expected_tokens)
    except TimeoutError:
        sweep.cut_short = True
    slots, reason = sweep.result(own_slots)
    await engine.set_slots(slots)
    runtime = engine.runtime
    return SlotPoint(slots, runtime.kv_layout if runtime is not None else None, sweep.trials, reason)


class _SlotSweep:
    """One measurement over several numbers of slots. If `run` ends with a TimeoutError, the trials before are valid."""

    def __init__(self, engine: Engine, requests: Sequence[Request], limit: int, limit_s: float, report: Report) -> None:
        self.cut_short = False
        self._engine = engine
        self._limit = limit
        self._report = report
        greedy = Sampling(temperature=0.0)
        self._untried = [replace(each, sampling=greedy, stop=(), ignore_eos=True, slot=None) for each in requests]
        self._prefilled: list[Request] = []  # accepted by the engine, prompt in its cache
        self._clock = asyncio.get_running_loop().time
        self._ends_s = self._clock() + limit_s
        self._limit_s = limit_s
        self._best_tok_s: dict[int, float] = {}  # by slots

    @property
    def trials(self) -> tuple[SlotTrial, ...]:
        """The best figures for each number of slots, ascending; without speeds if the engine reports no times."""
        best = sorted(self._best_tok_s.items())
        return tuple(SlotTrial(slots, Figures(decode_tok_s=tok_s or None)) for slots, tok_s in best)

    async def run(self, expected_tokens: float | None) -> None:
        counts = slot_counts(min(self._limit, len(self._untried)))
        if not counts or not await self._prefill(1):
            return
        rate = await self._decode(1, MIN_TRIAL_TOKENS)  # also touches every page of the weights
        if rate > 0 and expected_tokens is not None:
            self._shorten(MAX_TIME_SHARE * expected_tokens / rate)
        tokens = TRIAL_TOKENS
        if rate > 0:
            tokens = max(MIN_TRIAL_TOKENS, min(TRIAL_TOKENS, int(rate * self._limit_s / sum(counts))))
        for number in range(ROUNDS + EXTRA_ROUNDS):
            if number >= ROUNDS and not disturbed(list(self._best_tok_s.values())):
                break
            began_s = self._clock()
            counts = await self._round(counts, tokens)
            if self._clock() + (self._clock() - began_s) > self._ends_s:
                break

    def result(self, own_slots: int) -> tuple[int, str]:
        """The best number of slots and the reason; `own_slots` if the trials are inconclusive."""
        trials = self.trials
        if not trials:
            return own_slots, f"no measurement was possible within {format_seconds(self._limit_s)}"
        chosen = choose(trials).slots
        figures = ", ".join(f"{trial.slots}: {_rate(trial):.3g}" for trial in trials)
        reason = f"measured tok/s by number of slots: {figures}"
        if not self.cut_short:
            return chosen, reason
        reason = f"{reason}; the time limit of {format_seconds(self._limit_s)} was reached"
        if chosen == trials[-1].slots and own_slots > chosen:
            return own_slots, f"{reason} while throughput was still rising"
        return chosen, reason

    def _shorten(self, limit_s: float) -> None:
        self._ends_s -= max(0.0, self._limit_s - limit_s)
        self._limit_s = min(self._limit_s, limit_s)

    async def _round(self, counts: Sequence[int], tokens: int) -> tuple[int, ...]:
        """Measure each number of slots once, within the time limit; returns those that were measured."""
        done: list[int] = []
        for slots in counts:
            fastest = max(self._best_tok_s.values(), default=0.0)
            if fastest > 0 and self._clock() + slots * tokens / fastest > self._ends_s:
                self.cut_short = True
                break
            self._report(f"measuring throughput with {number_of(slots, 'slot')}")
            if not await self._prefill(slots):
                break
            self._best_tok_s[slots] = max(self._best_tok_s.get(slots, 0.0), await self._decode(slots, tokens))
            done.append(slots)
        return tuple(done)

    async def _prefill(self, slots: int) -> bool:
        """Set the slots and prefill one request for each; returns whether the engine accepted enough requests."""
        await self._engine.set_slots(slots)
        while len(self._prefilled) < slots and self._untried:
            new = self._untried[: slots - len(self._prefilled)]
            del self._untried[: len(new)]
            accepted = await self._accepted(new)
            self._prefilled += [each for each, fine in zip(new, accepted, strict=True) if fine]
        return len(self._prefilled) >= slots

    async def _accepted(self, requests: Sequence[Request]) -> list[bool]:
        async def accepted(request: Request) -> bool:
            try:
                await answer(self._engine, replace(request, max_tokens=1))
            except RequestRefused:
                return False
            return True

        async with asyncio.timeout_at(self._ends_s):
            return list(await asyncio.gather(*map(accepted, requests)))

    async def _decode(self, slots: int, tokens: int) -> float:
        """Decode concurrently in all slots; returns tokens per second, 0 if the engine reports no times."""
        requests = [replace(each, max_tokens=tokens) for each in self._prefilled[:slots]]
        async with asyncio.timeout_at(self._ends_s):
            return _decode_rate(await asyncio.gather(*(answer(self._engine, each) for each in requests)))


def _decode_rate(answers: Sequence[Answer]) -> float:
    """Tokens per second of answers that were decoded concurrently, by the engine's clock.

    The answer that started last is used for all, because the times of the others include prefill of their neighbours.
    """
    times = [(each.timings.decode_s or 0.0, each.usage.completion_tokens - 1) for each in answers]
    seconds, decoded = min(times, default=(0.0, 0))
    return len(answers) * decoded / seconds if seconds > 0 else 0.0
