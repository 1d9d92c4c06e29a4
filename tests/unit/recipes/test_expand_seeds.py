"""Seeds of every shape, read and written back, and invalid files."""

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
def test_columns_determine_the_shape(
    tmp_path: Path, row: dict[str, Any], example: Example, parts: tuple[str, ...]
) -> None:
    found = seeds(tmp_path, row)
    (parent,) = found.parents
    assert parent.example == example
    assert found.shape.parts == parts
    written = found.shape.row(example)
    assert written == {key: row[key] for key in written}
    assert set(found.shape.types) == set(written) == {name for name in row if name != "id"}


def test_columns_can_be_given(tmp_path: Path) -> None:
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
def test_ids_of_rows_are_used_if_they_are_unique(tmp_path: Path, ids: list[Any], names: list[str]) -> None:
    found = seeds(tmp_path, *({"id": name, "text": str(at)} for at, name in enumerate(ids)))
    assert [parent.id for parent in found.parents] == names
    assert [parent.root for parent in found.parents] == names


@pytest.mark.parametrize(
    ("rows", "how", "message", "hint"),
    [
        ([{"a": "x", "b": "y"}], {}, "a, b", "--column"),
        ([{"a": "x", "b": "y"}], {"column": "c"}, "--column: .*'c'", "a, b"),
        ([{"a": "x", "b": "y"}], {"column": "a", "answer_column": "c"}, "--answer-column: .*'c'", "a, b"),
        ([{"a": "x"}], {"answer_column": "a"}, "needs --column", "--column"),
        ([{"a": "x"}], {"column": "a", "answer_column": "a"}, "'a'", ""),
        ([{"text": "x"}], {"carry": ["y"]}, "--carry: .*'y'", "text"),
        ([{"text": "x"}], {"carry": ["text"]}, "--carry .*'text'", "--carry"),
        ([{"text": "x"}, {"text": " "}], {}, "row 2 of .* text", ""),
        ([{"messages": "no"}], {}, "row 1 of .*'messages'", "content"),
        ([{"messages": [{"role": "user"}]}], {}, "row 1 of .*'messages'", "content"),
        ([{"messages": CHAT[:1]}], {}, "row 1 of .*'messages'", ""),
        ([{"messages": [*CHAT, CHAT[-1]]}], {}, "row 1 of .*2 messages", ""),
        ([{"messages": [CHAT[1], CHAT[0]]}], {}, "row 1 of .*1 messages", ""),
    ],
)
def test_invalid_seeds_are_refused(
    tmp_path: Path, rows: list[dict[str, Any]], how: dict[str, Any], message: str, hint: str | None
) -> None:
    with pytest.raises(UsageError, match=message) as caught:
        seeds(tmp_path, *rows, **how)
    assert (hint or "") in (caught.value.hint or "")


def test_an_empty_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="seeds"):
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
