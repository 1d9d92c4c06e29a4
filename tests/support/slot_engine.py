"""Fake engines for a scheduler: a token is a byte, time is a number, nothing waits.

Each counts the computed tokens. `SlotEngine` is llama-server without its host cache: a slot keeps its last prompt.
`CachingEngine` finds everything that was complete when a request started, as vLLM does. `SharingEngine` lets a request
wait for another one that computes its prefix, as the native engine does.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import count, islice
from typing import Literal

from tokenmill.engine.engine import Usage
from tokenmill.jobs.ingest.identity import prefix_key_of
from tokenmill.jobs.models import JobId
from tokenmill.jobs.scheduler.decisions import Dispatch, Fetch, Wait
from tokenmill.jobs.scheduler.prefix_groups import Pending, common_length
from tokenmill.jobs.scheduler.scheduler import Scheduler

SIMILARITY = 0.1
PREFILL_S, DECODE_S = 0.001, 0.02  # for each token


@dataclass(frozen=True, slots=True)
class Work:
    """A job and what will become of it."""

    job: int
    prompt: bytes
    output: int
    priority: int = 0
    deadline_s: float | None = None
    expected: bool = True  # its length is known beforehand

    @property
    def record(self) -> Pending:
        tokens = self.output if self.expected else None
        return Pending(
            self.job, prefix_key_of(self.prompt), len(self.prompt), tokens, self.priority, self.deadline_s, tokens
        )


@dataclass(frozen=True, slots=True)
class Event:
    """Something that an engine reports."""

    kind: Literal["first token", "finished"]
    job: int


@dataclass(slots=True)
class _Request:
    work: Work
    slot: int | None
    found: int = 0


class Engine:
    """Time, and what all kinds have in common."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.computed = 0
        self.found: dict[int, int] = {}
        self.slots_used: set[int] = set()
        self._numbers = count()
        self._events: list[tuple[float, int, Event]] = []
        self._running: dict[int, _Request] = {}

    def send(self, work: Work, slot: int | None) -> None:
        self._begin(_Request(work, slot))

    def drop(self, job: int) -> None:
        """A stream was closed."""
        self._running.pop(job, None)
        self._events = sorted(entry for entry in self._events if entry[2].job != job)

    def die(self) -> None:
        self._running.clear()
        self._events.clear()

    def step(self) -> Event:
        self.now_s, _, event = heappop(self._events)
        request = self._running[event.job]
        if event.kind == "first token":
            self._ready(request)
        else:
            del self._running[event.job]
            self._done(request)
        return event

    def _begin(self, request: _Request) -> None:
        prompt = request.work.prompt
        request.found = min(self._look(request), len(prompt) - 1)
        self.found[request.work.job] = request.found
        self.computed += len(prompt) - request.found
        self._running[request.work.job] = request
        first_s = self.now_s + PREFILL_S * (len(prompt) - request.found)
        self._push(first_s, Event("first token", request.work.job))
        self._push(first_s + DECODE_S * request.work.output, Event("finished", request.work.job))

    def _push(self, time_s: float, event: Event) -> None:
        heappush(self._events, (time_s, next(self._numbers), event))

    def _look(self, request: _Request) -> int:
        """Bytes that need not be computed."""
        return 0

    def _ready(self, request: _Request) -> None:
        pass

    def _done(self, request: _Request) -> None:
        pass


class SlotEngine(Engine):
    """llama-server."""

    def __init__(self, slots: int) -> None:
        super().__init__()
        self._left = [b""] * slots
        self._used = [0] * slots

    def die(self) -> None:
        super().die()
        self._left = [b""] * len(self._left)

    def _look(self, request: _Request) -> int:
        if request.slot is None:
            request.slot = self._choose(request.work.prompt)
        busy = {other.slot for other in self._running.values()}
        assert request.slot not in busy, f"slot {request.slot} is busy"
        found = common_length(self._left[request.slot], request.work.prompt)
        self._left[request.slot] = request.work.prompt
        self._used[request.slot] = next(self._numbers)
        self.slots_used.add(request.slot)
        return found

    def _choose(self, prompt: bytes) -> int:
        busy = {other.slot for other in self._running.values()}
        free = [slot for slot in range(len(self._left)) if slot not in busy]
        similar = {slot: common_length(self._left[slot], prompt) / len(prompt) for slot in free}
        best = max(free, key=lambda slot: similar[slot])
        return best if similar[best] > SIMILARITY else min(free, key=lambda slot: self._used[slot])


class CachingEngine(Engine):
    """vLLM: complete prefixes are reused, and evicted in the order of last use when cells run out."""

    def __init__(self, cells: int | None = None) -> None:
        super().__init__()
        self._cells = cells
        self._cached: dict[bytes, None] = {}  # oldest first

    def die(self) -> None:
        super().die()
        self._cached.clear()

    def _look(self, request: _Request) -> int:
        return max((common_length(prompt, request.work.prompt) for prompt in self._cached), default=0)

    def _ready(self, request: _Request) -> None:
        self._touch(request.work.prompt)

    def _done(self, request: _Request) -> None:
        self._touch(request.work.prompt)

    def _touch(self, prompt: bytes) -> None:
        self._cached.pop(prompt, None)
        self._cached[prompt] = None
        used = {request.work.prompt for request in self._running.values()}
        while self._cells is not None and self._size() > self._cells:
            oldest = next((prompt for prompt in self._cached if prompt not in used), None)
            if oldest is None:
                break
            del self._cached[oldest]

    def _size(self) -> int:
        prompts = sorted(self._cached)
        return sum(map(len, prompts)) - sum(map(common_length, prompts, islice(prompts, 1, None)))


class SharingEngine(CachingEngine):
    """The native engine: more may be sent than run, and a job waits if another one computes its prefix."""

    def __init__(self, slots: int, cells: int | None = None) -> None:
        super().__init__(cells)
        self._slots = slots
        self._queue: list[_Request] = []

    def send(self, work: Work, slot: int | None) -> None:
        self._queue.append(_Request(work, slot))
        self._admit()

    def drop(self, job: int) -> None:
        self._queue = [request for request in self._queue if request.work.job != job]
        super().drop(job)
        self._admit()

    def die(self) -> None:
        super().die()
        self._queue.clear()

    def step(self) -> Event:
        event = super().step()
        self._admit()
        return event

    def _admit(self) -> None:
        for request in tuple(self._queue):
            if len(self._running) < self._slots and not self._must_wait(request):
                self._queue.remove(request)
                self._begin(request)

    def _must_wait(self, request: _Request) -> bool:
        found = self._look(request)
        cold = (other.work.prompt for other in self._running.values() if other.work.prompt not in self._cached)
        return any(common_length(prompt, request.work.prompt) > found for prompt in cold)


@dataclass
class Night:
    """Run a scheduler on an engine until nothing is left."""

    scheduler: Scheduler
    engine: Engine
    works: Iterable[Work]
    order: list[int] = field(default_factory=list)  # of dispatch
    sent: dict[int, Dispatch] = field(default_factory=dict)
    done: list[int] = field(default_factory=list)
    ended_s: list[float] = field(default_factory=list)
    most_in_flight: int = 0
    waits: list[str] = field(default_factory=list)
    meanwhile: Callable[["Night"], None] | None = None  # after each event

    def __post_init__(self) -> None:
        self.by_job = {work.job: work for work in self.works}
        self.pending = iter(
            sorted(
                (work.record for work in self.works),
                key=lambda each: (-each.priority, JobId.batch(each.job), *each[1::-1]),
            )
        )

    def run(self) -> "Night":
        self.act()
        while self.scheduler.in_flight:
            self.report(self.engine.step())
            if self.meanwhile is not None:
                self.meanwhile(self)
            self.act()
        return self

    def report_next(self) -> Event:
        event = self.engine.step()
        self.report(event)
        return event

    def report(self, event: Event) -> None:
        if event.kind == "first token":
            self.scheduler.first_token(event.job)
            return
        work = self.by_job[event.job]
        usage = Usage(len(work.prompt), work.output, self.engine.found[event.job])
        self.sent[event.job] = self.scheduler.finished(event.job, usage)
        self.done.append(event.job)
        self.ended_s.append(self.engine.now_s)

    def act(self) -> None:
        """Carry out decisions until the scheduler decides to wait."""
        while True:
            decisions = self.scheduler.decide()
            for decision in decisions:
                if isinstance(decision, Fetch):
                    page = list(islice(self.pending, decision.jobs))
                    self.scheduler.available(page, more=len(page) == decision.jobs)
                elif isinstance(decision, Dispatch):
                    self.order.append(decision.job)
                    self.sent[decision.job] = decision
                    self.engine.send(self.by_job[decision.job], decision.slot)
                    self.scheduler.started(decision.job)
            self.most_in_flight = max(self.most_in_flight, len(self.scheduler.in_flight))
            if isinstance(decisions[-1], Wait):
                self.waits.append(decisions[-1].reason)
                return
