"""A model of an engine whose sequences share the KV cells of a prefix, like the native one. Time is a number.

An engine computes prompts before it decodes, and all sequences decode together at the speed of that many slots. A job
file therefore takes computed / prefill + generated / decode(slots) seconds, which is what was recorded. A request waits
if another request computes its prefix; more requests may be sent than run. Prefixes stay cached until cells are needed.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import Literal, NamedTuple

from tokenmill.jobs.scheduler.estimates import MeasuredRates

Path = tuple[tuple[int, float], ...]
"""Nested prefixes, outermost first: pairs of a number and the tokens that it adds."""


_MAX_TURNS = 8


@dataclass(frozen=True, slots=True)
class Work:
    """Jobs that one slot runs one after the other; mostly one."""

    number: int
    path: Path
    prompt_tokens: float  # prompt tokens after the path, of all jobs
    output_tokens: float  # of all jobs
    jobs: int = 1
    first: int = 0  # positions in a table: the first one and the end

    @property
    def end(self) -> int:
        """Position after the last job."""
        return self.first + self.jobs

    @property
    def turns(self) -> int:
        """Number of changes of its slot from a prompt to an answer: one per job or per group of jobs."""
        return min(self.jobs, _MAX_TURNS)


class Event(NamedTuple):
    """An event that an engine reports."""

    kind: Literal["first token", "finished"]
    work: Work


class Engine:
    """One engine."""

    def __init__(self, rates: MeasuredRates, lanes: int, cells: float | None = None) -> None:
        if not rates.prefill_tok_s:
            raise ValueError("an engine without a measured prefill cannot be simulated")
        self.now_s = 0.0
        self.computed_tokens = self.written_tokens = self.busy_s = 0.0
        self.left = 0.0  # jobs that were sent and have not ended
        self._prefill_tok_s = rates.prefill_tok_s
        self._lane_tok_s = [0.0, *((rates.decode_at(count) or 0.0) / count for count in range(1, lanes + 1))]
        self._lanes = lanes
        self._cells = cells
        self._queue: deque[Work] = deque()
        self._prompts: deque[tuple[Work, float, int]] = deque()  # in order: tokens to compute, turns done
        self._written = 0.0  # tokens per slot since the beginning, as if it had always been busy
        self._answers: list[tuple[float, int, Work, int]] = []  # ordered by generated tokens at the end: turns done
        self._warm: dict[int, float] = {}  # tokens by prefix, least recently used first
        self._cold: set[int] = set()

    @property
    def running(self) -> int:
        """Number of busy slots."""
        return len(self._prompts) + len(self._answers)

    def send(self, works: Sequence[Work], at_s: float) -> None:
        """Advance the clock, at most to the next report; mutates."""
        self._pass(at_s)
        self._queue.extend(works)
        self.left += sum(work.jobs for work in works)
        self._admit()

    def next_s(self) -> float | None:
        """Time of the next report; None: nothing runs."""
        if self._prompts:
            return self.now_s + self._prompts[0][1] / self._prefill_tok_s
        if self._answers:
            return self.now_s + max(0.0, self._answers[0][0] - self._written) / self._lane_tok_s[len(self._answers)]
        return None

    def step(self) -> Event | None:
        """Advance to the next end of a prompt or an answer; mutates. None: an event inside the engine."""
        then_s = self.next_s()
        if then_s is None:
            raise ValueError("nothing runs")
        self.busy_s += then_s - self.now_s
        self.now_s = then_s
        if self._prompts:
            work, tokens, turns = self._prompts.popleft()
            self.computed_tokens += tokens
            heappush(self._answers, (self._written + work.output_tokens / work.turns, work.number, work, turns))
            if turns:
                return None
            self._warmed(work.path)
            self._admit()
            return Event("first token", work)
        self._written, _, work, turns = heappop(self._answers)
        self.written_tokens += work.output_tokens / work.turns
        self.left -= work.jobs / work.turns
        if turns + 1 < work.turns:
            self._prompts.append((work, work.prompt_tokens / work.turns, turns + 1))
            return None
        self._admit()
        return Event("finished", work)

    def die(self, at_s: float) -> list[tuple[Work, int]]:
        """Clear the engine; mutates. Returns what was sent, with the number of finished jobs of each."""
        self._pass(at_s)
        begun = [(work, turns) for work, _, turns in self._prompts] + [(each[2], each[3]) for each in self._answers]
        lost = [(work, 0) for work in self._queue] + [(work, work.jobs * turns // work.turns) for work, turns in begun]
        for state in (self._queue, self._prompts, self._answers, self._warm, self._cold):
            state.clear()
        self.left = 0.0
        return lost

    def _pass(self, to_s: float) -> None:
        """Advance the clock by a time without reports; mutates."""
        passed_s = to_s - self.now_s
        self.now_s = to_s
        if self.running:
            self.busy_s += passed_s
        if self._prompts:
            work, left, turns = self._prompts[0]
            computed = min(left, passed_s * self._prefill_tok_s)
            self.computed_tokens += computed
            self._prompts[0] = (work, left - computed, turns)
        elif self._answers:
            self._written += passed_s * self._lane_tok_s[len(self._answers)]

    def _admit(self) -> None:
        """Requests that need not wait, in order; mutates."""
        left = deque[Work]()
        while self._queue and self.running < self._lanes:
            work = self._queue.popleft()
            tokens = self._to_compute(work.path)
            if tokens is None:
                left.append(work)
                continue
            self._cold.update(head for head, _ in work.path if head not in self._warm)
            self._prompts.append((work, tokens + work.prompt_tokens / work.turns, 0))
        self._queue.extendleft(reversed(left))

    def _to_compute(self, path: Path) -> float | None:
        """Tokens of a path that are not cached; None: another request is computing some of them."""
        for at, (head, _) in enumerate(path):
            if head in self._cold:
                return None
            if head not in self._warm:
                return sum(tokens for _, tokens in path[at:])
        return 0.0

    def _warmed(self, path: Path) -> None:
        """Mark a path as cached and most recently used, so that waiting requests can run; mutates."""
        for head, tokens in path:
            self._cold.discard(head)
            self._warm.pop(head, None)
            self._warm[head] = tokens
        if self._cells is not None:
            begun = [each[2] for each in self._answers] + [each[0] for each in self._prompts]
            used = {head for work in begun for head, _ in work.path}
            used |= {head for head, _ in path}
            over = sum(self._warm.values()) - self._cells
            for head in [head for head in self._warm if head not in used]:
                if over <= 0:
                    break
                over -= self._warm.pop(head)
