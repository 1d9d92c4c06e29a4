"""Prompts read from files, and their batch lines."""

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from tokenmill.errors import UsageError
from tokenmill.recipes.distillation.prompts import (
    DistillOptions,
    DistillPrompts,
    TeacherPrompt,
    bodies,
    check_prompts,
    seed_of,
)

USER = {"role": "user", "content": "Why?"}


def file(folder: Path, *rows: Mapping[str, Any] | str, name: str = "prompts.jsonl") -> Path:
    path = folder / name
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


@pytest.mark.parametrize(
    ("row", "id", "messages", "own"),
    [
        ({"prompt": "Why?"}, "prompt-1", [USER], {}),
        ({"text": "Why?", "source": "web"}, "prompt-1", [USER], {}),
        ({"id": 7, "question": "Why?"}, "7", [USER], {}),
        ({"custom_id": "a", "prompt": "Why?", "max_tokens": 9, "model": "x"}, "a", [USER], {"max_tokens": 9}),
        (
            {"messages": [{"role": "system", "content": "Be brief."}, USER]},
            "prompt-1",
            [{"role": "system", "content": "Be brief."}, USER],
            {},
        ),
        ({"messages": json.dumps([USER])}, "prompt-1", [USER], {}),  # as in Parquet
        (
            {
                "custom_id": "b",
                "method": "POST",
                "url": "/v1/chat/completions",
                "body": {"model": "m", "messages": [USER], "temperature": 0.2},
            },
            "b",
            [USER],
            {"temperature": 0.2},
        ),
    ],
)
def test_rows(tmp_path: Path, row: dict[str, Any], id: str, messages: list[Any], own: dict[str, Any]) -> None:
    (found,) = DistillPrompts(file(tmp_path, row))
    assert found == TeacherPrompt(id, tuple(messages), own)


def test_a_column_and_a_system_message(tmp_path: Path) -> None:
    path = file(tmp_path, "q,topic", "Why?,sky", name="prompts.csv")
    (found,) = DistillPrompts(path, "q", "Be brief.")
    assert found.messages == ({"role": "system", "content": "Be brief."}, USER)
    own = file(tmp_path, {"messages": [{"role": "developer", "content": "Rhyme."}, USER]})
    (kept,) = DistillPrompts(own, None, "Be brief.")
    assert [message["content"] for message in kept.messages] == ["Rhyme.", "Why?"]


@pytest.mark.parametrize(
    ("rows", "named"),
    [
        ([], "prompts.jsonl"),
        (["[1]"], "line 1"),
        ([{"topic": "sky"}], "topic"),
        ([{"prompt": "a"}, {"prompt": ""}], "line 2"),
        ([{"prompt": 5}], "messages[0]"),
        ([{"id": "a", "prompt": "x"}, {"id": "a", "prompt": "y"}], "lines 1 and 2"),
        ([{"messages": [USER, {"role": "assistant", "content": "Because."}]}], "assistant"),
        ([{"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}]}]}], "messages[0]"),
        ([{"messages": [{"role": "tool", "content": "x"}]}], "messages[0]"),
        ([{"messages": [USER], "tools": []}], "tools"),
        ([{"messages": [USER], "top_logprobs": 3}], "top_logprobs"),
        ([{"method": "POST", "url": "/v1/completions", "body": {"prompt": "x"}}], "/v1/chat/completions"),
        ([{"messages": [USER], "temprature": 1}], "temprature"),
        ([{"messages": [USER], "temperature": "hot"}], "temperature"),
        ([{"id": "x" * 600, "prompt": "x"}], "x" * 40),
    ],
)
def test_an_invalid_file_is_refused(tmp_path: Path, rows: Sequence[Any], named: str) -> None:
    with pytest.raises(UsageError) as refused:
        check_prompts(DistillPrompts(file(tmp_path, *rows)), DistillOptions())
    assert named in f"{refused.value.message} {refused.value.hint}"


def test_a_changed_missing_or_irregular_file_is_refused(tmp_path: Path) -> None:
    prompts = DistillPrompts(file(tmp_path, {"prompt": "a"}))
    assert check_prompts(prompts, DistillOptions()) == 1
    file(tmp_path, {"prompt": "a"}, {"prompt": "b"})
    with pytest.raises(UsageError, match="prompts.jsonl"):
        list(prompts)
    with pytest.raises(UsageError, match="none.jsonl"):
        list(DistillPrompts(tmp_path / "none.jsonl"))
    with pytest.raises(UsageError, match=re.escape(str(tmp_path))):
        list(DistillPrompts(tmp_path))


def test_the_example_can_be_run() -> None:
    prompts = DistillPrompts(Path(__file__).parents[3] / "examples" / "distill" / "prompts.jsonl")
    assert check_prompts(prompts, DistillOptions(samples=2)) == 10


def test_one_sample_is_greedy_and_has_no_seed() -> None:
    (line,) = bodies(TeacherPrompt("a", (USER,)), DistillOptions(max_tokens=10, top_logprobs=3))
    assert line == {
        "custom_id": "a/0",
        "method": "POST",
        "url": "/v1/chat/completions",
        "body": {"messages": [USER], "max_tokens": 10, "temperature": 0.0, "logprobs": True, "top_logprobs": 3},
    }


def test_each_sample_has_its_own_seed() -> None:
    first = list(bodies(TeacherPrompt("a", (USER,)), DistillOptions(samples=4, top_logprobs=None)))
    assert [line["custom_id"] for line in first] == ["a/0", "a/1", "a/2", "a/3"]
    assert {line["body"]["temperature"] for line in first} == {0.7}
    assert all("logprobs" not in line["body"] for line in first)
    seeds = [line["body"]["seed"] for line in first]
    assert len(set(seeds)) == 4
    moved = [line["body"]["seed"] for line in bodies(TeacherPrompt("elsewhere", (USER,)), DistillOptions(samples=6))]
    assert moved[:4] == seeds  # from the content, not from the position or the number of samples
    assert seed_of(TeacherPrompt("a", ({"role": "user", "content": "Why not?"},)), 0, 0) != seeds[0]
    assert [
        line["body"]["seed"] for line in bodies(TeacherPrompt("a", (USER,)), DistillOptions(samples=4, seed=1))
    ] != seeds


def test_keys_of_a_line_override_the_options() -> None:
    own = {"temperature": 0.3, "max_completion_tokens": 7, "seed": 5}
    (line,) = bodies(TeacherPrompt("a", (USER,), own), DistillOptions(stop=("END",), body={"min_p": 0.1}))
    body = line["body"]
    assert (body["temperature"], body["max_completion_tokens"], body["min_p"]) == (0.3, 7, 0.1)
    assert "max_tokens" not in body
    assert body["stop"] == ["END"]
    assert body["seed"] == seed_of(TeacherPrompt("a", (USER,)), 0, 5)


def test_several_samples_at_temperature_zero_are_refused() -> None:
    with pytest.raises(UsageError, match="temperature 0"):
        list(bodies(TeacherPrompt("a", (USER,), {"temperature": 0}), DistillOptions(samples=2)))
