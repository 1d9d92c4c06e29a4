"""Data types of `StepScheduler`: its jobs, the work of one decode step, and token counts.

`step_limits` bounds the size of a step. The scheduling decisions are in scheduler.py.
"""

from array import array
from collections.abc import Collection, Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from tokenmill.engine.engine import Priority, SlotLimit
from tokenmill.native.kv.prefix_cache import KeepPolicy
from tokenmill.native.kv.radix import TokenArray, common

Id: TypeAlias = Hashable
_BATCH_SHARE = 4  # with urgent jobs running, batch prompts get at most 1/4 of a micro-batch ...
_BATCH_FLOOR = 16  # ... and at least 1/16, even if urgent prompts fill step after step


@dataclass(frozen=True, slots=True)
class SequenceWork:
    """Tokens of one sequence to decode in one step."""

    id: Id | None  # None: padding, which is removed after the step
    sequence: int
    tokens: TokenArray
    position: int  # of the first token
    logits: bool  # whether the logits of the last token are needed; those of the others never are


@dataclass(frozen=True, slots=True)
class DecodeStep:
    """The work of one decoder call, and the jobs that left the running set for it."""

    work: tuple[SequenceWork, ...]
    preempted: tuple[Id, ...] = ()  # back in the queue; they resume later where they stopped
    exhausted: tuple[Id, ...] = ()  # out of cells or context: the caller finishes them with reason "length"

    @property
    def tokens(self) -> int:
        """Number of tokens in the step, without padding."""
        return sum(len(work.tokens) for work in self.work if work.id is not None)


@dataclass(frozen=True, slots=True)
class StepLimits:
    """Maximum tokens of a step, from `step_limits`."""

    tokens: int
    batch_prompts: int  # of prompts of batch jobs
    batch_floor: int = 0  # tokens that urgent prompts leave to batch prompts


class StepDraft:
    """The work of a step while it is being planned."""

    def __init__(self, limits: StepLimits, *, reserved_cells: int = 0) -> None:
        """reserved_cells: cells that other jobs need in the next step."""
        self.work: dict[Id, SequenceWork] = {}
        self._reserved_cells = reserved_cells
        self.tokens = 0
        self._limits = limits
        self._batch_prompts = 0

    @property
    def cells(self) -> int:
        """Cells that must be free for the step."""
        return self.tokens + self._reserved_cells

    def left_for(self, job: "SequenceJob") -> int:
        """Return how many tokens the limits still allow for a job."""
        left = self._limits.tokens - self.tokens
        if job.prefills and job.urgent:
            left -= self._limits.batch_floor
        elif job.prefills:
            left = min(left, self._limits.batch_prompts - self._batch_prompts)
        return max(0, left)

    def add(self, job: "SequenceJob", work: SequenceWork) -> None:
        """Add a job's work."""
        self.work[work.id] = work
        self.tokens += len(work.tokens)
        if job.prefills and not job.urgent:
            self._batch_prompts += len(work.tokens)

    def drop(self, id: Id) -> None:
        """Remove a job's work, if there is any."""
        if id in self.work:
            self.tokens -= len(self.work.pop(id).tokens)


@dataclass(frozen=True, slots=True)
class PromptCost:
    """Token counts of one prompt. When the prompt is complete, reused + computed is its length."""

    reused: int  # tokens that were cached
    computed: int
    recomputed: int  # tokens of the prompt and the answer that were computed again after a preemption


@dataclass(frozen=True, slots=True)
class SchedulerTotals:
    """Counters of a scheduler since its start, and its current number of jobs."""

    prompt_tokens_computed: int
    prompt_tokens_reused: int
    recomputed_tokens: int
    preemptions: int
    evicted_tokens: int
    running: int
    waiting: int
    slot_steps: int  # running batch jobs, summed over steps
    limited_steps: Mapping[SlotLimit, int]  # steps by what kept more batch jobs from running


@dataclass(frozen=True, slots=True)
class RunningSequence:
    """Progress of one running sequence, for display."""

    id: Id
    priority: Priority
    doing: Literal["waiting", "prompt", "answer"]
    prompt_tokens: int
    ready_tokens: int  # tokens of the prompt that are in the cells
    reused_tokens: int
    generated_tokens: int


@dataclass(slots=True, eq=False)
class SequenceJob:
    """One job from submission to end. Only its scheduler changes it."""

    id: Id
    # Never changed in place, because the prefix cache refers to it. After a preemption it includes the answer so far.
    prompt: TokenArray
    prompt_tokens: int  # length of the submitted prompt
    priority: Priority
    keep: KeepPolicy
    arrival: int  # ordinal; preemption does not change it
    sequence: int | None = None  # None: queued
    urgent: bool = False  # interactive, or computing a prefix that an interactive job waits for
    position: int = 0  # tokens in the cells
    reached: int = 0  # highest `position` so far
    pending: int | None = None  # sampled token to decode next
    awaits_token: bool = False  # its logits were computed, and no token has been sampled from them yet
    generated: list[int] = field(default_factory=list)
    in_prompt: int = 0  # generated tokens that are part of `prompt`
    follows: "tuple[SequenceJob, int] | None" = None  # the job that computes its prefix, and the length of that prefix
    branches: set[int] = field(default_factory=set)  # positions at which its state must be kept for other jobs
    reused: int = 0
    computed: int = 0
    recomputed: int = 0

    @property
    def prefills(self) -> bool:
        """Whether part of its prompt still has to be computed."""
        return self.position < len(self.prompt)

    @property
    def spent(self) -> PromptCost:
        """Token counts of its prompt so far."""
        return PromptCost(self.reused, self.computed, self.recomputed)

    def snapshot(self) -> RunningSequence:
        """Return its progress."""
        doing: Literal["waiting", "prompt", "answer"] = (
            "waiting" if self.sequence is None else "prompt" if self.prefills else "answer"
        )
        ready = min(self.position, self.prompt_tokens)
        return RunningSequence(
            self.id, self.priority, doing, self.prompt_tokens, ready, self.reused, len(self.generated)
        )

    def waits_for_leader(self) -> bool:
        """Whether another running job is still computing the prefix that this one waits for."""
        if self.follows is None:
            return False
        leader, end = self.follows
        return leader.sequence is not None and leader.position < end

    def next_tokens(self, most: int) -> TokenArray:
        """Return up to `most` tokens for the next step: part of its prompt, or the token sampled last.

        A step ends at every branch.
        """
        if self.prefills:
            end = min((branch for branch in self.branches if branch > self.position), default=len(self.prompt))
            return self.prompt[self.position : min(end, self.position + most)]
        return array("i", () if self.pending is None or most < 1 else (self.pending,))

    def branches_before(self, prompt: TokenArray) -> None:
        """Add the position where another prompt diverges from this one, if it is not computed yet."""
        shared = common(prompt, self.prompt, 0, min(len(self.prompt), len(prompt) - 1))
        if shared > self.position:
            self.branches.add(shared)

    def admitted(self, sequence: int, reused: int) -> int:
        """Record that it runs; return how many tokens of the prompt were reused for the first time."""
        gained = max(0, min(reused, self.prompt_tokens) - self.reached)
        self.sequence = sequence
        self.position = reused
        self.follows = None
        self.reached = max(self.reached, reused)
        self.reused += gained
        return gained

    def advanced(self, count: int) -> tuple[int, int]:
        """Record computed tokens of the prompt; return how many are new and how many were computed before."""
        end = self.position + count
        again = max(0, min(end, self.reached) - self.position)
        new = max(0, min(end, self.prompt_tokens) - max(self.position, self.reached))
        self.position, self.reached = end, max(self.reached, end)
        self.computed += new
        self.recomputed += again
        return new, again

    def decoded(self) -> None:
        """Record that the token sampled last was decoded."""
        self.position += 1
        self.reached = max(self.reached, self.position)
        self.pending = None

    def sampled(self, token: int) -> None:
        """Record the token sampled from its logits."""
        self.awaits_token = False
        self.generated.append(token)
        if self.sequence is None:
            self._append_answer()
        else:
            self.pending = token

    def requeued(self) -> None:
        """Record that it is queued again, with its answer so far as part of its prompt."""
        self.sequence = None
        self.pending = None
        self.position = 0
        self._append_answer()

    def _append_answer(self) -> None:
        """Append new tokens of the answer to the prompt."""
        self.prompt = self.prompt + array("i", self.generated[self.in_prompt :])
        self.in_prompt = len(self.generated)


def step_limits(running: Collection[SequenceJob], *, budget: int, ubatch: int) -> StepLimits:
    """Return the limits of the next step of these jobs.

    A step is one micro-batch, decodes included: a longer one is not faster and delays new requests. If decodes leave
    less than a quarter of the last micro-batch, the step gets another one, because a few tokens in a micro-batch cost
    almost as much as a full one.

    With urgent jobs running, batch prompts get only the rest of the step, at most a quarter of a micro-batch, to keep
    the latency of urgent tokens low. If urgent prompts need more than this step, a sixteenth is reserved for batch
    prompts, so that a flood of urgent prompts cannot stop the batch. Interactive jobs that wait for a slot do not
    count as urgent: they need batch jobs to end, so these are not slowed down.
    """
    prefilling = [job for job in running if job.prefills]
    if not prefilling:
        return StepLimits(budget, 0)
    decodes = len(running) - len(prefilling)
    share = max(1, ubatch // _BATCH_SHARE)
    tokens = min(budget, ubatch * -(-(decodes + share) // ubatch))
    if not any(job.urgent for job in running):
        return StepLimits(tokens, tokens)
    missing = sum(len(job.prompt) - job.position for job in prefilling if job.urgent)
    left = max(0, tokens - decodes)
    floor = min(ubatch // _BATCH_FLOOR, left // 2) if missing > left else 0
    return StepLimits(tokens, share, floor if any(not job.urgent for job in prefilling) else 0)


def ordered_for_streams(work: Iterable[SequenceWork]) -> tuple[SequenceWork, ...]:
    """Sort work by sequence, as llama.cpp needs it with one stream per sequence.

    llama.cpp computes adjacent streams together, for as many tokens as all of them have:

        tokens of 0 to 3: 1, 1, 168, 1   ->   one of each, then 167 of the third alone
    """
    return tuple(sorted(work, key=lambda each: each.sequence))
