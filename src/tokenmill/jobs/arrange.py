"""In which order each row of a table has its columns, so that rows begin with much in common.

Greedy: the best value first, then the same again.

Rows are lists of cells, a cell is a number that stands for one value of one column, and each has a weight: the bytes of
its line. One level of the recursion, for some rows and the columns they have left:

    count the cells -> take the one with the most weight x (rows - 1) -> those rows begin with it: a level of their own
         ^                                                                       |
         +---------------- count them out, go on with the rows that are left ----+

Counts are kept up to date as rows leave, so a level looks at each cell a few times, whatever is chosen in it. Pure.
"""

import heapq
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

Order = tuple[int, ...]
"""Columns in the order in which a row has them."""

MOST_CELLS = 60_000_000  # looked at in all, some tens of seconds; what is left then keeps one order for all its rows


class _Level(NamedTuple):
    rows: list[int]
    columns: list[int]
    first: Order  # columns that all of these rows begin with


def arrange(
    rows: Sequence[Sequence[int]], weights: Sequence[int], groups: Sequence[list[int]], most_cells: int = MOST_CELLS
) -> list[Order]:
    """An order for every row. Only rows of one group can share anything: what stands before differs between them."""
    columns = [*range(len(rows[0]))] if rows else []
    orders: list[Order] = [tuple(columns)] * len(rows)
    levels = [_Level(group, columns, ()) for group in groups]
    looked_at = 0
    while levels:
        level = _without_constants(levels.pop(), rows)
        looked_at += len(level.rows) * len(level.columns)
        if len(level.rows) == 1 or not level.columns:
            last = level.columns
        elif looked_at > most_cells:
            last = _one_order(level, rows, weights)
        else:
            level = level._replace(rows=_split(level, rows, weights, levels))
            last = level.columns
        for row in level.rows:
            orders[row] = (*level.first, *last)
    return orders


def _without_constants(level: _Level, rows: Sequence[Sequence[int]]) -> _Level:
    """Columns with one value for all rows come first: they cost nothing, and need not be counted."""
    first = rows[level.rows[0]]
    constant = [column for column in level.columns if _same(rows, level.rows, column, first[column])]
    if not constant:
        return level
    left = [column for column in level.columns if column not in constant]
    return _Level(level.rows, left, (*level.first, *constant))


def _same(rows: Sequence[Sequence[int]], of: Sequence[int], column: int, value: int) -> bool:
    return all(rows[row][column] == value for row in of)


def _split(
    level: _Level, rows: Sequence[Sequence[int]], weights: Sequence[int], levels: list[_Level]
) -> list[int]:
    """Add a level for each group of rows that begin with the same cell; the rows that share nothing are left."""
    columns = level.columns
    counts = Counter(rows[row][column] for row in level.rows for column in columns)
    column_of: dict[int, int] = {}
    holders: dict[int, list[int]] = {cell: [] for cell, count in counts.items() if count > 1}
    for row in level.rows:
        cells = rows[row]
        for column in columns:
            cell = cells[column]
            if cell in holders:
                holders[cell].append(row)
                column_of[cell] = column
    heap = [(-weights[cell] * (counts[cell] - 1), column_of[cell], cell) for cell in holders]
    heapq.heapify(heap)
    left = set(level.rows)
    while heap:
        worth, column, cell = heapq.heappop(heap)
        if counts[cell] < 2:
            continue
        now = -weights[cell] * (counts[cell] - 1)
        if now != worth:  # rows have left since it was weighed
            heapq.heappush(heap, (now, column, cell))
            continue
        group = [row for row in holders[cell] if row in left]
        left.difference_update(group)
        _count_out(group, rows, columns, counts, holders)
        others = [other for other in columns if other != column]
        levels.append(_Level(group, others, (*level.first, column)))
    return [row for row in level.rows if row in left]


def _count_out(
    group: Sequence[int], rows: Sequence[Sequence[int]], columns: Sequence[int], counts: Counter[int],
    holders: Mapping[int, list[int]],
) -> None:  # fmt: skip
    for row in group:
        cells = rows[row]
        for column in columns:
            cell = cells[column]
            if cell in holders:
                counts[cell] -= 1


def _one_order(level: _Level, rows: Sequence[Sequence[int]], weights: Sequence[int]) -> list[int]:
    """The columns by what each would save if it came first."""
    worth: Counter[int] = Counter()
    for column in level.columns:
        for cell, count in Counter(rows[row][column] for row in level.rows).items():
            worth[column] += weights[cell] * (count - 1)
    return sorted(level.columns, key=lambda column: (-worth[column], column))
