"""Continuous batching as a pure state machine: plans each decode step and records its results.

    commands               submit, cancel
    plan                   step = plan()
    decode                 the decoder runs step.work; if it finds no room: step = failed_for_room()
    record                 ran(step), then token(id, ...) or finish(id) for all work with logits

Call commands before `plan`, not between `plan` and the decoder. It uses no clocks, threads, samplers or text.
"""

import math
from array import array
from collections import deque
from collections.abc import Collection, Iterable, Sequence
from itertools import islice
from typing import Literal, TypeAlias, get_args

from tokenmill.engine.engine import Priority, SlotLimit
from tokenmill.errors import RequestRefused, TooLong
from tokenmill.native.batching import (
    DecodeStep,
    Id,
    PromptCost,
    RunningSequence,
    SchedulerTotals,
    SequenceJob,
    SequenceWork,
    StepDraft,
    StepLimits,
    ordered_for_streams,
    step_limits,
)
from tokenmill.native.kv.prefix_cache import KeepPolicy, PrefixCache
from tokenmill.native.kv.radix import as_tokens
from tokenmill.native.lockstep import admission_passes, gaps, next_pass

LOOK_AHEAD = 64  # queued jobs to examine while the first one waits for a prefix that is being computed
_MAX_HEADROOM = 64  # cells left for each running job's answer when another job is admitted ...
_LOCKSTEP_SHARE = 2.0  # prompts up to this multiple of an answer are computed one token a pass ...
_SPREAD = 0.25  # ... unless answers end together: with a smaller deviation, relative to the mean, the multiple is less
_TURN_TAIL = 16  # tokens at the end of an interactive prompt that the next turn of a conversation may not repeat
_PADDING = array("i", (0,))
_HEADROOM_SHARE = 64  # ... but at most 1/64 of all cells
Phase: TypeAlias = Literal["both", "prompts", "answers"]


class StepScheduler:
    """Decides which jobs run and which tokens the next step decodes.

    Order within a step: decodes before prefills, interactive before batch, then by arrival. If cells run out, idle
    cells are evicted, then the youngest batch job is preempted; for an interactive job, any batch job and then the
    youngest interactive one. A job is never preempted for a younger one of its priority class, so the oldest job
    always progresses.

    `step_limits` bounds the size of a step and the share of batch prompts; `_phases` decides whether it contains
    prompts, answers or both.
    """

    def __init__(
        self, prefix_cache: PrefixCache, *, slots: int, interactive_slots: int, budget: int, ubatch: int, context: int
    ) -> None:
        self.prefix_cache = prefix_cache
        # These may be assigned at any time.
        self.slots = slots  # maximum batch jobs that run concurrently
        self.interactive_slots = interactive_slots  # additional slots, for interactive jobs only
        self.budget = budget  # maximum tokens of one step
        self.ubatch = ubatch  # tokens that the decoder computes together
        self.context = context  # maximum tokens of one sequence
        self.streams = False  # each sequence has cells of its own: see `ordered_for_streams`
        self.mixes = True  # prompts and answers of batch jobs may be decoded in one step
        self.lockstep = False  # with streams: a step is one pass over the weights; see `lockstep`
        self.narrow_rows = 0  # steps with fewer tokens are far cheaper, because they copy no experts to a GPU; 0: none
        self.pauses_batch = False  # interactive answers are decoded in narrow steps of their own
        self._waited_passes = 0.0  # passes that the free slots have missed since jobs were last admitted
        self._answers = self._answer_tokens = self._answer_squares = 0  # finished jobs, their tokens and the squares
        self._jobs: dict[Id, SequenceJob] = {}
        self._queues: dict[Priority, deque[SequenceJob]] = {"interactive": deque(), "batch": deque()}
        self._running: dict[int, SequenceJob] = {}  # by sequence
        self._arrivals = 0
        self._preempted: list[Id] = []  # since the last step
        self._blocked = False  # the decoder found too few free cells: admit no job until one ends
        self._prompts_first: set[int] | None = None  # arrivals of jobs whose prompts precede the next answer tokens
        self._limit_of_slots: SlotLimit = "jobs"  # what keeps more batch jobs from running
        self._slot_steps = 0
        self._limited_steps: dict[SlotLimit, int] = dict.fromkeys(get_args(SlotLimit), 0)
        self._computed = self._reused = self._recomputed = self._preemptions = 0
        self._evicted = 0  # from prefix caches before this one

    @property
    def totals(self) -> SchedulerTotals:
        """Counters since the start."""
        return SchedulerTotals(
            self._computed,
            self._reused,
            self._recomputed,
            self._preemptions,
            self._evicted + self.prefix_cache.evicted,
            running=len(self._running),
            waiting=len(self._jobs) - len(self._running),
            slot_steps=self._slot_steps,
            limited_steps=dict(self._limited_steps),
        )

    def running_sequences(self) -> list[RunningSequence]:
        """Return the progress of all running jobs, oldest first."""
        return [job.snapshot() for job in sorted(self._running.values(), key=lambda job: job.arrival)]

    def spent(self, id: Id) -> PromptCost:
        """Return the token counts of a job's prompt so far."""
        return self._jobs[id].spent

    # -- commands ----------------------------------------------------------------------------------------------------

    def submit(
        self,
        id: Id,
        tokens: Sequence[int],
        priority: Priority,
        *,
        keep: KeepPolicy | None = None,
        branches: Iterable[int] = (),
    ) -> None:
        """Queue a job. By default a batch job retains its prompt in the cache, an interactive one its answer too.

        branches: positions at which prompts that are not queued yet diverge from this one.
        """
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
        if not self.prefix_cache.cuts:
            job.branches.update(branches)
            for other in self._running.values():
                other.branches_before(job.prompt)
        self._queues[priority].append(job)
        self._jobs[id] = job

    def cancel(self, id: Id) -> PromptCost | None:
        """End a job and free its cells, except a prefix that queued jobs wait for. None if the job is unknown."""
        if id not in self._jobs:
            return None
        job = self._jobs[id]
        waiting = (other for queue in self._queues.values() for other in queue)
        wanted = any(other.follows is not None and other.follows[0] is job for other in waiting)
        return self._end(job, "prompt" if wanted else "nothing")

    def finish(self, id: Id) -> PromptCost:
        """End a job whose answer is complete."""
        job = self._jobs[id]
        self._answers += 1
        self._answer_tokens += len(job.generated)
        self._answer_squares += len(job.generated) ** 2
        return self._end(job, job.keep)

    def token(self, id: Id, token: int) -> None:
        """Record the token sampled for a job; the next step decodes it."""
        self._jobs[id].sampled(token)

    def restart(self, prefix_cache: PrefixCache) -> None:
        """Continue with the cells of another context: running jobs are queued again, pins are carried over."""
        for job in sorted(self._running.values(), key=lambda job: -job.arrival):
            job.requeued()
            self._queues[job.priority].appendleft(job)
        self._running.clear()
        if prefix_cache is not self.prefix_cache:
            self._evicted += self.prefix_cache.evicted
            for pin in self.prefix_cache.pins:
                prefix_cache.pin(pin)
        self.prefix_cache = prefix_cache
        self._blocked = False
        self._prompts_first = None

    # -- steps -------------------------------------------------------------------------------------------------------

    def plan(self) -> DecodeStep:
        """Return the work of the next step; admits, evicts and preempts for it."""
        self._admit()
        if self.lockstep and self.streams:
            return self._plan_pass()
        work: Collection[SequenceWork] = self._plan_narrow() if self.pauses_batch else ()
        work = work or self._plan_decodes()
        exhausted: list[Id] = []
        for phase in () if work else self._phases():
            jobs = [job for job in self._running.values() if phase == "both" or job.prefills == (phase == "prompts")]
            reserved = len(self._running) - len(jobs) if phase == "prompts" else 0
            draft = StepDraft(step_limits(jobs, budget=self.budget, ubatch=self.ubatch), reserved_cells=reserved)
            exhausted += self._fill(draft, jobs, phase)
            work = draft.work.values()
            if work or exhausted:
                break
        ordered = ordered_for_streams(work) if self.streams else tuple(work)
        step = DecodeStep(ordered, tuple(self._preempted), tuple(exhausted))
        self._preempted.clear()
        return step

    def _plan_pass(self) -> DecodeStep:
        """Return one pass over the weights: see `lockstep.next_pass`."""
        ordered = [job for _, job in sorted(self._running.items())]
        exhausted = tuple(job.id for job in ordered if not job.prefills and job.position >= self._limit)
        jobs = [job for job in ordered if job.id not in exhausted] if exhausted else ordered
        preempted = tuple(self._preempted)
        self._preempted.clear()
        if not jobs:
            return DecodeStep((), preempted, exhausted)
        chosen, count = next_pass(jobs, self.ubatch)
        work = [
            SequenceWork(job.id, sequence, tokens, job.position, job.position + len(tokens) >= len(job.prompt))
            for job in chosen
            if (sequence := job.sequence) is not None and (tokens := job.next_tokens(count))
        ]
        taken = set(self._running)
        padding = [
            SequenceWork(None, gap, _PADDING, self.prefix_cache.padding_position(gap), logits=False)
            for gap in gaps([each.sequence for each in work])
            if gap not in taken
        ]
        return DecodeStep(ordered_for_streams((*work, *padding)), preempted, exhausted)

    def _plan_narrow(self) -> Collection[SequenceWork]:
        """Return the work of urgent jobs alone if it is a narrow step; else nothing.

        A prompt with more tokens is computed together with the batch, where its rows cost almost nothing.
        """
        jobs = [job for job in self._running.values() if job.urgent]
        rows = sum(max(1, len(job.prompt) - job.position) for job in jobs)
        if not 0 < rows < self.narrow_rows or rows > self.prefix_cache.free:
            return ()
        draft = StepDraft(StepLimits(rows, rows))
        self._fill(draft, jobs, "both")
        return draft.work.values()

    def _plan_decodes(self) -> list[SequenceWork]:
        """Return the next token of every answer if the step has no other work; else nothing.

        A fast path with the result of `_fill` for most steps: llama.cpp is idle while Python plans.
        """
        running = self._running.values()
        limit = self._limit
        if len(running) > min(self.budget, self.prefix_cache.free):
            return []
        if any(job.pending is None or job.position >= limit for job in running):
            return []
        return [
            SequenceWork(job.id, sequence, array("i", (pending,)), job.position, logits=True)
            for job in sorted(running, key=_order)
            if (pending := job.pending) is not None and (sequence := job.sequence) is not None
        ]

    def _phases(self) -> tuple[Phase, ...]:
        """Return what the next step contains, followed by the alternative if that yields no work.

        If prompts and answers do not mix, prompts come first, so that then all slots decode together. Only the prompts
        of jobs that were running at the last answer token precede the next one: otherwise a series of jobs that end
        with their prompt would stall a long answer. Urgent jobs never wait for prompts.
        """
        running = self._running.values()
        if self.mixes or any(job.urgent for job in running):
            return ("both",)
        prompts = {job.arrival for job in running if job.prefills}
        if self._prompts_first is None:
            self._prompts_first = prompts
        return ("prompts", "answers") if prompts & self._prompts_first else ("answers", "prompts")

    def _fill(self, draft: StepDraft, jobs: Sequence[SequenceJob], phase: Phase) -> list[Id]:
        """Add work of these jobs to a step; return the jobs that are exhausted.

        With streams, llama.cpp computes as many tokens of each prompt as the shortest one has, then the remainders,
        and so on. That takes no more passes than computing the prompts one by one, as long as no prompt is cut that
        would fit into a step alone.
        """
        exhausted: list[Id] = []
        for job in sorted(jobs, key=lambda job: (job.prefills, *_order(job))):
            most = draft.left_for(job)
            if phase == "prompts" and self.streams and draft.work and len(job.prompt) - job.position > most:
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
        """Record that a step was decoded."""
        self._count_slots(step)
        for work in step.work:
            if work.id is None:
                self.prefix_cache.remove_padding(work.sequence, work.position)
                continue
            job = self._jobs.get(work.id)
            if job is None or job.sequence != work.sequence:
                continue
            job.awaits_token = work.logits
            if job.pending is not None:
                self._prompts_first = None
                self.prefix_cache.record_token(work.sequence, job.pending)
                job.decoded()
                continue
            self.prefix_cache.record_prefill(work.sequence, len(work.tokens))
            new, again = job.advanced(len(work.tokens))
            if job.position in job.branches:
                self.prefix_cache.keep_state(work.sequence)
            self._computed += new
            self._recomputed += again

    def failed_for_room(self) -> DecodeStep:
        """Plan a smaller step after the decoder found too few free cells.

        All idle cells are evicted; if there are none, the youngest job is preempted. No job is admitted until one ends.
        """
        self._blocked = True
        if self.prefix_cache.available == self.prefix_cache.free:
            eldest = min(self._running.values(), key=lambda job: (job.priority == "batch", job.arrival), default=None)
            victim = None if eldest is None else self._victim(eldest)
            if victim is None:
                return DecodeStep((), exhausted=tuple(job.id for job in self._running.values()))
            self._preempt(victim)
        self.prefix_cache.make_room(self.prefix_cache.available)
        return self.plan()

    def _count_slots(self, step: DecodeStep) -> None:
        """Count the running batch jobs of a step, unless it is for interactive ones alone."""
        batch = len(self._of_batch())
        if batch and any(job.priority == "batch" for work in step.work if (job := self._jobs.get(work.id))):
            self._slot_steps += batch
            self._limited_steps["slots" if batch >= self.slots else self._limit_of_slots] += 1

    # -- admission ---------------------------------------------------------------------------------------------------

    @property
    def _limit(self) -> int:
        """Maximum tokens of one sequence."""
        return min(self.context, self.prefix_cache.total_cells)

    def _admit(self) -> None:
        """Admit queued jobs, interactive ones first. A job that computes an interactive job's prefix becomes urgent."""
        batch = promised = 0
        for job in self._running.values():
            job.urgent = job.priority == "interactive"
            batch += not job.urgent
            promised += max(0, len(job.prompt) - job.position)
        self._limit_of_slots = "cells" if self._blocked and self._running else "jobs"
        if self._holds_back(batch):
            self._limit_of_slots = "prompts"
            return
        for priority, queue in self._queues.items():
            if self.lockstep and self.streams:
                self._sort_for_streams(queue, self.slots - batch)
            index = 0
            while index < min(len(queue), LOOK_AHEAD) and self._has_slot(priority, batch):
                job = queue[index]
                if self._waits_for_prefix(job):
                    if priority == "interactive" and job.follows is not None:
                        job.follows[0].urgent = True
                    elif priority == "batch":
                        self._limit_of_slots = "prefix"
                    index += 1
                    continue
                opened = self.prefix_cache.open(job.prompt) if self._has_cells(job, batch, promised) else None
                if opened is None:
                    self._limit_of_slots = "cells"
                    return  # no other job overtakes it: a smaller one would only delay it further
                del queue[index]
                job.urgent = priority == "interactive"
                self._running[opened.sequence] = job
                if not self.prefix_cache.cuts:
                    self._plan_branches(job)
                self._reused += job.admitted(opened.sequence, opened.reused)
                self._waited_passes = 0.0
                batch += priority == "batch"
                promised += max(0, len(job.prompt) - job.position)

    def _plan_branches(self, job: SequenceJob) -> None:
        """Find the positions of a prompt at which queued prompts and pinned prefixes need its state."""
        queued = (other.prompt for queue in self._queues.values() for other in islice(queue, LOOK_AHEAD))
        for prompt in queued:
            job.branches_before(prompt)
        for pin in self.prefix_cache.pins:
            if job.prompt[: len(pin)] == pin:
                job.branches.add(len(pin))
        if job.keep == "all" and len(job.prompt) > _TURN_TAIL and len(job.prompt) not in job.branches:
            job.branches.add(len(job.prompt) - _TURN_TAIL)

    def _sort_for_streams(self, queue: deque[SequenceJob], free: int) -> None:
        """Sort the jobs that can be admitted now by length: consecutive streams with prompts of similar length are
        computed in the fewest passes.
        """
        first = list(islice(queue, free))
        for _ in first:
            queue.popleft()
        queue.extendleft(sorted(first, key=lambda job: (len(job.prompt), -job.arrival)))

    def _holds_back(self, batch: int) -> bool:
        """Whether free slots should wait for more of them, because the prompts of new jobs would take too many passes.

        A new job that computes its prompt one token a pass, with the answers of others, occupies its slot for as many
        passes. If that is longer than an answer, jobs are admitted together once the free slots have missed as many
        passes as computing their prompts takes, or when nothing else runs.
        """
        queue = self._queues["batch"]
        free = self.slots - batch
        if not self.lockstep or not self.streams or not queue or free <= 0 or not self._running:
            return False
        own = len(queue[0].prompt) - self.prefix_cache.match(queue[0].prompt).coming
        if self._queues["interactive"] or not self._answers:
            return False
        mean = self._answer_tokens / self._answers
        deviation = math.sqrt(max(0.0, self._answer_squares / self._answers - mean * mean))
        if own <= _LOCKSTEP_SHARE * min(mean, deviation / _SPREAD):
            return False
        self._waited_passes += free / self.slots
        return self._waited_passes < admission_passes(min(free, len(queue)), self.slots, own, self.ubatch)

    def _has_slot(self, priority: Priority, batch: int) -> bool:
        """Whether one more job of this priority may run in addition to `batch` batch jobs."""
        if len(self._running) >= self.slots + self.interactive_slots or (self._blocked and self._running):
            return False
        return priority == "interactive" or batch < self.slots

    def _waits_for_prefix(self, job: SequenceJob) -> bool:
        """Whether another job is computing the job's prefix, or its last token is not sampled; updates `follows`."""
        if job.awaits_token or job.waits_for_leader():
            return True
        match = self.prefix_cache.match(job.prompt)
        if match.leader is None:
            job.follows = None
            return False
        leader = self._running[match.leader]
        job.follows = leader, match.coming
        if not self.prefix_cache.cuts:
            leader.branches.add(match.coming)
        return True

    def _has_cells(self, job: SequenceJob, batch: int, promised: int) -> bool:
        """Whether a job can run next to `batch` batch jobs, and `promised` prompt tokens, without a preemption soon.

        Without this check, a batch job would be admitted, grow, be preempted and be admitted again. An interactive job
        may preempt batch jobs, and if nothing runs, any job is admitted. With streams, jobs do not compete for cells.
        """
        if self.streams or not self._running or (job.priority == "interactive" and batch):
            return True
        headroom = max(1, min(_MAX_HEADROOM, self.prefix_cache.total_cells // _HEADROOM_SHARE))
        return self.prefix_cache.fits(job.prompt, promised + headroom * (len(self._running) + 1))

    def _of_batch(self) -> list[SequenceJob]:
        return [job for job in self._running.values() if job.priority == "batch"]

    # -- cells and preemption ----------------------------------------------------------------------------------------

    def _grant(self, job: SequenceJob, wanted: int, draft: StepDraft) -> int:
        """Free cells for up to `wanted` more tokens, and return how many are granted.

        For an urgent job, batch jobs are preempted immediately; a batch job takes the remaining cells first.
        """
        while wanted > 0:
            if self.prefix_cache.make_room(draft.cells + wanted):
                return wanted
            victim = self._victim(job)
            spare = self.prefix_cache.available - draft.cells
            preempts = job.urgent and victim is not None and victim.priority == "batch"
            if spare > 0 and not preempts:
                wanted = spare
            elif victim is None:
                return 0
            else:
                self._preempt(victim)
                draft.drop(victim.id)
        return 0

    def _victim(self, job: SequenceJob) -> SequenceJob | None:
        """Return the job to preempt for `job`, if there is one."""
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
        """Return a running job to the front of its queue. Its cells stay cached until they are needed."""
        if job.sequence is None:
            return
        self.prefix_cache.pause(job.sequence)
        del self._running[job.sequence]
        job.requeued()
        self._queues[job.priority].appendleft(job)
        self._preempted.append(job.id)
        self._preemptions += 1

    def _end(self, job: SequenceJob, keep: KeepPolicy) -> PromptCost:
        """Remove a queued or running job."""
        if job.sequence is None:
            self._queues[job.priority].remove(job)
            if job.reached:  # it ran before, so its paused sequence may still be cached
                self.prefix_cache.release_paused(job.prompt)
        else:
            wanted = (other.prompt for queue in self._queues.values() for other in islice(queue, LOOK_AHEAD))
            self.prefix_cache.close(job.sequence, keep, prompt_tokens=job.prompt_tokens, wanted=wanted)
            del self._running[job.sequence]
            job.sequence = None
            self._blocked = False
        del self._jobs[job.id]
        return job.spent


def _order(job: SequenceJob) -> tuple[bool, int]:
    """Sort key among jobs that are all in prefill or all in decode."""
    return not job.urgent, job.arrival
