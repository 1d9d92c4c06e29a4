"""What a schedule is given and what it hands out: jobs, the work of one step, and what was spent on them."""

from array import array
from collections.abc import Collection, Hashable, Iterable
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from tokenmill.engine.engine import Priority
from tokenmill.native.kv.prefix_cache import KeepPolicy
from tokenmill.native.kv.radix import TokenArray

Id: TypeAlias = Hashable
_BATCH_SHARE = 4  # part of a micro-batch that batch prompts may have beside urgent work ...
_BATCH_FLOOR = 16  # ... and that is left to them where urgent prompts fill step after step


@dataclass(frozen=True, slots=True)
class SequenceWork:
    """Tokens of one sequence to compute in one step."""

    id: Id
    sequence: int
    tokens: TokenArray
    position: int  # of the first of them
    logits: bool  # of the last of them; of the others never


@dataclass(frozen=True, slots=True)
class DecodeStep:
    """One call of the decoder, and what had to happen for it."""

    work: tuple[SequenceWork, ...]
    preempted: tuple[Id, ...] = ()  # back in the queue; their answers go on later where they were
    exhausted: tuple[Id, ...] = ()  # alone with all cells, or at the context's end: to be finished for length

    @property
    def tokens(self) -> int:
        """Tokens of all work."""
        return sum(len(work.tokens) for work in self.work)


@dataclass(frozen=True, slots=True)
class Bounds:
    """How many tokens a step may have: see `bounds_of`."""

    tokens: int  # in all
    batch_prompts: int  # of prompts that nobody is in a hurry for
    reserved: int = 0  # for those, out of what urgent prompts could have


class StepDraft:
    """The work of a step while it is being decided. `add` and `drop` mutate."""

    def __init__(self, bounds: Bounds, *, kept: int = 0) -> None:
        """`kept`: cells that others will need in the next step."""
        self.work: dict[Id, SequenceWork] = {}
        self._kept = kept
        self.tokens = 0
        self._bounds = bounds
        self._batch_prompts = 0

    @property
    def cells(self) -> int:
        """That must be free for it."""
        return self.tokens + self._kept

    def left_for(self, job: "SequenceJob") -> int:
        """Tokens that a job may still have."""
        left = self._bounds.tokens - self.tokens
        if job.prefills and job.urgent:
            left -= self._bounds.reserved
        elif job.prefills:
            left = min(left, self._bounds.batch_prompts - self._batch_prompts)
        return max(0, left)

    def add(self, job: "SequenceJob", work: SequenceWork) -> None:
        """Put a job's work in."""
        self.work[work.id] = work
        self.tokens += len(work.tokens)
        if job.prefills and not job.urgent:
            self._batch_prompts += len(work.tokens)

    def drop(self, id: Id) -> None:
        """Take a job's work out again, if there is any."""
        if id in self.work:
            self.tokens -= len(self.work.pop(id).tokens)


@dataclass(frozen=True, slots=True)
class PromptCost:
    """What one prompt has cost. At its end reused + computed is its length."""

    reused: int  # tokens that were in the cells already
    computed: int
    recomputed: int  # tokens, of the answer too, that were computed again after a preemption


@dataclass(frozen=True, slots=True)
class SchedulerTotals:
    """What a schedule has done since it was made, and how it stands."""

    prompt_tokens_computed: int
    prompt_tokens_reused: int
    recomputed_tokens: int
    preemptions: int
    evicted_tokens: int
    running: int
    waiting: int


@dataclass(frozen=True, slots=True)
class AtWork:
    """One sequence as it stands, for a person to look at."""

    id: Id
    priority: Priority
    doing: Literal["waiting", "prompt", "answer"]  # prompt: it is being computed
    prompt_tokens: int
    ready_tokens: int  # of the prompt, in the cells
    reused_tokens: int
    generated_tokens: int


@dataclass(slots=True, eq=False)
class SequenceJob:
    """One sequence from its submission to its end; the schedule's own, and changed by it alone."""

    id: Id
    prompt: (
        TokenArray  # never changed in place: the forest holds it too. After a preemption, the answer so far is in it
    )
    prompt_tokens: int  # of what was submitted
    priority: Priority
    keep: KeepPolicy
    arrival: int  # an ordinal; a preempted job keeps its own
    sequence: int | None = None  # None: waiting
    urgent: bool = False  # interactive, or computing the head of an interactive job that waits for it
    position: int = 0  # tokens in the cells
    reached: int = 0  # the most tokens it ever had there
    pending: int | None = None  # the sampled token that is to be decoded next
    awaits_token: bool = False  # its logits are out, and what was sampled from them is not in
    generated: list[int] = field(default_factory=list)
    in_prompt: int = 0  # generated tokens that are part of `prompt`
    follows: "tuple[SequenceJob, int] | None" = None  # the job that computes its head, and up to where
    reused: int = 0
    computed: int = 0
    recomputed: int = 0

    @property
    def prefills(self) -> bool:
        """Whether tokens of its prompt are missing in the cells."""
        return self.position < len(self.prompt)

    @property
    def spent(self) -> PromptCost:
        """What its prompt has cost so far."""
        return PromptCost(self.reused, self.computed, self.recomputed)

    def seen(self) -> AtWork:
        """How it stands. Mutates nothing."""
        doing: Literal["waiting", "prompt", "answer"] = (
            "waiting" if self.sequence is None else "prompt" if self.prefills else "answer"
        )
        ready = min(self.position, self.prompt_tokens)
        return AtWork(self.id, self.priority, doing, self.prompt_tokens, ready, self.reused, len(self.generated))

    def is_held_up(self) -> bool:
        """Whether another running job is still computing the head that this one waits for."""
        if self.follows is None:
            return False
        leader, end = self.follows
        return leader.sequence is not None and leader.position < end

    def next_tokens(self, most: int) -> TokenArray:
        """What it can compute in one step: part of its prompt, or the token sampled last."""
        if self.prefills:
            return self.prompt[self.position : self.position + most]
        return array("i", () if self.pending is None or most < 1 else (self.pending,))

    def began(self, sequence: int, reused: int) -> int:
        """It runs from now on; mutates. Returns how many tokens of the prompt it has for nothing."""
        gained = max(0, min(reused, self.prompt_tokens) - self.reached)
        self.sequence = sequence
        self.position = reused
        self.follows = None
        self.reached = max(self.reached, reused)
        self.reused += gained
        return gained

    def advanced(self, count: int) -> tuple[int, int]:
        """Tokens of the prompt have been computed; mutates. Returns how many are new, and how many are not."""
        end = self.position + count
        again = max(0, min(end, self.reached) - self.position)
        new = max(0, min(end, self.prompt_tokens) - max(self.position, self.reached))
        self.position, self.reached = end, max(self.reached, end)
        self.computed += new
        self.recomputed += again
        return new, again

    def went_on(self) -> None:
        """The token sampled last has been computed; mutates."""
        self.position += 1
        self.reached = max(self.reached, self.position)
        self.pending = None

    def sampled(self, token: int) -> None:
        """What was sampled from its logits; mutates."""
        self.awaits_token = False
        self.generated.append(token)
        if self.sequence is None:
            self._take_in_answer()
        else:
            self.pending = token

    def stopped(self) -> None:
        """It waits again, with its answer so far as part of its prompt; mutates."""
        self.sequence = None
        self.pending = None
        self.position = 0
        self._take_in_answer()

    def _take_in_answer(self) -> None:
        """Make the prompt whole; mutates."""
        self.prompt = self.prompt + array("i", self.generated[self.in_prompt :])
        self.in_prompt = len(self.generated)


def bounds_of(running: Collection[SequenceJob], *, budget: int, ubatch: int) -> Bounds:
    """How long the next step of these jobs may be. Mutates nothing.

    One micro-batch, decodes included: more at once is not faster, and whoever comes meanwhile waits for its end. Whole
    ones where decodes leave less than a quarter of it, because a few tokens in one more cost almost as much as filling
    it.

    Beside urgent work, prompts of batch jobs have what it leaves over, a quarter of a micro-batch at most: urgent
    tokens come soon. Where urgent prompts need more than this step, a sixteenth is left: no stream of them stops the
    batch. Who waits for a lane is not urgent work; it waits for batch jobs to end, and they are not held up.
    """
    prefilling = [job for job in running if job.prefills]
    if not prefilling:
        return Bounds(budget, 0)
    decodes = len(running) - len(prefilling)
    share = max(1, ubatch // _BATCH_SHARE)
    tokens = min(budget, ubatch * -(-(decodes + share) // ubatch))
    if not any(job.urgent for job in running):
        return Bounds(tokens, tokens)
    missing = sum(len(job.prompt) - job.position for job in prefilling if job.urgent)
    left = max(0, tokens - decodes)
    floor = min(ubatch // _BATCH_FLOOR, left // 2) if missing > left else 0
    return Bounds(tokens, share, floor if any(not job.urgent for job in prefilling) else 0)


def in_streams(work: Iterable[SequenceWork]) -> tuple[SequenceWork, ...]:
    """Work by sequence, as llama.cpp wants it where each has a stream. Mutates nothing.

    It computes streams together whose numbers follow each other, as many tokens of each as all of them have:

        tokens of 0 to 3: 1, 1, 168, 1   ->   one of each, then 167 of the third alone
    """
    return tuple(sorted(work, key=lambda each: each.sequence))
