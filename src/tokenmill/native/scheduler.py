"""Continuous batching as a pure state machine: jobs in, the work of one step out, what was computed back in.

    take commands          submit, cancel
    decide                 step = plan()
    perform                the decoder runs step.work; without room: step = failed_for_room()
    record                 ran(step), then token(id, ...) or finish(id) for all work with logits

Commands belong before `plan`, not between it and the decoder. No clocks, threads, samplers or texts in here.
"""

from array import array
from collections import deque
from collections.abc import Collection, Sequence
from itertools import islice
from typing import Literal, TypeAlias

from tokenmill.engine.engine import Priority
from tokenmill.errors import RequestRefused, TooLong
from tokenmill.native.batching import (
    AtWork,
    DecodeStep,
    Id,
    PromptCost,
    SchedulerTotals,
    SequenceJob,
    SequenceWork,
    StepDraft,
    bounds_of,
    in_streams,
)
from tokenmill.native.kv.prefix_cache import KeepPolicy, PrefixCache
from tokenmill.native.kv.radix import as_tokens

LOOK_AHEAD = 64  # waiting jobs that are looked at when the first must wait for a head that is being computed
_MOST_HEADROOM = 64  # cells that are left to each running job's answer when another is let in ...
_HEADROOM_SHARE = 64  # ... but no more than this part of all cells
StepContent: TypeAlias = Literal["both", "prompts", "answers"]


class StepScheduler:
    """Who runs, who waits, and what the next step computes.

    Who claims first in a step: decodes before prefills, interactive before batch, then by arrival. Who yields when
    cells are short: what is idle, then the youngest batch job, and for an interactive job any batch job and then the
    youngest interactive one; a job is never preempted for a younger one of its kind. So the oldest goes on whatever
    happens.

    How long a step is, and how much of it batch prompts may be, is decided by `bounds_of`. Whether it has prompts and
    answers, by `_parts`.
    """

    def __init__(
        self, forest: PrefixCache, *, lanes: int, interactive_lanes: int, budget: int, ubatch: int, context: int
    ) -> None:
        self.forest = forest
        self.lanes = lanes  # batch jobs at once; this and the next six may be assigned at any time
        self.interactive_lanes = interactive_lanes  # jobs beyond `lanes`, for interactive ones alone
        self.budget = budget  # tokens of one step that the decoder has room for
        self.ubatch = ubatch  # tokens that it computes together
        self.context = context  # tokens of one sequence
        self.streams = False  # every sequence has cells of its own: see `in_streams`
        self.mixes = True  # prompts and answers of batch jobs may be computed in one step
        self._jobs: dict[Id, SequenceJob] = {}
        self._queues: dict[Priority, deque[SequenceJob]] = {"interactive": deque(), "batch": deque()}
        self._running: dict[int, SequenceJob] = {}  # by sequence
        self._arrivals = 0
        self._preempted: list[Id] = []  # since the last step
        self._crowded = False  # the decoder found no room where there should be some: nobody enters until one leaves
        self._first: set[int] | None = None  # arrivals of jobs whose prompts come before the next tokens of answers
        self._computed = self._reused = self._recomputed = self._preemptions = 0
        self._evicted = 0  # in forests before this one

    @property
    def totals(self) -> SchedulerTotals:
        """Counters. Mutates nothing."""
        return SchedulerTotals(
            self._computed,
            self._reused,
            self._recomputed,
            self._preemptions,
            self._evicted + self.forest.evicted,
            running=len(self._running),
            waiting=len(self._jobs) - len(self._running),
        )

    def at_work(self) -> list[AtWork]:
        """Who runs, the oldest first. Mutates nothing."""
        return [job.seen() for job in sorted(self._running.values(), key=lambda job: job.arrival)]

    def spent(self, id: Id) -> PromptCost:
        """What a job's prompt has cost so far. Mutates nothing."""
        return self._jobs[id].spent

    # -- commands ----------------------------------------------------------------------------------------------------

    def submit(self, id: Id, tokens: Sequence[int], priority: Priority, *, keep: KeepPolicy | None = None) -> None:
        """Queue a job; mutates. Unless told, batch jobs leave their prompt behind, interactive ones all."""
        if id in self._jobs:
            raise ValueError(f"job {id!r} is here already")
        if not tokens:
            raise RequestRefused("the prompt has no tokens", hint="send at least one")
        if len(tokens) > self._limit:
            raise TooLong(
                f"the prompt has {len(tokens)} tokens, and a sequence can have {self._limit}",
                needed_tokens=len(tokens),
                context_tokens=self._limit,
                hint="shorten the prompt, or build a larger context",
            )
        self._arrivals += 1
        kept = keep or ("prompt" if priority == "batch" else "all")
        job = SequenceJob(id, as_tokens(tokens), len(tokens), priority, kept, self._arrivals)
        self._queues[priority].append(job)
        self._jobs[id] = job

    def cancel(self, id: Id) -> PromptCost | None:
        """End a job, keeping only what others wait for; mutates: its cells are free at once. None: it was not here."""
        if id not in self._jobs:
            return None
        job = self._jobs[id]
        waiting = (other for queue in self._queues.values() for other in queue)
        wanted = any(other.follows is not None and other.follows[0] is job for other in waiting)
        return self._end(job, "prompt" if wanted else "nothing")

    def finish(self, id: Id) -> PromptCost:
        """A job's answer is complete; mutates: what it leaves behind is idle."""
        job = self._jobs[id]
        return self._end(job, job.keep)

    def token(self, id: Id, token: int) -> None:
        """What was sampled for a job, to be decoded in the next step; mutates."""
        self._jobs[id].sampled(token)

    def restart(self, forest: PrefixCache) -> None:
        """Go on with other cells, because the context was built anew; mutates: what ran waits, pins hold there too."""
        for job in sorted(self._running.values(), key=lambda job: -job.arrival):
            job.stopped()
            self._queues[job.priority].appendleft(job)
        self._running.clear()
        if forest is not self.forest:
            self._evicted += self.forest.evicted
            for pin in self.forest.pins:
                forest.pin(pin)
        self.forest = forest
        self._crowded = False
        self._first = None

    # -- steps -------------------------------------------------------------------------------------------------------

    def plan(self) -> DecodeStep:
        """The work of the next step; mutates: lets jobs in, makes room, preempts."""
        self._admit()
        work: Collection[SequenceWork] = self._next_of_all()
        exhausted: list[Id] = []
        for part in () if work else self._parts():
            jobs = [job for job in self._running.values() if part == "both" or job.prefills == (part == "prompts")]
            kept = len(self._running) - len(jobs) if part == "prompts" else 0
            draft = StepDraft(bounds_of(jobs, budget=self.budget, ubatch=self.ubatch), kept=kept)
            exhausted += self._fill(draft, jobs, part)
            work = draft.work.values()
            if work or exhausted:
                break
        ordered = in_streams(work) if self.streams else tuple(work)
        step = DecodeStep(ordered, tuple(self._preempted), tuple(exhausted))
        self._preempted.clear()
        return step

    def _next_of_all(self) -> list[SequenceWork]:
        """The next token of every answer, where there is nothing else to do, as in most steps. Mutates nothing.

        It is what `_fill` would find, without asking for every job what it needs: llama.cpp waits meanwhile.
        """
        running = self._running.values()
        limit = self._limit
        if len(running) > min(self.budget, self.forest.free):
            return []
        if any(job.pending is None or job.position >= limit for job in running):
            return []
        return [
            SequenceWork(job.id, sequence, array("i", (pending,)), job.position, logits=True)
            for job in sorted(running, key=_claim)
            if (pending := job.pending) is not None and (sequence := job.sequence) is not None
        ]

    def _parts(self) -> tuple[StepContent, ...]:
        """What the next step is to compute, and what else where nothing of that can be; mutates who comes first.

        Where prompts and answers do not mix, prompts come first: then all lanes answer at once. Those of who runs when
        the last tokens of answers are out, not of who comes later: jobs that end with their prompt would follow each
        other, and a long answer would stand still. Urgent work waits for no prompt.
        """
        running = self._running.values()
        if self.mixes or any(job.urgent for job in running):
            return ("both",)
        prompts = {job.arrival for job in running if job.prefills}
        if self._first is None:
            self._first = prompts
        return ("prompts", "answers") if prompts & self._first else ("answers", "prompts")

    def _fill(self, draft: StepDraft, jobs: Sequence[SequenceJob], part: StepContent) -> list[Id]:
        """Put work of these jobs into a step; mutates: makes room, preempts. Returns who cannot go on at all.

        In streams llama.cpp computes as many tokens of each prompt as the shortest has, then what the others have over,
        and so on: never in more passes than prompts one by one, if none is cut that would fit into a step alone.
        """
        exhausted: list[Id] = []
        for job in sorted(jobs, key=lambda job: (job.prefills, *_claim(job))):
            most = draft.left_for(job)
            if part == "prompts" and self.streams and draft.work and len(job.prompt) - job.position > most:
                continue
            tokens = job.next_tokens(most)
            if job.sequence is None or not tokens:
                continue
            granted = self._grant(job, min(len(tokens), self._limit - job.position), draft)
            if granted:
                last = job.position + granted >= len(job.prompt)
                draft.add(job, SequenceWork(job.id, job.sequence, tokens[:granted], job.position, logits=last))
            elif job.position >= self._limit or len(self._running) == 1:
                exhausted.append(job.id)
        return exhausted

    def ran(self, step: DecodeStep) -> None:
        """A step has been computed; mutates."""
        for work in step.work:
            job = self._jobs.get(work.id)
            if job is None or job.sequence != work.sequence:
                continue
            job.awaits_token = work.logits
            if job.pending is not None:
                self._first = None
                self.forest.appended(work.sequence, job.pending)
                job.went_on()
                continue
            self.forest.filled(work.sequence, len(work.tokens))
            new, again = job.advanced(len(work.tokens))
            self._computed += new
            self._recomputed += again

    def failed_for_room(self) -> DecodeStep:
        """The decoder found no room for a step that should have had it; mutates: the next that asks for less.

        Everything idle goes; where nothing is, the youngest job does. Nobody enters until somebody has left.
        """
        self._crowded = True
        if self.forest.available == self.forest.free:
            eldest = min(self._running.values(), key=lambda job: (job.priority == "batch", job.arrival), default=None)
            victim = None if eldest is None else self._victim(eldest)
            if victim is None:
                return DecodeStep((), exhausted=tuple(job.id for job in self._running.values()))
            self._preempt(victim)
        self.forest.room(self.forest.available)
        return self.plan()

    # -- who enters --------------------------------------------------------------------------------------------------

    @property
    def _limit(self) -> int:
        """Tokens that one sequence can have at most. Mutates nothing."""
        return min(self.context, self.forest.total_cells)

    def _admit(self) -> None:
        """Let jobs in, interactive first; mutates. A job that computes an interactive one's head is urgent too."""
        for job in self._running.values():
            job.urgent = job.priority == "interactive"
        for priority, queue in self._queues.items():
            index = 0
            while index < min(len(queue), LOOK_AHEAD) and self._has_lane(priority):
                job = queue[index]
                if self._must_wait(job):
                    if priority == "interactive" and job.follows is not None:
                        job.follows[0].urgent = True
                    index += 1
                    continue
                opened = self.forest.open(job.prompt) if self._has_cells(job) else None
                if opened is None:
                    return  # nobody is let past: a smaller job would only make it wait longer
                del queue[index]
                job.urgent = priority == "interactive"
                self._running[opened.sequence] = job
                self._reused += job.began(opened.sequence, opened.reused)

    def _has_lane(self, priority: Priority) -> bool:
        """Whether one more job of a kind may run. Mutates nothing."""
        if len(self._running) >= self.lanes + self.interactive_lanes or (self._crowded and self._running):
            return False
        return priority == "interactive" or len(self._of_batch()) < self.lanes

    def _must_wait(self, job: SequenceJob) -> bool:
        """Whether a job's head is being computed by another, or its last token is not in; mutates its `follows`."""
        if job.awaits_token or job.is_held_up():
            return True
        match = self.forest.look(job.prompt)
        if match.leader is None:
            job.follows = None
            return False
        job.follows = self._running[match.leader], match.coming
        return True

    def _has_cells(self, job: SequenceJob) -> bool:
        """Whether a job can run without another having to yield for it soon. Mutates nothing.

        Without this, a batch job would be let in, grow, be preempted and be let in again. An interactive one may
        drive out batch jobs, and where nothing runs, somebody must. In a stream of its own it meets nobody.
        """
        if self.streams or not self._running or (job.priority == "interactive" and self._of_batch()):
            return True
        headroom = max(1, min(_MOST_HEADROOM, self.forest.total_cells // _HEADROOM_SHARE))
        promised = sum(max(0, len(other.prompt) - other.position) for other in self._running.values())
        return self.forest.fits(job.prompt, promised + headroom * (len(self._running) + 1))

    def _of_batch(self) -> list[SequenceJob]:
        """Batch jobs that run. Mutates nothing."""
        return [job for job in self._running.values() if job.priority == "batch"]

    # -- who gets what, and who yields -------------------------------------------------------------------------------

    def _grant(self, job: SequenceJob, wanted: int, draft: StepDraft) -> int:
        """Make room for up to `wanted` tokens beside the work so far; mutates: evicts, preempts, takes work back.

        A batch job makes do with what is left before anybody yields; for an urgent one batch jobs yield at once.
        """
        while wanted > 0:
            if self.forest.room(draft.cells + wanted):
                return wanted
            victim = self._victim(job)
            spare = self.forest.available - draft.cells
            hurries = job.urgent and victim is not None and victim.priority == "batch"
            if spare > 0 and not hurries:
                wanted = spare
            elif victim is None:
                return 0
            else:
                self._preempt(victim)
                draft.drop(victim.id)
        return 0

    def _victim(self, job: SequenceJob) -> SequenceJob | None:
        """Who must yield for a job. Mutates nothing."""
        batch = [other for other in self._of_batch() if other is not job]
        younger = [other for other in self._running.values() if other.arrival > job.arrival]
        if not job.urgent:
            pool = [other for other in batch if other.arrival > job.arrival]
        elif job.priority == "batch":
            pool = batch
        else:
            pool = batch or younger
        return max(pool, key=lambda other: other.arrival, default=None)

    def _preempt(self, job: SequenceJob) -> None:
        """Send a running job back to the head of its queue; mutates. What it had is idle until someone needs room."""
        if job.sequence is None:
            return
        self.forest.pause(job.sequence)
        del self._running[job.sequence]
        job.stopped()
        self._queues[job.priority].appendleft(job)
        self._preempted.append(job.id)
        self._preemptions += 1

    def _end(self, job: SequenceJob, keep: KeepPolicy) -> PromptCost:
        """Take a job out, wherever it is; mutates."""
        if job.sequence is None:
            self._queues[job.priority].remove(job)
            if job.reached:  # else nothing of it was ever computed
                self.forest.forget(job.prompt)
        else:
            wanted = (other.prompt for queue in self._queues.values() for other in islice(queue, LOOK_AHEAD))
            self.forest.close(job.sequence, keep, prompt_tokens=job.prompt_tokens, wanted=wanted)
            del self._running[job.sequence]
            job.sequence = None
            self._crowded = False
        del self._jobs[job.id]
        return job.spent


def _claim(job: SequenceJob) -> tuple[bool, int]:
    """By what jobs that both answer, or both do not, come one before the other. Mutates nothing."""
    return not job.urgent, job.arrival
