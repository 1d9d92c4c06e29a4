"""Chooses a column order for each row of a table so that rows share long prefixes.

A table is a list of columns; a cell is a number for one value of one column, weighted by the bytes of its line. There
are two greedy recursions, and neither is always better. A level handles some rows and their remaining columns:

    by value    take the cell with the highest weight x (rows - 1); the rows that have it begin with it and form a level
                without its column; continue with the other rows, in which it no longer counts
    by column   take the column whose cells have the highest sum of weight x (rows - 1); the rows of each of its cells
                begin with it and form a level; rows with a unique cell form one more level

Counts are updated as rows leave, so a level visits each cell only a few times. Pure.
"""

import heapq
from collections import Counter
from collections.abc import Callable, Sequence
from typing import NamedTuple

Order = tuple[int, ...]
"""The columns of a row, in order."""
Columns = Sequence[Sequence[int]]
"""Cells by column and row."""

MAX_CELLS = 60_000_000  # visited in total, within tens of seconds; remaining levels get one order for all their rows


class _Level(NamedTuple):
    rows: list[int]
    columns: list[int]
    first: Order = ()  # columns that all of these rows begin with
    last: Order = ()  # columns that are unique per row


Split = Callable[[_Level, Columns, Sequence[int]], tuple[list[_Level], list[int]]]
"""Splits a level into lower levels and the rows that share nothing with others."""


def arrange(
    table: Columns, weights: Sequence[int], groups: Sequence[list[int]], split: Split, max_cells: int = MAX_CELLS
) -> list[Order]:
    """A column order for every row. Only rows of one group can share a prefix: the text before them differs."""
    columns = [*range(len(table))]
    orders: list[Order] = [tuple(columns)] * sum(map(len, groups))
    levels = [_Level(group, columns) for group in groups]
    visited = 0
    while levels:
        level = _without_constants(levels.pop(), table)
        visited += len(level.rows) * len(level.columns)
        alone = level.rows
        columns = level.columns
        if len(alone) > 1 and columns:
            if visited > max_cells:
                columns = _by_worth(level, table, weights)
            else:
                below, alone = split(level, table, weights)
                levels += below
        order = (*level.first, *columns, *level.last)
        for row in alone:
            orders[row] = order
    return orders


def by_value(level: _Level, table: Columns, weights: Sequence[int]) -> tuple[list[_Level], list[int]]:
    """Levels for the best cells, one after the other."""
    counts = dict[int, int]()
    holders = dict[int, list[int]]()
    heap = list[tuple[int, int, int]]()
    useful = list[int]()  # columns with a value that several rows have
    for column in level.columns:
        cells = [table[column][row] for row in level.rows]
        several = {cell: count for cell, count in Counter(cells).items() if count > 1}
        if several:
            useful.append(column)
            counts |= several
            holders |= {cell: [] for cell in several}
            heap += [(-weights[cell] * (count - 1), column, cell) for cell, count in several.items()]
            for row, cell in zip(level.rows, cells, strict=True):
                if cell in several:
                    holders[cell].append(row)
    heapq.heapify(heap)
    left = set(level.rows)
    below = list[_Level]()
    while heap:
        worth, column, cell = heapq.heappop(heap)
        if counts[cell] < 2:
            continue
        now = -weights[cell] * (counts[cell] - 1)
        if now != worth:  # rows have left since the weight was computed
            heapq.heappush(heap, (now, column, cell))
            continue
        group = [row for row in holders[cell] if row in left]
        left.difference_update(group)
        for other in useful:
            cells_of = table[other]
            for cell_left, times in Counter([cells_of[row] for row in group]).items():
                if cell_left in counts:
                    counts[cell_left] -= times
        others = [other for other in level.columns if other != column]
        below.append(_Level(group, others, (*level.first, column), level.last))
    return below, [row for row in level.rows if row in left]


def by_column(level: _Level, table: Columns, weights: Sequence[int]) -> tuple[list[_Level], list[int]]:
    """Levels for all cells of the best column, and one for the rows with a unique cell."""
    best, *_ = _by_worth(level, table, weights)
    groups: dict[int, list[int]] = {}
    for row in level.rows:
        groups.setdefault(table[best][row], []).append(row)
    others = [column for column in level.columns if column != best]
    alone = [group[0] for group in groups.values() if len(group) == 1]
    if len(alone) == len(level.rows):
        return [], alone
    below = [_Level(group, others, (*level.first, best), level.last) for group in groups.values() if len(group) > 1]
    if len(alone) > 1:
        below.append(_Level(alone, others, level.first, (best, *level.last)))
        return below, []
    return below, alone


def _without_constants(level: _Level, table: Columns) -> _Level:
    """Move columns with one value for all rows to the front: they cost nothing and need not be counted."""
    constant = [column for column in level.columns if _same(table[column], level.rows)]
    if not constant:
        return level
    left = [column for column in level.columns if column not in constant]
    return level._replace(columns=left, first=(*level.first, *constant))


def _same(cells: Sequence[int], rows: Sequence[int]) -> bool:
    value = cells[rows[0]]
    return cells[rows[-1]] == value and all(cells[row] == value for row in rows)


def _by_worth(level: _Level, table: Columns, weights: Sequence[int]) -> list[int]:
    """Columns sorted by the bytes that each would save as the first one."""
    worth: dict[int, int] = {}
    for column in level.columns:
        cells = table[column]
        counts = Counter([cells[row] for row in level.rows])
        worth[column] = sum([weights[cell] * (count - 1) for cell, count in counts.items() if count > 1])
    return sorted(level.columns, key=lambda column: (-worth[column], column))
