"""How a batch should run: where the experts are computed, how many slots, which KV layout and micro-batch.

    resident   experts are computed where they are: host experts by the processors
    streamed   host experts are copied to the GPU in every pass, which costs the same for 64 rows and for 4,000

`batch_options` forecasts the time of the whole batch for each combination; the KV cache of the slots is placed first,
and experts get the memory that it leaves. `Regimes.best` is the fastest. Pure.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import ceil
from typing import Literal

from tokenmill.hardware.machine import Machine
from tokenmill.model.profile import Profile
from tokenmill.planner.draft import PlanDraft, make_draft
from tokenmill.planner.goal import Goal
from tokenmill.planner.memory.kv_cells import PAD
from tokenmill.planner.placement import usable_gpus
from tokenmill.planner.speed.forecast import decode_speed, prefill_speed
from tokenmill.planner.speed.offload import MIN_ROWS, effective_min_batch

Regime = Literal["resident", "streamed"]
Layout = Literal["unified", "per_slot"]
SLOTS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 768, 1024, 1536, 2048, 3072, 4096)
MIN_STREAMED = 64  # slots from which streaming is considered
RESIDENT_UBATCH = 2048
STREAMED_UBATCHES = (8192, 4096, 2048, 1024)
WORTH = 1.2  # a streamed batch must be faster by this factor, which is more than the forecast's error
_ANSWER_CELLS = 64  # cells kept for the answer of each slot at least, as the engine's admission does


@dataclass(frozen=True, slots=True)
class BatchProfile:
    """The jobs of a batch, in tokens."""

    jobs: int
    prefix_tokens: int  # beginning of a prompt that other jobs share: mean
    own_tokens: int  # rest of the prompt: mean
    answer_tokens: int  # mean
    longest_tokens: int  # the longest prompt with its answer

    @property
    def output_tokens(self) -> int:
        """Tokens of all answers."""
        return self.jobs * self.answer_tokens


@dataclass(frozen=True, slots=True)
class RegimeOption:
    """One way to run a batch, with its forecast."""

    regime: Regime
    layout: Layout
    slots: int
    ubatch: int
    cells: int
    step_s: float  # one pass that decodes a token of every slot
    decode_tok_s: float
    prefill_tok_s: float
    seconds: float  # the whole batch, without loading
    goal: Goal  # plans it

    def tok_s(self, batch: BatchProfile) -> float:
        """Answer tokens per second over the whole batch."""
        return batch.output_tokens / self.seconds

    def jobs_h(self, batch: BatchProfile) -> float:
        """Jobs per hour."""
        return 3600 * batch.jobs / self.seconds


@dataclass(frozen=True, slots=True)
class Regimes:
    """All options that fit in memory."""

    batch: BatchProfile
    options: tuple[RegimeOption, ...]

    def fastest(self, regime: Regime) -> RegimeOption | None:
        """The fastest option of a regime; None if none fits or a fact is unknown."""
        return min((each for each in self.options if each.regime == regime), key=lambda one: one.seconds, default=None)

    @property
    def best(self) -> RegimeOption | None:
        """The option to run: a streamed one only if it is clearly faster."""
        resident, streamed = self.fastest("resident"), self.fastest("streamed")
        if resident is None or streamed is None:
            return streamed or resident
        return streamed if resident.seconds > WORTH * streamed.seconds else resident

    @property
    def crossing(self) -> int | None:
        """The fewest slots with which streaming decodes faster than the best resident option; None: never."""
        resident = self.fastest("resident")
        if resident is None:
            return None
        faster = (
            each.slots
            for each in self.options
            if each.regime == "streamed" and each.decode_tok_s > resident.decode_tok_s
        )
        return min(faster, default=None)

    def reason(self) -> str:
        """Why `best` is the best, in one sentence."""
        best = self.best
        other = self.fastest("resident" if best is not None and best.regime == "streamed" else "streamed")
        if best is None:
            return "no option fits in memory"
        text = f"forecast {best.tok_s(self.batch):,.3g} tok/s over the batch"
        if other is None:
            return f"{text}; no {'resident' if best.regime == 'streamed' else 'streamed'} option fits or applies"
        return f"{text}, against {other.tok_s(self.batch):,.3g} {other.regime} with {other.slots:,} slots"


def batch_options(
    machine: Machine, profile: Profile, goal: Goal, batch: BatchProfile, *, max_slots: int, retained: int = 48
) -> Regimes:
    """Forecast the options for a batch on the native engine.

    `goal`: what the user set; its sequences are chosen here. `max_slots`: what the library and the model allow.
    `retained`: additional sequence ids of a unified cache.
    """
    streams = can_stream(machine, profile, goal)
    found: list[RegimeOption] = []
    for slots in _widths(batch.jobs, max_slots):
        ubatch = goal.ubatch or max(RESIDENT_UBATCH, _rows(slots))
        asked = _goal(goal, batch, "resident", "unified", slots, ubatch, retained)
        option = next(_drafted(machine, profile, asked, batch, "resident"), None)
        if option is None:
            break  # more slots need more memory
        found.append(option)
    if streams:
        for layout in ("unified", "per_slot"):
            for slots in (each for each in _widths(batch.jobs, max_slots) if each >= MIN_STREAMED):
                option = _streamed(machine, profile, goal, batch, layout, slots, retained)
                if option is None:
                    break  # more slots need more memory
                found.append(option)
    return Regimes(batch, tuple(found))


def _streamed(
    machine: Machine, profile: Profile, goal: Goal, batch: BatchProfile, layout: Layout, slots: int, retained: int
) -> RegimeOption | None:
    """The fastest micro-batch that fits, not smaller than the number of slots."""
    if layout == "per_slot" and any(
        cache.span_tokens is not None or cache.kind == "recurrent" for cache in profile.cache
    ):
        return None  # llama.cpp's caches of windows and recurrent states have no streams that can be copied
    sizes = (goal.ubatch,) if goal.ubatch is not None else STREAMED_UBATCHES
    for ubatch in sorted({max(_rows(slots), size) for size in sizes}, reverse=True):
        asked = _goal(goal, batch, "streamed", layout, slots, ubatch, retained)
        option = next(_drafted(machine, profile, asked, batch, "streamed"), None)
        if option is not None:
            return option
    return None


def _rows(slots: int) -> int:
    """A micro-batch that holds a token of every slot and of interactive requests."""
    return -(-(slots + 4) // PAD) * PAD


def can_stream(machine: Machine, profile: Profile, goal: Goal) -> bool:
    """Whether there is a GPU to which experts can be copied."""
    return bool(usable_gpus(machine, goal)) and profile.experts is not None


def _widths(jobs: int, limit: int) -> list[int]:
    """Numbers of slots to consider: round ones, and the most that the jobs and the limit allow."""
    last = max(1, min(jobs, limit))
    return [*(count for count in SLOTS if count < last), last]


def _goal(
    goal: Goal, batch: BatchProfile, regime: Regime, layout: Layout, slots: int, ubatch: int, retained: int
) -> Goal:
    longest = -(-batch.longest_tokens // PAD) * PAD
    context = max(longest, goal.context or 0) if layout == "unified" else longest
    answer = max(batch.answer_tokens, _ANSWER_CELLS)
    cells = (
        slots * longest
        if layout == "per_slot"
        else 2 * batch.prefix_tokens + slots * (batch.own_tokens + answer) + longest
    )
    cells = max(-(-cells // PAD) * PAD, context)
    min_batch = MIN_ROWS if regime == "resident" else 32
    if regime == "resident" and slots >= min_batch:
        min_batch = 1 << slots.bit_length()
    rows = slots if layout == "per_slot" else slots + retained + 4
    return replace(
        goal,
        context=context,
        sequences=slots,
        ubatch=ubatch,
        batch=max(ubatch, rows),
        unified=layout == "unified",
        full_windows=True,
        output_rows=rows,
        total_cells=cells,
        shared_tokens=batch.prefix_tokens,
        offload_min_batch=goal.offload_min_batch or min_batch,
    )


def _drafted(
    machine: Machine, profile: Profile, goal: Goal, batch: BatchProfile, regime: Regime
) -> Iterator[RegimeOption]:
    """The option that a goal describes, unless it does not fit, or would not stream although it should."""
    draft = make_draft(machine, profile, goal, None, even=False)
    if draft.shortfalls:
        return
    own = effective_min_batch(profile, draft.settings, draft.placement)
    if regime == "streamed" and own is None:
        return  # all experts are on the GPUs
    timed = _timed(machine, profile, draft, batch)
    if timed is None:
        return
    step_s, prefill_tok_s, seconds = timed
    settings = draft.settings
    yield RegimeOption(
        regime,
        "per_slot" if settings.per_slot else "unified",
        settings.sequences,
        settings.ubatch,
        settings.cells,
        step_s,
        settings.sequences / step_s,
        prefill_tok_s,
        seconds,
        goal,
    )


def _timed(
    machine: Machine, profile: Profile, draft: PlanDraft, batch: BatchProfile
) -> tuple[float, float, float] | None:
    """Seconds of a decode pass, prefill speed, and seconds of the batch; None if a fact is unknown."""
    settings = draft.settings
    depth = batch.prefix_tokens + batch.own_tokens + batch.answer_tokens // 2
    decode = decode_speed(machine, profile, settings, draft.placement, depth=depth, sequences=settings.sequences)
    prefill = prefill_speed(
        machine, profile, settings, draft.placement, depth=batch.prefix_tokens, prompt=settings.ubatch
    )
    if decode is None or prefill is None:
        return None
    step_s = settings.sequences / decode.tok_s
    waves = ceil(batch.jobs / settings.sequences)
    prompts_s = (batch.prefix_tokens + batch.jobs * batch.own_tokens) / prefill.tok_s
    return step_s, prefill.tok_s, prompts_s + waves * batch.answer_tokens * step_s
