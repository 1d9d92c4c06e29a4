"""In which order each row of a table has its columns, so that rows begin with much in common.

Rows are lists of cells, a cell is a number that stands for one value of one column, and each has a weight: the bytes of
its line. Two greedy recursions, neither of which is always the better; one level of them, for some rows and the columns
they have left:

    by value    take the cell with the most weight x (rows - 1); the rows that have it begin with it and are a level of
                their own, without its column; go on with the other rows, in which it no longer counts
    by column   take the column whose cells have the most weight x (rows - 1) together; the rows of each of its cells
                begin with it and are a level of their own; rows that are alone in it are one more level

Counts are kept up to date as rows leave, so a level looks at each cell a few times, whatever is chosen in it. Pure.
"""

import heapq
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

Order = tuple[int, ...]
"""Columns in the order in which a row has them."""
Rows = Sequence[Sequence[int]]

MOST_CELLS = 60_000_000  # looked at in all, some tens of seconds; what is left then keeps one order for all its rows


class _Level(NamedTuple):
    rows: list[int]
    columns: list[int]
    first: Order = ()  # columns that all of these rows begin with
    last: Order = ()  # columns that tell them all apart


Split = Callable[[_Level, Rows, Sequence[int]], tuple[list[_Level], list[int]]]
"""The levels below one, and the rows that share nothing with any other."""


def arrange(
    rows: Rows, weights: Sequence[int], groups: Sequence[list[int]], split: Split, most_cells: int = MOST_CELLS
) -> list[Order]:
    """An order for every row. Only rows of one group can share anything: what stands before differs between them."""
    columns = [*range(len(rows[0]))] if rows else []
    orders: list[Order] = [tuple(columns)] * len(rows)
    levels = [_Level(group, columns) for group in groups]
    looked_at = 0
    while levels:
        level = _without_constants(levels.pop(), rows)
        looked_at += len(level.rows) * len(level.columns)
        alone, columns = level.rows, level.columns
        if len(alone) > 1 and columns:
            if looked_at > most_cells:
                columns = _by_worth(level, rows, weights)
            else:
                below, alone = split(level, rows, weights)
                levels += below
        for row in alone:
            orders[row] = (*level.first, *columns, *level.last)
    return orders


def by_value(level: _Level, rows: Rows, weights: Sequence[int]) -> tuple[list[_Level], list[int]]:
    """Levels for the best cells, one after the other."""
    columns = level.columns
    counts = Counter(rows[row][column] for row in level.rows for column in columns)
    holders: dict[int, list[int]] = {cell: [] for cell, count in counts.items() if count > 1}
    column_of: dict[int, int] = {}
    for row in level.rows:
        cells = rows[row]
        for column in columns:
            cell = cells[column]
            if cell in holders:
                holders[cell].append(row)
                column_of[cell] = column
    heap = [(-weights[cell] * (counts[cell] - 1), column_of[cell], cell) for cell in holders]
    heapq.heapify(heap)
    left, below = set(level.rows), list[_Level]()
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
        below.append(_Level(group, others, (*level.first, column), level.last))
    return below, [row for row in level.rows if row in left]


def by_column(level: _Level, rows: Rows, weights: Sequence[int]) -> tuple[list[_Level], list[int]]:
    """Levels for all cells of the best column, and one for the rows that are alone in it."""
    best, *_ = _by_worth(level, rows, weights)
    groups: dict[int, list[int]] = {}
    for row in level.rows:
        groups.setdefault(rows[row][best], []).append(row)
    others = [column for column in level.columns if column != best]
    alone = [group[0] for group in groups.values() if len(group) == 1]
    if len(alone) == len(level.rows):
        return [], alone
    below = [_Level(group, others, (*level.first, best), level.last) for group in groups.values() if len(group) > 1]
    if len(alone) > 1:
        below.append(_Level(alone, others, level.first, (best, *level.last)))
        return below, []
    return below, alone


def _without_constants(level: _Level, rows: Rows) -> _Level:
    """Columns with one value for all rows come first: they cost nothing, and need not be counted."""
    first = rows[level.rows[0]]
    constant = [column for column in level.columns if _same(rows, level.rows, column, first[column])]
    if not constant:
        return level
    left = [column for column in level.columns if column not in constant]
    return level._replace(columns=left, first=(*level.first, *constant))


def _same(rows: Rows, of: Sequence[int], column: int, value: int) -> bool:
    return all(rows[row][column] == value for row in of)


def _count_out(
    group: Sequence[int], rows: Rows, columns: Sequence[int], counts: Counter[int], holders: Mapping[int, list[int]]
) -> None:
    for row in group:
        cells = rows[row]
        for column in columns:
            cell = cells[column]
            if cell in holders:
                counts[cell] -= 1


def _by_worth(level: _Level, rows: Rows, weights: Sequence[int]) -> list[int]:
    """The columns by what each would save if it came first."""
    worth: Counter[int] = Counter()
    for column in level.columns:
        for cell, count in Counter([rows[row][column] for row in level.rows]).items():
            worth[column] += weights[cell] * (count - 1)
    return sorted(level.columns, key=lambda column: (-worth[column], column))
