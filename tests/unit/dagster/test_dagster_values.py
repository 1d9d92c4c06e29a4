"""Pure functions of dagster-tokenmill: keys, order of results, paths, metadata, checks, cursors."""

import io
import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import dagster as dg
import dagster_tokenmill
import pytest
from dagster_tokenmill import TokenmillResource, batch_asset, finished_batches_sensor
from dagster_tokenmill.assets import row_of
from dagster_tokenmill.batch import Batch, KeyedFile, Usage, batch_of, in_order
from dagster_tokenmill.checks import checks_for, counted, judged, repeated
from dagster_tokenmill.errors import BatchExpired, GatewayRefused, GatewayUnavailable
from dagster_tokenmill.facts import facts_of
from dagster_tokenmill.paths import check_template, path_for, plain
from dagster_tokenmill.resource import failure
from dagster_tokenmill.runner import RunBatch
from dagster_tokenmill.sensor import Cursor, parse_cursor
from dagster_tokenmill.source import file_of, key_of, reader_of
from hypothesis import given
from hypothesis import strategies as st

from tokenmill.errors import TokenmillError, UsageError
from tokenmill.recipes.runner import Answered, AnswerOrigin, chat_line

BATCH = Batch("batch_1", "completed", 10, 9, 1, Usage(1000, 750, 300), 100, 103, 133, "file-o", "file-e", "m")
ORIGIN = AnswerOrigin("m", "m", "gateway, native", "b1")


def keyed(model: str | None, *scope: str, lines: list[dict[str, Any]]) -> tuple[str, bytes]:
    file = io.BytesIO()
    one = KeyedFile(file, model, *scope)
    for line in lines:
        one.add(line)
    return one.key, file.getvalue()


def test_equal_lines_have_equal_keys() -> None:
    lines = [chat_line("a", [{"role": "user", "content": "ü"}], seed=1), chat_line("b", [], max_tokens=3)]
    key, written = keyed("m", "asset", "mon", lines=lines)
    assert keyed("m", "asset", "mon", lines=lines) == (key, written)
    others = [
        keyed("n", "asset", "mon", lines=lines),
        keyed("m", "asset", "tue", lines=lines),
        keyed("m", "assetmon", lines=lines),
        keyed("m", "asset", "mon", lines=lines[:1]),
        keyed("m", "asset", "mon", lines=lines[::-1]),
    ]
    assert len({key, *(other for other, _ in others)}) == 6
    first, second = map(json.loads, written.decode().splitlines())
    assert first == {**lines[0], "body": {"model": "m", **lines[0]["body"]}}
    assert second["body"]["model"] == "m"


def test_a_line_keeps_its_model_and_a_lone_surrogate_is_written() -> None:
    line = {"custom_id": "\ud800", "url": "u", "body": {"model": "own"}}
    _, written = keyed("m", lines=[line])
    assert json.loads(written) == line


@given(st.lists(st.sampled_from("oex"), max_size=30))
def test_results_of_two_files_come_in_the_order_of_lines(kinds: list[str]) -> None:
    names = [f"l{number}" for number in range(len(kinds))]

    def file(kind: str) -> Iterator[Mapping[str, Any]]:
        return iter([{"custom_id": name, "of": kind} for name, one in zip(names, kinds, strict=True) if one == kind])

    found = [(line["custom_id"], line["of"]) for line in in_order(iter(names), file("o"), file("e"))]
    assert found == [(name, kind) for name, kind in zip(names, kinds, strict=True) if kind != "x"]


def test_batch_of_a_gateway_response() -> None:
    body = {
        "id": "batch_1",
        "status": "failed",
        "created_at": 5,
        "request_counts": {"total": 0, "completed": 0, "failed": 0},
        "usage": None,
        "metadata": None,
        "failed_at": 9,
        "errors": {"data": [{"code": "x", "line": 3, "message": "bad", "param": None}, {"message": "worse"}]},
    }
    batch = batch_of(body)
    assert (batch.errors, batch.usage, batch.metadata) == (("line 3: bad", "worse"), Usage(), {})
    assert (batch.final, batch.seconds, batch.ended_s) == (True, None, 9)
    assert BATCH.seconds == 30


@given(st.text(min_size=1), st.text(min_size=1))
def test_partition_names_become_file_names(one: str, other: str) -> None:
    if any(0xD800 <= ord(character) < 0xE000 for character in one + other):
        return
    name = plain(one)
    assert "/" not in name
    assert name not in (".", "..")
    assert (name == plain(other)) == (one == other)


@pytest.mark.parametrize(
    ("template", "partitioned", "named"),
    [
        ("a/{partition}.parquet", True, None),
        ("a/{asset}.jsonl", False, None),
        ("a.parquet", True, "{partition}"),
        ("{partition}.parquet", False, "partitions_def"),
        ("{night}.parquet", True, "{night}"),
        ("{partition.parquet", True, "expected '}'"),
        ("{partition}.csv", True, ".parquet"),
    ],
)
def test_templates(template: str, partitioned: bool, named: str | None) -> None:
    if named is None:
        check_template(template, partitioned=partitioned)
        return
    with pytest.raises(UsageError) as refused:
        batch_asset(
            "a", path=template, lines="b", partitions_def=dg.StaticPartitionsDefinition(["x"]) if partitioned else None
        )
    assert template in refused.value.message
    assert named in f"{refused.value.message} {refused.value.hint}"


def test_the_folder_of_a_path_is_created(tmp_path: Path) -> None:
    path = path_for(str(tmp_path / "{asset}" / "{partition}.jsonl"), asset="a/b", partition="..")
    assert path == tmp_path / "a%2Fb" / "%2E%2E.jsonl"
    assert path.parent.is_dir()


def facts(batches: list[RunBatch], cost: float | None = None) -> dict[str, Any]:
    made = facts_of(
        batches,
        ORIGIN,
        end="finished",
        page="http://p/",
        batch_url=lambda name: f"http://p/{name}",
        cost_per_hour=cost,
        currency="EUR",
    )
    return {name: value.value for name, value in made.items()}


def test_figures_of_a_materialisation() -> None:
    second = replace(BATCH, id="batch_2", usage=Usage(0, 0, 60), ended_s=163)
    found = facts(
        [RunBatch("write", BATCH, attached=True, end="finished"), RunBatch("judge", second, False, "finished")], 1.2
    )
    assert (found["prompt tokens"], found["cached tokens"], found["generated tokens"]) == (1000, 750, 360)
    assert (found["reuse %"], found["seconds"], found["generated tok/s"]) == (75.0, 90, 4.0)
    assert found["cost EUR"] == 0.03
    assert (found["batches"], found["re-attached"]) == (["batch_1", "batch_2"], ["batch_1"])
    assert (found["batch"], found["batch 2"], found["page"]) == ("http://p/batch_1", "http://p/batch_2", "http://p/")


def test_unknown_figures_are_left_out() -> None:
    found = facts([])
    assert not {"reuse %", "generated tok/s", "cost EUR", "batch"} & set(found)


def test_rows_of_answers() -> None:
    chat = {"choices": [{"message": {"content": "x"}, "finish_reason": "stop"}], "usage": {"prompt_tokens": 1}}
    assert row_of(Answered("a", chat))["text"] == "x"
    assert row_of(Answered("a", {"choices": [{"text": "y"}]}))["text"] == "y"
    failed = row_of(Answered("a", None, "too_long", "by 3"))
    assert (failed["text"], failed["error_code"], failed["error_message"]) == (None, "too_long", "by 3")


ROWS = [{"text": "Hello  World"}, {"text": "hello world"}, {"text": ""}, {"text": '{"a": 1}'}]


@pytest.mark.parametrize(
    ("result", "passed", "counts"),
    [
        (counted(iter(ROWS), 4, None), True, "4 rows, 4 to any expected"),
        (counted(iter(ROWS), None, 3), False, "4 rows, any to 3 expected"),
        (repeated(iter(ROWS), ("text",), 0.25, None), True, "1 of 4 rows"),
        (repeated(iter(ROWS), ("text",), 0.24, None), False, "1 of 4 rows"),
        (repeated(iter([]), ("text",), 0.0, None), True, "0 of 0 rows"),
        (judged(iter(ROWS), lambda row: bool(row["text"]), 0.0), False, "1 of 4 rows"),
        (judged(iter(ROWS), lambda _: None, 0.0), True, "0 of 4"),
    ],
)
def test_checks(result: dg.AssetCheckResult, passed: bool, counts: str) -> None:
    assert result.passed is passed
    assert counts in (result.description or "")


def test_near_duplicates() -> None:
    text = "the quick brown fox jumps over the lazy dog and runs far away into the dark green wood"
    rows = [{"text": text}, {"text": f"{text} again"}]
    assert repeated(iter(rows), ("text",), 0.0, None).passed
    near = repeated(iter(rows), ("text",), 0.0, 0.7)
    assert not near.passed
    assert near.metadata["found"].value == ["row 2 repeats row 1"]


def test_a_check_for_every_condition() -> None:
    assert checks_for("a") == []
    made = checks_for("a", rows=(1, 2), duplicates_at_most=0.1, valid={"text": {"type": "object"}})
    assert sorted(key.name for one in made for key in one.check_keys) == ["duplicates", "row_count", "validity"]


def test_cursors() -> None:
    assert parse_cursor(Cursor("b", 5, ("a", "b")).text()) == Cursor("b", 5, ("a", "b"))


@pytest.mark.parametrize("wrong", [{}, {"target": "*", "asset": "a"}, {"asset": "a", "statuses": ("over",)}])
def test_sensors_that_could_never_report(wrong: dict[str, Any]) -> None:
    with pytest.raises(dg.DagsterInvalidDefinitionError, match=r"\bx\b"):
        finished_batches_sensor("x", **wrong)


@pytest.mark.parametrize("url", ["http://h:1", "http://h:1/", "http://h:1/v1", "http://h:1/v1/"])
def test_addresses(url: str) -> None:
    one = TokenmillResource(base_url=url, api_key="k")
    assert (one.address.url, one.page, one.batch_url("b")) == ("http://h:1", "http://h:1/", "http://h:1/v1/batches/b")
    with one.client() as client:
        assert client.headers["authorization"] == "Bearer k"


@pytest.mark.parametrize(
    ("error", "retried"),
    [
        (GatewayUnavailable("x"), True),
        (BatchExpired("x"), True),
        (GatewayRefused("x", status=400), False),
        (UsageError("x", hint="y"), False),
        (TokenmillError("x"), True),
    ],
)
def test_which_errors_are_retried(error: TokenmillError, retried: bool) -> None:
    made = failure(error)
    assert (made.description, made.allow_retries) == ("x", retried)
    assert made.metadata["code"].value == error.code
    assert ("hint" in made.metadata) == (error.hint is not None)


def test_the_readme_defines_what_dagster_can_load() -> None:
    text = (Path(dagster_tokenmill.__file__).parents[2] / "README.md").read_text(encoding="utf-8")
    names: dict[str, Any] = {}
    exec(text.split("```python\n")[1].split("```")[0], names)
    dg.Definitions.validate_loadable(names["defs"])
    assert names["answers"].op.pool == "tokenmill"


def test_sources(tmp_path: Path) -> None:
    ins, read = reader_of(Path("a/b.jsonl"), "lines", {"x": dg.AssetIn()})
    assert list(ins) == ["x"]
    with dg.build_asset_context() as context:
        assert read(context, {}) == Path("a/b.jsonl")
    with dg.build_asset_context(partition_key="m/t") as context:
        assert reader_of(Path("a/{partition}.jsonl"), "lines", None)[1](context, {}) == Path("a/m%2Ft.jsonl")
        assert reader_of(lambda _, x: [x], "lines", None)[1](context, {"x": 5}) == [5]
        assert reader_of("up", "lines", None)[1](context, {"lines": 7}) == 7
    assert reader_of(["a", "b"], "lines", None)[0]["lines"].key == dg.AssetKey(["a", "b"])
    assert key_of(dg.AssetSpec("c")) == dg.AssetKey("c")
    assert file_of("x.parquet", tmp_path, "seeds") == Path("x.parquet")
    assert file_of([{"a": "ü"}], tmp_path, "seeds").read_text(encoding="utf-8") == '{"a": "ü"}\n'
    with pytest.raises(UsageError, match="seeds"):
        file_of([{"a": object()}], tmp_path, "seeds")
