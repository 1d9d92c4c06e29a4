"""Builds jobs from a table and a template, laid out so that prompts share prefixes as long as possible.

The columns in `{*}` may have any order, which is chosen per row, and rows may have any order too. Rows that share a
long value start with it; this is repeated within these rows and among the others (`column_order.arrange`).

    plan: free  | country: AT | id: 1        plan: free  | country: AT | id: 1
    plan: pro   | country: AT | id: 2   ->   plan: free  | country: DE | id: 3
    plan: free  | country: DE | id: 3        plan: pro   | country: AT | id: 2

The saving is computed exactly; without a saving, the given column order is kept. Pure.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Literal

from tokenmill.jobs.column_order import Order, arrange, by_column, by_value
from tokenmill.jobs.scheduler.prefix_groups import common_length
from tokenmill.jobs.table import Table, custom_ids
from tokenmill.jobs.template import REST, Field, JobTemplate, TemplatePiece
from tokenmill.storage.json_text import compact_json

Mode = Literal["auto", "given"]


@dataclass(frozen=True, slots=True)
class Saving:
    """Prompt bytes to compute in the given and in the chosen layout."""

    rows: int
    prompt_bytes: int
    given_slot_bytes: int  # by a single slot in table order that caches the last prompt
    given_bytes: int  # with every shared prefix computed once
    bytes: int  # the same in the chosen layout
    orders: tuple[tuple[tuple[str, ...], int], ...] = ()  # column orders and their rows, the most frequent first

    @property
    def saved_bytes(self) -> int:
        """The saving over `given_bytes`."""
        return self.given_bytes - self.bytes

    def as_text(self, bytes_per_token: float = 4.0) -> str:
        """The figures in tokens, as one line."""
        slot, given, chosen = (
            f"{round(size / bytes_per_token):,}" for size in (self.given_slot_bytes, self.given_bytes, self.bytes)
        )
        saved = f"{chosen} in this layout" if self.bytes < self.given_bytes else "no other column order is better"
        return f"{slot} prompt tokens row by row, {given} with every shared prefix computed once; {saved}"


@dataclass(frozen=True, slots=True)
class JobLayout:
    """The jobs as lines, which can be iterated repeatedly, and the saving of their layout."""

    saving: Saving
    _table: Table
    _template: JobTemplate
    _ids: Sequence[str]
    _orders: Sequence[Order]  # of the columns in `{*}`, by row
    _rows: Sequence[int]
    _body: Mapping[str, Any] = field(default_factory=dict)

    def __iter__(self) -> Iterator[str]:
        for row in self._rows:
            system, user = _written(self._table, self._template, row, self._orders[row])
            messages = [{"role": "user", "content": user}]
            if system is not None:
                messages.insert(0, {"role": "system", "content": system})
            yield compact_json({"custom_id": self._ids[row], **self._body, "messages": messages})

    def __len__(self) -> int:
        return len(self._rows)


def lay_out(
    table: Table,
    template: JobTemplate,
    mode: Mode = "auto",
    *,
    key: str | None = None,
    body: Mapping[str, Any] | None = None,
    rows: Literal["shared", "table"] = "shared",
) -> JobLayout:
    """Jobs for all rows, named by row number or by the column `key`; raises UsageError for missing columns.

    `body` has additional keys for every line. With `rows` "shared", lines are sorted so that neighbours share long
    prefixes; "table" keeps their order, which costs nothing with a scheduler. Mode "given" reorders neither columns nor
    rows.
    """
    for name in template.names:
        table.index(name, "the template")
    ids = custom_ids(table, key)
    orders: list[Order] = [_rest(table, template, key)] * len(table.rows)
    in_order, given = _minimum(table, template, orders)
    slot, whole = _slot(table, template, orders)
    minimum = given
    if mode == "auto" and len(orders[0]) > 1:
        for made in _arranged(table, template, orders[0]):
            made_in_order, cost = _minimum(table, template, made)
            if cost < minimum:
                orders = made
                in_order = made_in_order
                minimum = cost
    if mode == "given" or rows == "table":
        in_order = [*range(len(table.rows))]
    saving = Saving(len(table.rows), whole, slot, given, minimum, _counted(table, orders))
    return JobLayout(saving, table, template, ids, orders, in_order, body or {})


def _rest(table: Table, template: JobTemplate, key: str | None) -> Order:
    """The columns in `{*}`: those that the template does not name, without the key column."""
    if template.rest_in is None:
        return ()
    named = {*template.names, key}
    return tuple(index for index, column in enumerate(table.columns) if column not in named)


def _arranged(table: Table, template: JobTemplate, columns: Order) -> Iterator[list[Order]]:
    """Yield candidates: a column order for every row."""
    cells = list[list[int]]()
    weights = list[int]()
    for column in columns:
        numbers: dict[str, int] = {}
        first = len(weights)
        name = f"{table.columns[column]}: "
        cells.append([numbers.setdefault(row[column], first + len(numbers)) for row in table.rows])
        weights += [len(f"{name}{value}\n".encode()) for value in numbers]
    groups: dict[str, list[int]] = {}
    for row in range(len(table.rows)):
        groups.setdefault(_before(table, template, row), []).append(row)
    shared: dict[Order, Order] = {}  # many rows have the same order: store it once
    for split in (by_value, by_column):
        orders = arrange(cells, weights, [*groups.values()], split)
        yield [shared.setdefault(order, tuple(columns[index] for index in order)) for order in orders]


def _before(table: Table, template: JobTemplate, row: int) -> str:
    """The values before `{*}` in a row's prompt; only rows with equal ones can share what follows."""
    pieces = [*(template.system or ()), *template.user]
    before = pieces[: pieces.index(Field(REST))]
    return "\0".join(_value(table, row, piece, ()) for piece in before if isinstance(piece, Field))


def _written(table: Table, template: JobTemplate, row: int, order: Order) -> tuple[str | None, str]:
    """The system and the user message of one row."""
    system = template.system
    return (
        None if system is None else "".join([_value(table, row, piece, order) for piece in system]),
        "".join([_value(table, row, piece, order) for piece in template.user]),
    )


def _value(table: Table, row: int, piece: TemplatePiece, order: Order) -> str:
    if isinstance(piece, str):
        return piece
    cells = table.rows[row]
    if piece.name == REST:
        return "\n".join([f"{table.columns[column]}: {cells[column]}" for column in order])
    return cells[table.columns.index(piece.name)]


def _prompt(table: Table, template: JobTemplate, row: int, order: Order) -> bytes:
    system, user = _written(table, template, row, order)
    return (user if system is None else f"{system}\n{user}").encode()


def _minimum(table: Table, template: JobTemplate, orders: Sequence[Order]) -> tuple[list[int], int]:
    """Rows sorted by prompt, and the bytes to compute if every shared prefix is computed once."""
    texts = [_prompt(table, template, row, order) for row, order in enumerate(orders)]
    in_order = sorted(range(len(texts)), key=texts.__getitem__)
    cost = len(texts[in_order[0]])
    for before, row in pairwise(in_order):
        cost += len(texts[row]) - common_length(texts[before], texts[row])
    return in_order, cost


def _slot(table: Table, template: JobTemplate, orders: Sequence[Order]) -> tuple[int, int]:
    """Bytes that one slot computes in table order, and the bytes of all prompts."""
    computed = 0
    whole = 0
    before = b""
    for row, order in enumerate(orders):
        text = _prompt(table, template, row, order)
        computed += len(text) - common_length(before, text)
        whole += len(text)
        before = text
    return computed, whole


def _counted(table: Table, orders: Sequence[Order]) -> tuple[tuple[tuple[str, ...], int], ...]:
    names = Counter(orders).most_common()
    return tuple((tuple(table.columns[column] for column in order), count) for order, count in names)
