"""Which runner works which jobs, so that all end together and few heads are computed more than once.

A group is the jobs that share a head; a runner computes the head once, however many of its jobs it gets. Two ways are
tried, and the one with fewer copies of heads is taken where it ends nearly as soon:

    whole     a head goes to one runner, the longest first, to the runner that would be done with it first; one whose
              work is more than a fair share is cut into as many equal parts as it has fair shares, if that pays
    filled    heads in order, runners in order: each runner is filled up to one and the same end, and what does not fit
              goes on at the next, for the price of the head once more

Stated bounds, for runners of one speed with nothing warm (`least_s` is the lower bound, no way ends before it):

- it ends within TOLERANCE x (least_s + two heads + one job), the largest of each;
- heads are computed at most groups + runners times in all;
- a head is on at most 2 + (its seconds) / (least_s - its head - one of its jobs) runners, where that is positive.

Between runners of unlike speed the first is off by at most their ratio. What is warm costs nothing, and goes first to
where it is. Knows seconds and counts: no clocks, stores or engines. Same values in, same assignment out.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from heapq import heapify, heapreplace
from math import ceil, sqrt

TOLERANCE = 1.05  # a makespan longer by no more than this is worth fewer copies of heads
_CLOSE = 1.001  # between the ends that are tried
_EPSILON = 1e-9


@dataclass(frozen=True, slots=True)
class Group:
    """Jobs that share a head and are alike otherwise."""

    head: bytes
    jobs: int
    head_tokens: float
    prompt_tokens: float  # of one job, behind the head
    output_tokens: float  # of one job, expected


@dataclass(frozen=True, slots=True)
class Runner:
    """An engine at its operating point."""

    prefill_tok_s: float
    decode_tok_s: float  # all lanes together
    warm: frozenset[bytes] = frozenset()  # heads that it has
    free_s: float = 0.0  # until it can begin

    def head_s(self, group: Group) -> float:
        """Seconds for a group's head."""
        return 0.0 if group.head in self.warm else group.head_tokens / self.prefill_tok_s

    def job_s(self, group: Group) -> float:
        """Seconds of the engine that one more job of a group takes."""
        return group.prompt_tokens / self.prefill_tok_s + group.output_tokens / self.decode_tok_s


@dataclass(frozen=True, slots=True)
class Share:
    """Jobs of one group for one runner: those numbered from `first` on, as the group has them."""

    runner: int
    group: int
    first: int
    jobs: int


@dataclass(frozen=True, slots=True)
class Assignment:
    """Every job once, by runner and then by group."""

    shares: tuple[Share, ...]
    ends_s: tuple[float, ...]  # by runner; what it was busy with before counts
    copies: int  # heads to be computed, of all runners together
    least_s: float  # no assignment ends before

    @property
    def makespan_s(self) -> float:
        """When the last runner ends; 0 where there is no work."""
        return max((self.ends_s[share.runner] for share in self.shares), default=0.0)


@dataclass(slots=True)
class _Filling:
    """Jobs given so far, by runner and group."""

    groups: Sequence[Group]
    runners: Sequence[Runner]
    given: dict[tuple[int, int], int] = field(default_factory=lambda: defaultdict(int))
    ends_s: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.ends_s = [runner.free_s for runner in self.runners]

    def head_s(self, runner: int, group: int) -> float:
        """Of a head that this runner does not have yet."""
        return 0.0 if (runner, group) in self.given else self.runners[runner].head_s(self.groups[group])

    def end_s(self, runner: int, group: int, jobs: int) -> float:
        """When a runner would be done with more jobs of a group. Mutates nothing."""
        return self.ends_s[runner] + self.head_s(runner, group) + jobs * self.runners[runner].job_s(self.groups[group])

    def give(self, runner: int, group: int, jobs: int) -> None:
        """Mutates."""
        self.ends_s[runner] = self.end_s(runner, group, jobs)
        self.given[runner, group] += jobs

    def room(self, runner: int, group: int, end_s: float) -> int:
        """Jobs of a group that a runner could do by then. Mutates nothing."""
        left_s = end_s - self.ends_s[runner] - self.head_s(runner, group)
        job_s = self.runners[runner].job_s(self.groups[group])
        if left_s < 0:
            return 0
        return int(left_s / job_s + _EPSILON) if job_s > 0 else self.groups[group].jobs

    def assignment(self, least_s: float) -> Assignment:
        """As it is now; jobs of a group are numbered through its runners."""
        first = [0] * len(self.groups)
        shares, copies = list[Share](), 0
        for (runner, group), jobs in sorted(self.given.items()):
            shares.append(Share(runner, group, first[group], jobs))
            first[group] += jobs
            copies += self.groups[group].head not in self.runners[runner].warm
        return Assignment(tuple(shares), tuple(self.ends_s), copies, least_s)


def assign(groups: Sequence[Group], runners: Sequence[Runner]) -> Assignment:
    """All jobs of all groups; groups have heads of their own, and there is a runner."""
    if not runners:
        raise ValueError("no runner to assign jobs to")
    if len({group.head for group in groups}) < len(groups):
        raise ValueError("two groups have one head: they are one group")
    least_s = _least_s(groups, runners)
    whole = _whole(groups, runners, least_s).assignment(least_s)
    if whole.makespan_s <= _CLOSE * least_s:
        return whole
    filled = _filled(groups, runners, least_s, whole.makespan_s)
    if filled is None:
        return whole
    other = filled.assignment(least_s)
    slow = whole.makespan_s > TOLERANCE * other.makespan_s
    many = whole.copies > len(groups) + len(runners)
    return other if slow or many else whole


def _least_s(groups: Sequence[Group], runners: Sequence[Runner]) -> float:
    """When all runners could end together if each head were computed once, where it is done soonest.

    And no job ends sooner than a runner that was free and had nothing else to do.
    """
    kinds = {(runner.prefill_tok_s, runner.decode_tok_s): runner for runner in runners}
    warm = set[bytes]().union(*(runner.warm for runner in runners))
    total_s = alone_s = 0.0
    for group in groups:
        if group.jobs:
            heads_s = [0.0 if group.head in warm else runner.head_s(group) for runner in kinds.values()]
            jobs_s = [runner.job_s(group) for runner in kinds.values()]
            total_s += min(head + group.jobs * job for head, job in zip(heads_s, jobs_s, strict=True))
            alone_s = max(alone_s, min(head + job for head, job in zip(heads_s, jobs_s, strict=True)))
    free = sorted(runner.free_s for runner in runners)
    before_s, end_s = 0.0, 0.0
    for count, free_s in enumerate(free, 1):  # runners that are free later do not help
        before_s += free_s
        end_s = (total_s + before_s) / count
        if count < len(free) and end_s <= free[count]:
            break
    return max(end_s, free[0] + alone_s) if total_s else 0.0


def _whole(groups: Sequence[Group], runners: Sequence[Runner], least_s: float) -> _Filling:
    """Heads to one runner each, but those with more work than a fair share."""
    filling = _Filling(groups, runners)
    fair_s = max(_EPSILON, least_s - min(runner.free_s for runner in runners))
    parts = list[tuple[float, int, int]]()  # seconds on a typical runner, group, jobs
    typical = Runner(
        sum(runner.prefill_tok_s for runner in runners) / len(runners),
        sum(runner.decode_tok_s for runner in runners) / len(runners),
    )
    for number, group in enumerate(groups):
        takes_s = typical.head_s(group) + group.jobs * typical.job_s(group)
        fair = min(group.jobs, len(runners), ceil(takes_s / fair_s - _EPSILON))
        count = max(1, min(fair, _paying(typical.head_s(group), group.jobs * typical.job_s(group), len(runners))))
        for part in range(count):
            jobs = group.jobs * (part + 1) // count - group.jobs * part // count
            if jobs:
                parts.append((typical.head_s(group) + jobs * typical.job_s(group), number, jobs))
    parts.sort(key=lambda part: (-part[0], groups[part[1]].head))
    kinds = defaultdict[tuple[float, float], list[tuple[float, int]]](list)
    homes = defaultdict[bytes, list[int]](list)
    for number, runner in enumerate(runners):
        kinds[runner.prefill_tok_s, runner.decode_tok_s].append((runner.free_s, number))
        for head in runner.warm:
            homes[head].append(number)
    heaps = list(kinds.values())
    for heap in heaps:
        heapify(heap)
    for _, group_number, jobs in parts:
        for heap in heaps:  # ends that have grown since they were put here
            while heap[0][0] != filling.ends_s[heap[0][1]]:
                heapreplace(heap, (filling.ends_s[heap[0][1]], heap[0][1]))
        among = [*(heap[0][1] for heap in heaps), *homes[groups[group_number].head]]
        best = min(among, key=lambda runner: (filling.end_s(runner, group_number, jobs), runner))
        filling.give(best, group_number, jobs)
    return filling


def _paying(head_s: float, jobs_s: float, runners: int) -> int:
    """Parts of a group of which the last still saves all runners together as much time as its head costs."""
    return int(0.5 + sqrt(0.25 + jobs_s * runners / max(head_s, _EPSILON)))


def _filled(groups: Sequence[Group], runners: Sequence[Runner], least_s: float, known_s: float) -> _Filling | None:
    """Runners filled up to the earliest end at which everything fits; None: none before `known_s`."""
    order = sorted(range(len(groups)), key=lambda number: groups[number].head)
    low_s, high_s, best = least_s, known_s, None
    while high_s > _CLOSE * low_s:
        middle_s = (low_s + high_s) / 2
        filling = _filled_to(groups, runners, order, middle_s)
        if filling is None:
            low_s = middle_s
        else:
            best, high_s = filling, middle_s
    return best


def _filled_to(
    groups: Sequence[Group], runners: Sequence[Runner], order: Sequence[int], end_s: float
) -> _Filling | None:
    """Runners filled up to an end; None: not everything fits."""
    filling = _Filling(groups, runners)
    left = [group.jobs for group in groups]
    numbers = {group.head: number for number, group in enumerate(groups)}
    for at, runner in enumerate(runners):
        for head in sorted(runner.warm):
            if (number := numbers.get(head)) is not None and (
                fit := min(left[number], filling.room(at, number, end_s))
            ):
                filling.give(at, number, fit)
                left[number] -= fit
    at = 0
    for number in order:
        while left[number]:
            if at == len(runners):
                return None
            fit = min(left[number], filling.room(at, number, end_s))
            if fit:
                filling.give(at, number, fit)
                left[number] -= fit
            if left[number]:
                at += 1
    return filling
