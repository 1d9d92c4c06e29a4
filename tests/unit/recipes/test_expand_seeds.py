"""Seeds of every shape, read and written back, and files that cannot be read."""

import json
from pathlib import Path
from typing import Any

import pytest

from tokenmill.errors import UsageError
from tokenmill.recipes.expansion.schema import read_schema
from tokenmill.recipes.expansion.seeds import Example, Seeds, read_seeds

CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hello"},
    {"role": "assistant", "content": "Good day."},
    {"role": "user", "content": "What is rye?"},
    {"role": "assistant", "content": "A grain."},
]


def seeds(tmp_path: Path, *rows: dict[str, Any], **how: Any) -> Seeds:
    path = tmp_path / "seeds.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return read_seeds(path, **how)


@pytest.mark.parametrize(
    ("row", "example", "parts"),
    [
        (
            {"instruction": "Add.", "input": "1, 2", "output": "3"},
            Example("Add.", "1, 2", "3"),
            ("instruction", "input", "output"),
        ),
        ({"instruction": "Add.", "input": "", "output": "3"}, Example("Add.", "", "3"), ("instruction", "output")),
        ({"prompt": "What?", "response": "That."}, Example("What?", "", "That."), ("instruction", "output")),
        ({"Question": "What?", "Answer": "That."}, Example("What?", "", "That."), ("instruction", "output")),
        ({"input": "What?", "output": "That."}, Example("What?", "", "That."), ("instruction", "output")),
        ({"text": "A text."}, Example(answer="A text."), ()),
        ({"id": 7, "poem": "Roses."}, Example(answer="Roses."), ()),
        ({"prompt": "What?"}, Example(answer="What?"), ()),
        (
            {"messages": CHAT},
            Example("What is rye?", "", "A grain.", tuple(CHAT[:3])),
            ("instruction", "output"),
        ),
        ({"messages": CHAT[:4]}, Example("What is rye?", "", "", tuple(CHAT[:3])), ("instruction",)),
        (
            {"conversations": [{"from": "human", "value": "What?"}, {"from": "gpt", "value": "That."}]},
            Example("What?", "", "That."),
            ("instruction", "output"),
        ),
    ],
)
def test_shapes_are_told_by_their_columns_and_written_back(
    tmp_path: Path, row: dict[str, Any], example: Example, parts: tuple[str, ...]
) -> None:
    found = seeds(tmp_path, row)
    (parent,) = found.parents
    assert parent.example == example
    assert found.shape.parts == parts
    written = found.shape.row(example)
    assert written == {key: row[key] for key in written}
    assert set(found.shape.types) == set(written) == {name for name in row if name != "id"}


def test_columns_can_be_said(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [
        {"q": "What?", "a": "That.", "topic": "x", "note": 1},
        {"q": "Who?", "a": "They.", "topic": "y"},
    ]
    found = seeds(tmp_path, *rows, column="q", answer_column="a", carry=["topic", "note"])
    assert [parent.example for parent in found.parents] == [Example("What?", "", "That."), Example("Who?", "", "They.")]
    assert found.parents[1].carried == {"topic": "y", "note": None}
    assert found.carried == {"topic": "string", "note": "json"}
    alone = seeds(tmp_path, *rows, column="a")
    assert alone.parents[0].example == Example(answer="That.")
    assert alone.shape.types == {"a": "string"}


def test_csv_and_messages_as_json_text(tmp_path: Path) -> None:
    path = tmp_path / "seeds.csv"
    text = json.dumps(CHAT[3:]).replace('"', '""')
    path.write_text(f'id,messages\nfirst,"{text}"\n')
    (parent,) = read_seeds(path).parents
    assert parent.example == Example("What is rye?", "", "A grain.")
    assert parent.id == "first"


@pytest.mark.parametrize(
    ("ids", "names"),
    [
        (["a", "b"], ["a", "b"]),
        ([1, 2], ["1", "2"]),
        (["a", "a"], ["seed-1", "seed-2"]),
        (["a", None], ["seed-1", "seed-2"]),
        ([True, "x"], ["seed-1", "seed-2"]),
    ],
)
def test_ids_are_the_rows_own_where_they_can_be(tmp_path: Path, ids: list[Any], names: list[str]) -> None:
    found = seeds(tmp_path, *({"id": name, "text": str(at)} for at, name in enumerate(ids)))
    assert [parent.id for parent in found.parents] == names
    assert [parent.root for parent in found.parents] == names


@pytest.mark.parametrize(
    ("rows", "how", "message", "hint"),
    [
        ([{"a": "x", "b": "y"}], {}, "has the columns a, b", "--column NAME"),
        ([{"a": "x", "b": "y"}], {"column": "c"}, "--column names 'c'", "it has a, b"),
        ([{"a": "x", "b": "y"}], {"column": "a", "answer_column": "c"}, "--answer-column names 'c'", "it has a, b"),
        ([{"a": "x"}], {"answer_column": "a"}, "needs --column", "--column"),
        ([{"a": "x"}], {"column": "a", "answer_column": "a"}, "both name 'a'", "leave"),
        ([{"text": "x"}], {"carry": ["y"]}, "--carry names 'y'", "it has text"),
        ([{"text": "x"}], {"carry": ["text"]}, "written anew", None),
        ([{"text": "x"}, {"text": " "}], {}, "row 2 of .* is empty in text", "take the row out"),
        ([{"messages": "no"}], {}, "row 1 of .* no list of messages", "such as"),
        ([{"messages": [{"role": "user"}]}], {}, "no list of messages", "such as"),
        ([{"messages": CHAT[:1]}], {}, "no message of a user", "mend"),
        ([{"messages": [*CHAT, CHAT[-1]]}], {}, "followed by 2 messages", "tools"),
        ([{"messages": [CHAT[1], CHAT[0]]}], {}, "followed by 1 messages", "tools"),
    ],
)
def test_what_cannot_be_read_is_said(
    tmp_path: Path, rows: list[dict[str, Any]], how: dict[str, Any], message: str, hint: str | None
) -> None:
    with pytest.raises(UsageError, match=message) as caught:
        seeds(tmp_path, *rows, **how)
    assert (hint or "") in (caught.value.hint or "")


def test_an_empty_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no rows"):
        seeds(tmp_path)


def test_texts_get_a_column_for_their_instruction(tmp_path: Path) -> None:
    shape = seeds(tmp_path, {"text": "x"}).shape.with_task()
    assert shape.types == {"instruction": "string", "text": "string"}
    assert shape.row(Example("Ask.", "", "x")) == {"instruction": "Ask.", "text": "x"}
    assert shape.row(Example(answer="x")) == {"instruction": None, "text": "x"}
    named = seeds(tmp_path, {"instruction": "x"}).shape.with_task()
    assert named.types == {"task": "string", "instruction": "string"}
    pair = seeds(tmp_path, {"prompt": "x", "response": "y"}).shape
    assert pair.with_task() == pair


def test_the_examples_can_be_read() -> None:
    folder = Path(__file__).parents[3] / "examples" / "expand"
    assert read_seeds(folder / "seeds.jsonl").shape.parts == ("instruction", "input", "output")
    assert read_seeds(folder / "texts.csv").shape.types == {"text": "string"}
    assert read_schema(folder / "answer.schema.json")["required"] == ["answer", "certain"]
