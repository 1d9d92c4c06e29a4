"""Layouts share more, never less, and every row is asked about exactly as it is."""

import json
import random
import re
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenmill.jobs.column_order import arrange, by_column, by_value
from tokenmill.jobs.ingest.line import call_of
from tokenmill.jobs.layout import JobLayout, lay_out
from tokenmill.jobs.table import Table
from tokenmill.jobs.template import read_template

LISTED = read_template("Classify.\n{*}\nOne word.", "You are careful.")
CELLS = st.sampled_from(["a", "bb", "a long value that several rows have", "", "x\ny: z"])
TABLES = st.integers(1, 4).flatmap(
    lambda width: st.lists(st.tuples(*[CELLS] * width), min_size=1, max_size=12).map(
        lambda rows: Table("t", tuple(f"c{number}" for number in range(width)), tuple(rows))
    )
)


def prompts(layout: JobLayout) -> dict[str, str]:
    found = {}
    for line in layout:
        parsed = json.loads(line)
        found[parsed["custom_id"]] = "\n".join(message["content"] for message in parsed["messages"])
    return found


def least(texts: list[bytes]) -> int:
    total, before = 0, b""
    for text in sorted(texts):
        shared = next(
            (at for at, (a, b) in enumerate(zip(before, text, strict=False)) if a != b), min(len(before), len(text))
        )
        total, before = total + len(text) - shared, text
    return total


@given(TABLES)
def test_never_worse_than_given_and_counted_exactly(table: Table) -> None:
    layout = lay_out(table, LISTED)
    given_texts = [text.encode() for text in prompts(lay_out(table, LISTED, "given")).values()]
    texts = [text.encode() for text in prompts(layout).values()]
    assert layout.saving.given_bytes == least(given_texts)
    assert layout.saving.bytes == least(texts) <= layout.saving.given_bytes
    assert layout.saving.prompt_bytes == sum(map(len, texts)) == sum(map(len, given_texts))
    assert layout.saving.given_slot_bytes >= layout.saving.given_bytes


@given(TABLES)
def test_every_row_is_there_once_with_all_its_values(table: Table) -> None:
    layout = lay_out(table, LISTED)
    made = prompts(layout)
    assert set(made) == {f"row-{number}" for number in range(1, len(table.rows) + 1)}
    assert len(layout) == len(list(layout)) == len(table.rows)
    for number, row in enumerate(table.rows, 1):
        lines = [f"{column}: {value}" for column, value in zip(table.columns, row, strict=True)]
        text = made[f"row-{number}"]
        block = text.removeprefix("You are careful.\nClassify.\n").removesuffix("\nOne word.")
        assert len(block) == len("\n".join(lines))
        assert sorted(block) == sorted("\n".join(lines))
        assert all(line in block for line in lines)


@given(TABLES, st.sampled_from([by_value, by_column]), st.sampled_from([0, 5, 10**9]))
def test_orders_hold_every_column_once_even_without_time(table: Table, split: object, most_cells: int) -> None:
    numbers: dict[tuple[int, str], int] = {}
    columns = range(len(table.columns))
    cells = [[numbers.setdefault((column, row[column]), len(numbers)) for row in table.rows] for column in columns]
    weights = [len(value) + 1 for _, value in numbers]
    orders = arrange(cells, weights, [[*range(len(table.rows))]], split, most_cells)  # type: ignore[arg-type]
    assert orders
    assert all(sorted(order) == [*columns] for order in orders)


def test_a_value_that_rows_share_comes_first() -> None:
    policy = "The customer may return goods within thirty days, unopened. " * 4
    table = Table("t", ("id", "text", "policy"), tuple((str(n), f"question {n}", policy) for n in range(5)))
    layout = lay_out(table, LISTED)
    assert all("Classify.\npolicy: The customer" in text for text in prompts(layout).values())
    assert layout.saving.bytes < layout.saving.given_bytes / 3
    assert layout.saving.saved_bytes == layout.saving.given_bytes - layout.saving.bytes
    assert layout.saving.orders == ((("policy", "id", "text"), 5),)


def test_groups_may_have_different_orders() -> None:
    long, other = "shared by three " * 10, "shared by two " * 20
    rows = (("a", long, "1"), (other, "b", "2"), ("c", long, "3"), (other, "d", "4"), ("e", long, "5"))
    layout = lay_out(Table("t", ("x", "y", "z"), rows), LISTED)
    assert dict(layout.saving.orders) == {("y", "x", "z"): 3, ("x", "y", "z"): 2}


def test_neighbours_share_the_most_when_rows_may_move() -> None:
    table = Table("t", ("kind", "n"), tuple((("a" * 99, "b" * 99)[n % 2], str(n)) for n in range(6)))
    kinds = [json.loads(line)["messages"][1]["content"].split("kind: ")[1][0] for line in lay_out(table, LISTED)]
    assert kinds == ["a"] * 3 + ["b"] * 3
    in_place = [json.loads(line)["custom_id"] for line in lay_out(table, LISTED, rows="table")]
    assert in_place == [f"row-{number}" for number in range(1, 7)]


def test_columns_in_prose_stay_and_decide_what_can_be_shared() -> None:
    rows = tuple((("sales", "support")[n % 2], f"t{n}", "the same long note in every row") for n in range(4))
    layout = lay_out(Table("t", ("team", "text", "note"), rows), read_template("For {team}:\n{*}\nTeam again: {team}."))
    assert prompts(layout)["row-1"] == (
        "For sales:\nnote: the same long note in every row\ntext: t0\nTeam again: sales."
    )


@pytest.mark.parametrize("template", ["{a} and {b}", "Only {b}", "{*}"])
def test_where_nothing_can_be_chosen_rows_are_only_sorted(template: str) -> None:
    table = Table("t", ("a", "b"), (("x", "2"), ("y", "1"), ("x", "1")))
    saving = lay_out(table, read_template(template), key=None).saving
    assert saving.bytes <= saving.given_bytes <= saving.given_slot_bytes


def test_a_key_names_the_job_and_is_not_in_the_list() -> None:
    table = Table("t", ("sku", "text"), (("s-1", "a"), ("s-2", "b")))
    assert prompts(lay_out(table, read_template("{*}"), key="sku")) == {"s-1": "text: a", "s-2": "text: b"}
    assert prompts(lay_out(table, read_template("{sku}: {*}"), key="sku"))["s-1"] == "s-1: text: a"


def test_lines_are_jobs() -> None:
    table = Table("t", ("text",), (("é {x}",),))
    (line,) = lay_out(table, read_template("Say {text}"), body={"max_tokens": 7, "temperature": 0})
    call = call_of(line)
    assert call.values["max_tokens"] == 7
    assert call.values["messages"] == [{"role": "user", "content": "Say é {x}"}]


def test_the_saving_as_text() -> None:
    table = Table("t", ("n", "note"), tuple((str(n), "the same long note in every row " * 5) for n in range(9)))
    words = lay_out(table, LISTED).saving.as_text()
    assert len(re.findall(r"[0-9,]*[0-9]", words)) == 3  # row by row, given, chosen
    given_words = lay_out(table, read_template("{note} {n}")).saving.as_text()
    assert len(re.findall(r"[0-9,]*[0-9]", given_words)) == 2  # no better order


def test_large_tables_take_longer_in_proportion() -> None:
    def seconds(rows: int) -> float:
        rng = random.Random(1)
        cards = (2, 3, 10, 50, 300, 2000, rows)
        table = Table(
            "t",
            tuple(f"c{n}" for n in range(14)),
            tuple(tuple(f"value {rng.randrange(cards[n % 7])}" for n in range(14)) for _ in range(rows)),
        )
        start = time.process_time()
        lay_out(table, LISTED)
        return time.process_time() - start

    small = seconds(500)
    assert seconds(4000) < 8 * 4 * small + 1
