"""An executable model of llama.cpp's KV cache, unified or per stream: cells with a position and a set of sequences.

It is as strict as the real cache with assertions: positions are consecutive, a cell is assigned to a sequence only
once, and IDs are in range. Unlike the real cache, it stores the token of each cell.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

from tokenmill.engine.engine import Priority
from tokenmill.native.batching import DecodeStep, Id, PromptCost
from tokenmill.native.kv.prefix_cache import KeepPolicy, PrefixCache
from tokenmill.native.scheduler import StepScheduler


@dataclass(slots=True)
class Cell:
    position: int
    token: int
    sequences: set[int] = field(default_factory=set)


class KvCells:
    def __init__(
        self, total: int, sequences: int, *, shares: bool = True, cuts: bool = True, streams: bool = False
    ) -> None:
        self.total, self.sequences, self.shares, self.can_cut, self.streams = total, sequences, shares, cuts, streams
        self.cells: list[Cell] = []  # those in use
        self.copies: list[tuple[int, int, int]] = []
        self.cuts: list[tuple[int, int]] = []

    @property
    def used(self) -> int:
        return len(self.cells)

    def copy(self, source: int, target: int, end: int) -> None:
        self._check(source, target)
        assert self.shares, "an encoder's output belongs to one sequence"
        assert self.can_cut or end == len(self._of(source)), "a recurrent state cannot be shared in part"
        assert source != target
        cells = [cell for cell in self._of(source) if cell.position < end]
        assert len(cells) == end, f"{source} has only {len(cells)} of {end} tokens"
        if self.streams:
            self.cells = [cell for cell in self.cells if target not in cell.sequences]
            self.cells += [Cell(cell.position, cell.token, {target}) for cell in cells]
        else:
            assert not self._of(target), "a sequence that holds something was copied into"
            for cell in cells:
                cell.sequences.add(target)
        self.copies.append((source, target, end))

    def cut(self, sequence: int, start: int) -> None:
        self._check(sequence)
        whole = start == 0 or start >= len(self._of(sequence))
        assert whole or (self.shares and self.can_cut), "a recurrent state cannot be cut in part"
        for cell in self.cells:
            if cell.position >= start:
                cell.sequences.discard(sequence)
        self.cells = [cell for cell in self.cells if cell.sequences]
        self.cuts.append((sequence, start))

    def decode(self, sequence: int, position: int, tokens: Iterable[int]) -> None:
        """Compute tokens of one sequence from a position on."""
        self._check(sequence)
        assert position == len(self._of(sequence)), f"{sequence} has {len(self._of(sequence))} tokens, not {position}"
        for offset, token in enumerate(tokens):
            assert self.used < self.total, "no free cell"
            self.cells.append(Cell(position + offset, token, {sequence}))

    def content(self, sequence: int) -> list[int]:
        """The tokens of a sequence, by position."""
        cells = sorted(self._of(sequence), key=lambda cell: cell.position)
        assert [cell.position for cell in cells] == list(range(len(cells))), f"{sequence} has gaps or doubles"
        return [cell.token for cell in cells]

    def _of(self, sequence: int) -> list[Cell]:
        return [cell for cell in self.cells if sequence in cell.sequences]

    def _check(self, *sequences: int) -> None:
        assert all(0 <= sequence < self.sequences for sequence in sequences)


class NoCells:
    """For forests of which only the own book-keeping is of interest."""

    def copy(self, source: int, target: int, end: int) -> None:
        pass

    def cut(self, sequence: int, start: int) -> None:
        pass


class Grown:
    """A prefix cache on the model of the KV cache, with sequences that compute on request."""

    def __init__(self, cells: int = 200, sequences: int = 8, *, shares: bool = True, cuts: bool = True) -> None:
        self.cells = KvCells(cells, sequences, shares=shares, cuts=cuts)
        self.cache = PrefixCache(self.cells, total_cells=cells, sequences=sequences, shares=shares, cuts=cuts)

    def open(self, tokens: list[int], *, compute: int | None = None) -> int:
        """A sequence that has computed its prompt, or a number of the missing tokens."""
        opened = self.cache.open(tokens)
        assert opened is not None
        rest = tokens[opened.reused :][:compute]
        if rest:
            self.cells.decode(opened.sequence, opened.reused, rest)
            self.cache.record_prefill(opened.sequence, len(rest))
        return opened.sequence

    def answer(self, sequence: int, tokens: list[int]) -> None:
        for token in tokens:
            self.cells.decode(sequence, self.cache.length(sequence), [token])
            self.cache.record_token(sequence, token)

    def leave(self, tokens: list[int], keep: KeepPolicy = "prompt", answer: tuple[int, ...] = ()) -> None:
        """A whole sequence, from its beginning to its end."""
        sequence = self.open(tokens)
        self.answer(sequence, list(answer))
        self.cache.close(sequence, keep)

    def cached(self, tokens: list[int]) -> int:
        found = self.cache.find(tokens)
        assert self.cache.used == self.cells.used
        return found[1] if found else 0


@dataclass(slots=True)
class Asked:
    """A job as its submitter sees it."""

    prompt: list[int]
    answer_tokens: int
    answer: list[int] = field(default_factory=list)
    first_step: int | None = None  # when work of it was first given out
    cut_short: bool = False
    spent: PromptCost | None = None  # once it has ended


class SchedulerHarness:
    """A worker without a model: runs a schedule on the model of the cache. Every step is checked as it is run.

    The token after a content is a function of that content, so a job that is preempted must go on with the same answer.
    """

    def __init__(
        self,
        cells: int,
        *,
        slots: int = 4,
        interactive_slots: int = 1,
        budget: int = 16,
        context: int | None = None,
        sequences: int | None = None,
        shares: bool = True,
        cuts: bool = True,
        ubatch: int | None = None,
        streams: bool = False,
    ) -> None:
        count = sequences or 2 * (slots + interactive_slots)
        self.cells = KvCells(cells, count, shares=shares or streams, cuts=cuts, streams=streams)
        self.cache = PrefixCache(
            self.cells, total_cells=cells, sequences=count, shares=shares, cuts=cuts, streams=streams
        )
        self.schedule = StepScheduler(
            self.cache,
            slots=slots,
            interactive_slots=interactive_slots,
            budget=budget,
            ubatch=ubatch or budget,
            context=context or cells,
        )
        self.schedule.streams, self.schedule.mixes = streams, not streams
        self.jobs: dict[Id, Asked] = {}
        self.done: dict[Id, Asked] = {}
        self.steps = 0
        self.last = DecodeStep(())

    def submit(
        self,
        id: Id,
        prompt: list[int],
        answer_tokens: int = 1,
        priority: Priority = "batch",
        keep: KeepPolicy | None = None,
        branches: Iterable[int] = (),
    ) -> None:
        self.schedule.submit(id, prompt, priority, keep=keep, branches=branches)
        self.jobs[id] = Asked(prompt, answer_tokens)

    def step(self) -> DecodeStep:
        """One turn of a worker's loop."""
        step = self.schedule.plan()
        self.perform(step)
        return step

    def perform(self, step: DecodeStep) -> None:
        self.steps += 1
        self.last = step
        assert step.tokens <= self.schedule.budget
        for work in step.work:
            job = self.jobs[work.id]
            if job.first_step is None:
                job.first_step = self.steps
            content = job.prompt + job.answer
            assert list(work.tokens) == content[work.position : work.position + len(work.tokens)]
            self.cells.decode(work.sequence, work.position, work.tokens)
            assert self.cells.content(work.sequence) == content[: work.position + len(work.tokens)]
            assert work.logits == (work.position + len(work.tokens) == len(content))
        self.schedule.ran(step)
        for work in step.work:
            if work.logits:
                job = self.jobs[work.id]
                job.answer.append(next_token(job.prompt + job.answer))
                if len(job.answer) == job.answer_tokens:
                    self._end(work.id, self.schedule.finish(work.id))
                else:
                    self.schedule.token(work.id, job.answer[-1])
        for exhausted in step.exhausted:
            self.jobs[exhausted].cut_short = True
            self._end(exhausted, self.schedule.finish(exhausted))
        assert self.cache.used == self.cells.used or (self.cells.streams and self.cache.used < self.cells.used)

    def cancel(self, id: Id) -> None:
        self.schedule.cancel(id)
        del self.jobs[id]

    def run(self, most_steps: int = 10_000) -> None:
        """Work until nothing is left; every job must come to its end within the steps given."""
        for _ in range(most_steps):
            if not self.jobs:
                return
            self.step()
        raise AssertionError(f"{len(self.jobs)} jobs have not ended after {most_steps} steps")

    def _end(self, id: Id, spent: PromptCost) -> None:
        job = self.jobs.pop(id)
        job.spent = spent
        self.done[id] = job


def next_token(content: list[int]) -> int:
    """What the missing model says."""
    return (sum(content[-3:]) + len(content)) % 5
