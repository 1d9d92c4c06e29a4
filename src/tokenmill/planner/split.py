"""Divides a model's layers over GPUs by an exact search over contiguous runs of layers.

         gpu0                gpu1              host
  ┌──────────────────┬──────────────────┬─────────────────┐
  │ layers i..j      │ layers j..L      │ layers 0..i     │   attention, norms, shared experts, KV
  │ experts of some  │ experts of some  │ all other       │   routed experts, a whole layer at a time
  │ of them          │ of them, output  │ experts         │
  └──────────────────┴──────────────────┴─────────────────┘

Objectives, in order: fewest layers on the CPU; most layers' experts on GPUs; most free memory on the fullest GPU; all
GPUs equally full. Works on bytes alone, without a machine or a model.
"""

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from itertools import accumulate

from tokenmill.units import MIB

FINEST_BYTES = 64 * MIB  # resolution of the search for the largest free margin


@dataclass(frozen=True, slots=True)
class Layer:
    """Bytes of one layer on the GPU that computes it, and of its routed experts."""

    base_bytes: int
    expert_bytes: int = 0


Overhead = Callable[[int, bool, bool], int]
"""(GPU, has the output, some experts of its layers are on the host) -> bytes in addition to the layers."""


@dataclass(frozen=True, slots=True)
class CardShare:
    """The run of layers of one GPU."""

    start: int
    stop: int
    experts: tuple[int, ...]  # layers whose experts the GPU holds
    used_bytes: int


@dataclass(frozen=True, slots=True)
class CardSplit:
    """The shares of all GPUs in order; layers before the first share are computed by the CPU."""

    shares: tuple[CardShare, ...]
    first: int  # layers before this one are computed by the CPU

    @property
    def expert_layers(self) -> int:
        """Number of layers whose experts are on a GPU."""
        return sum(len(share.experts) for share in self.shares)


def split(layers: Sequence[Layer], capacities: Sequence[int], overhead: Overhead, *, even: bool = True) -> CardSplit:
    """Divide `layers` over GPUs of these capacities; deterministic.

    With `even=False` only the first two objectives count, which is ten times faster.
    """
    search = _Search(tuple(layers), tuple(capacities), overhead)
    first = _smallest(0, len(layers), lambda start: search.score(start, 0) is not None)
    if first is None or first == len(layers):
        return CardSplit(tuple(CardShare(len(layers), len(layers), (), 0) for _ in capacities), len(layers))
    margin = _largest_margin(search, first, max(capacities)) if even else 0
    return CardSplit(search.shares(first, margin), first)


_Kind = tuple[int, int, int, int, int]  # capacity, then overhead: plain, staging, with output, with output staging
_Score = tuple[int, float]  # number of layers whose experts are held, evenness (higher is better)


class _Search:
    """Dynamic programming over (GPU, first layer left)."""

    def __init__(self, layers: tuple[Layer, ...], capacities: tuple[int, ...], overhead: Overhead) -> None:
        self.layers = layers
        self.capacities = capacities
        self.kinds: list[_Kind] = [
            (
                size,
                overhead(card, False, False),
                overhead(card, False, True),
                overhead(card, True, False),
                overhead(card, True, True),
            )
            for card, size in enumerate(capacities)
        ]
        self._runs = _runs(tuple(layer.expert_bytes for layer in layers))
        self.base = [0, *accumulate(layer.base_bytes for layer in layers)]

    def score(self, first: int, margin: int) -> _Score | None:
        """Best score for the layers from `first` on if every used GPU keeps `margin` bytes free; None: impossible."""
        return self._table(first, margin)[0][first][0]

    def shares(self, first: int, margin: int) -> tuple[CardShare, ...]:
        """The split with the best score."""
        tables = self._table(first, margin)
        start = first
        shares = []
        for card, table in enumerate(tables[:-1]):
            stop = table[start][1]
            held, used = (self._held(self.kinds[card], start, stop, margin) or (0, 0)) if stop > start else (0, 0)
            experts = self._runs(start, stop)[0][:held]
            shares.append(CardShare(start, stop, tuple(sorted(experts)), used))
            start = stop
        return tuple(shares)

    def _table(self, first: int, margin: int) -> list[list[tuple[_Score | None, int]]]:
        """For every GPU and first remaining layer, the best score and the end of that GPU's run."""
        count = len(self.layers)
        done: list[tuple[_Score | None, int]] = [(None, count)] * count + [((0, 0.0), count)]
        tables = [done]
        for card in reversed(range(len(self.capacities))):
            rest = tables[0]
            kind = self.kinds[card]
            table: list[tuple[_Score | None, int]] = [(None, start) for start in range(count)]
            table.append(((0, 0.0), count))
            for start in range(first, count):
                best, where = rest[start][0], start  # the GPU stays empty
                for stop in range(start + 1, count + 1):
                    held = self._held(kind, start, stop, margin)
                    if held is None:
                        break  # more layers need more memory
                    after = rest[stop][0]
                    if after is None:
                        continue
                    score = after[0] + held[0], after[1] - (kind[0] - held[1]) ** 2
                    if best is None or score > best:
                        best = score
                        where = stop
                table[start] = best, where
            tables.insert(0, table)
        return tables

    @cache  # noqa: B019  lives as long as one search; equal GPUs share entries
    def _held(self, kind: _Kind, start: int, stop: int, margin: int) -> tuple[int, int] | None:
        """Number of these layers whose experts fit on the GPU, and bytes used; None if the layers alone do not fit."""
        capacity, plain, staging, output_plain, output_staging = kind
        if stop == len(self.layers):
            plain = output_plain
            staging = output_staging
        base = self.base[stop] - self.base[start]
        left = capacity - margin - base
        sizes = self._runs(start, stop)[1]
        whole = plain + (sizes[-1] if sizes else 0)
        if whole <= left:
            return len(sizes), base + whole
        if staging > left or not sizes:
            return None
        held = bisect_right(sizes, left - staging)
        return held, base + staging + (sizes[held - 1] if held else 0)


class _Runs:
    """The layers with experts of any run, smallest first, and their running total of bytes."""

    def __init__(self, experts: tuple[int, ...]) -> None:
        self._experts = experts
        self._known: dict[tuple[int, int], tuple[list[int], list[int]]] = {}

    def __call__(self, start: int, stop: int) -> tuple[list[int], list[int]]:
        found = self._known.get((start, stop))
        if found is None:
            sizes = self._experts
            having = sorted((i for i in range(start, stop) if sizes[i]), key=lambda i: (sizes[i], i))
            found = self._known[start, stop] = having, list(accumulate(sizes[i] for i in having))
        return found


_runs = lru_cache(maxsize=4)(_Runs)  # the same model is divided repeatedly with other batch sizes


def _largest_margin(search: _Search, first: int, most: int) -> int:
    """Largest margin on all used GPUs that moves no experts to the host."""
    wanted = search.score(first, 0)
    low = 0
    high = most // FINEST_BYTES + 1
    while high - low > 1:
        middle = (low + high) // 2
        found = search.score(first, middle * FINEST_BYTES)
        if found is not None and wanted is not None and found[0] >= wanted[0]:
            low = middle
        else:
            high = middle
    return low * FINEST_BYTES


def _smallest(low: int, high: int, holds: Callable[[int], bool]) -> int | None:
    """Smallest number from `low` to `high` for which the monotonic predicate `holds`; None if even `high` fails."""
    if holds(low):
        return low
    if not holds(high):
        return None
    while low < high:
        middle = (low + high) // 2
        if holds(middle):
            high = middle
        else:
            low = middle + 1
    return low
