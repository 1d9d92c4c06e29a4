"""A teacher's table from scripted answers: rows, counts, resumed runs."""

import asyncio
import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow.parquet as parquet
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenmill.engine.engine import Answer, TokenLogprob, Usage
from tokenmill.jobs.openai.answers import answer_body
from tokenmill.recipes.distillation.prompts import DistillOptions, DistillPrompts
from tokenmill.recipes.distillation.recipe import Distilled, distill, prospect_of
from tokenmill.recipes.distillation.rows import COLUMNS, Thinking, rounded, split_answer, tokens_of
from tokenmill.recipes.runner import Answered, AnswerOrigin, Line, RecipeCost, RecipeEnd

ORIGIN = AnswerOrigin("tiny", "sha256:1", "native", "build 7")


@dataclass
class Stage:
    end: RecipeEnd
    total: int
    found: list[Answered]

    def answers(self) -> Iterator[Answered]:
        return iter(self.found)


@dataclass
class Scripted:
    """A runner with given answers; other lines stay unanswered."""

    replies: Mapping[str, Any]  # custom_id -> response body, or error code
    end: RecipeEnd = "finished"
    asked: list[Line] = field(default_factory=list)
    origin: AnswerOrigin = ORIGIN
    spent: RecipeCost = field(default_factory=RecipeCost)

    async def run(self, stage: str, lines: Iterable[Line]) -> Stage:
        self.asked = list(lines)
        found = []
        for line in self.asked:
            name = line["custom_id"]
            reply = self.replies.get(name)
            if isinstance(reply, str):
                found.append(Answered(name, None, reply, f"{stage}: {reply}"))
            elif reply is not None:
                found.append(Answered(name, reply))
        return Stage(self.end, len(self.asked), found)


def entry(text: str, number: int | None, logprob: float, *top: dict[str, Any]) -> dict[str, Any]:
    made: dict[str, Any] = {"token": text, "logprob": logprob, "bytes": list(text.encode()), "top_logprobs": list(top)}
    return made if number is None else made | {"id": number}


def body(content: str | None, finish: str = "stop", *entries: dict[str, Any], **message: Any) -> dict[str, Any]:
    logprobs = {"content": list(entries), "refusal": None} if entries else None
    return {
        "choices": [
            {
                "index": 0,
                "finish_reason": finish,
                "logprobs": logprobs,
                "message": {"role": "assistant", "content": content, **message},
            }
        ],
        "usage": {"prompt_tokens": 11, "completion_tokens": 3, "total_tokens": 14},
    }


def prompts(folder: Path, *texts: str, **own: Any) -> DistillPrompts:
    path = folder / "prompts.jsonl"
    path.write_text("".join(json.dumps({"id": text, "prompt": f"{text}?", **own}) + "\n" for text in texts))
    return DistillPrompts(path)


def taught(
    runner: Scripted, source: DistillPrompts, output: Path, ask: DistillOptions | None = None, **how: Any
) -> Distilled:
    return asyncio.run(distill(runner, source, ask or DistillOptions(), output, **how))


def test_a_row_has_all_columns(tmp_path: Path) -> None:
    top = (entry("Bl", 5, -0.25), entry("Gr", 6, -2.0))
    reply = body("Blue.", "stop", entry("Bl", 5, -0.25, *top), entry("ue.", 9, -0.125, entry("ue.", 9, -0.125)))
    output = tmp_path / "teacher.parquet"
    found = taught(
        Scripted({"sky/0": reply}), prompts(tmp_path, "sky"), output, DistillOptions(max_tokens=50, top_p=0.9)
    )
    assert (found.rows, found.asked, found.failed, found.waiting, found.end) == (1, 1, 0, 0, "finished")
    (row,) = parquet.read_table(output).to_pylist()
    assert list(row) == list(COLUMNS)
    assert row == {
        "id": "sky/0",
        "prompt_id": "sky",
        "sample": 0,
        "messages": '[{"role":"user","content":"sky?"}]',
        "answer": "Blue.",
        "reasoning": None,
        "finish_reason": "stop",
        "token_ids": [5, 9],
        "logprobs": [-0.25, -0.125],
        "top_ids": [[5, 6], [9]],
        "top_logprobs": [[-0.25, -2.0], [-0.125]],
        "prompt_tokens": 11,
        "completion_tokens": 3,
        "model": "tiny",
        "model_id": "sha256:1",
        "engine": "native",
        "build": "build 7",
        "temperature": 0.0,
        "top_p": 0.9,
        "seed": None,
        "max_tokens": 50,
    }
    assert parquet.read_schema(output).metadata[b"tokenmill.recipe"] == b"distill"
    assert parquet.ParquetFile(output).metadata.row_group(0).column(0).compression == "ZSTD"


def test_samples_are_in_order_and_failures_are_counted(tmp_path: Path) -> None:
    replies = {"a/0": body("1"), "a/1": "too_long", "b/0": body("3", "length"), "b/1": body(None)}
    output = tmp_path / "teacher.jsonl"
    found = taught(Scripted(replies), prompts(tmp_path, "a", "b", "c"), output, DistillOptions(samples=2))
    rows = [json.loads(line) for line in output.read_text().splitlines()]
    assert [(row["id"], row["prompt_id"], row["sample"]) for row in rows] == [("a/0", "a", 0), ("b/0", "b", 0)]
    assert rows[0]["messages"] == [{"role": "user", "content": "a?"}]
    assert rows[0]["seed"] is not None
    assert (found.asked, found.rows, found.failed, found.waiting, found.cut) == (6, 2, 2, 2, 1)
    assert found.failures == {"no_text": 1, "too_long": 1}
    assert found.messages[0] == "a/1: teach: too_long"


def test_equal_answers_give_equal_bytes_after_an_interrupted_run(tmp_path: Path) -> None:
    every = {f"{name}/0": body(name, "stop", entry(name, 3, -0.5)) for name in "abc"}
    source, output, other = prompts(tmp_path, *"abc"), tmp_path / "teacher.parquet", tmp_path / "other.parquet"
    part = taught(Scripted({"b/0": every["b/0"]}, "tokens"), source, output)
    assert (part.end, part.rows, part.waiting) == ("tokens", 1, 2)
    first, again = Scripted(every), Scripted(every)
    taught(first, source, output)
    taught(again, source, other)
    assert first.asked == again.asked
    assert output.read_bytes() == other.read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["other.parquet", "prompts.jsonl", "teacher.parquet"]


def test_missing_ids_are_null_and_counted(tmp_path: Path) -> None:
    reply = body("ab", "stop", entry("a", 1, -0.5, entry("a", None, -0.5)), entry("b", None, -0.5))
    output = tmp_path / "teacher.parquet"
    found = taught(Scripted({"x/0": reply}), prompts(tmp_path, "x"), output)
    (row,) = parquet.read_table(output).to_pylist()
    assert found.without_ids == 1
    assert (row["token_ids"], row["top_ids"], row["logprobs"]) == (None, None, [-0.5, -0.5])


def test_response_bodies_of_the_native_engine_have_ids() -> None:
    told = TokenLogprob("a", 7, -0.5, b"a", (TokenLogprob("a", 7, -0.5, b"a"), TokenLogprob("b", 8, -1.0, b"b")))
    silent = TokenLogprob("a", None, -0.5, b"a")
    for token, ids, tops in ((told, [7], [[7, 8]]), (silent, None, None)):
        made = answer_body(
            "chat", Answer("a", "stop", Usage(1, 1, None), logprobs=(token,)), id="x", model="m", created_s=1
        )
        found = tokens_of(made)
        assert (found.ids, found.top_ids, found.logprobs, found.text) == (ids, tops, [-0.5], "a")


def test_without_probabilities_there_are_no_tokens() -> None:
    assert tokens_of(body("x")).ids is None
    chosen = tokens_of(body("x", "stop", entry("x", 1, -0.5)))
    assert (chosen.ids, chosen.top_ids, chosen.top_logprobs) == ([1], None, None)


@pytest.mark.parametrize(
    ("thinking", "reply", "answer", "reasoning"),
    [
        ("auto", body("<think>hm</think>Yes."), "Yes.", "hm"),
        ("off", body("<think>hm</think>Yes."), "<think>hm</think>Yes.", None),
        ("auto", body("Yes.", reasoning_content="hm\n"), "Yes.", "hm"),
        ("off", body("Yes.", reasoning_content="hm"), "Yes.", "hm"),
        ("auto", body(None, "length", reasoning_content="hm"), "", "hm"),
        ("auto", body("half a thought", "length"), "half a thought", None),
        ("opened", body("half a thought", "length"), "", "half a thought"),
    ],
)
def test_reasoning(thinking: Thinking, reply: dict[str, Any], answer: str, reasoning: str | None) -> None:
    found = split_answer(reply, tokens_of(reply), thinking=thinking, opened=False)
    assert found is not None
    assert (found.answer, found.reasoning) == (answer, reasoning)


def test_tags_that_are_control_tokens_are_found_in_the_tokens() -> None:
    """gpt-oss: text without control tokens lacks the tags; a stop text is not in the answer."""
    written = (
        "<|channel|>",
        "analysis",
        "<|message|>",
        "hm",
        "<|end|>",
        "<|start|>",
        "assistant",
        "<|channel|>",
        "final",
        "<|message|>",
        "Yes",
        ". END",
    )
    entries = [entry(text, number, -0.5) for number, text in enumerate(written)]
    reply = body("analysishmassistantfinalYes. ", "stop", *entries)
    found = split_answer(reply, tokens_of(reply), thinking="auto", opened=False)
    assert found is not None
    assert (found.answer, found.reasoning) == ("Yes.", "hm")


def test_other_answers_show_that_the_template_opens_the_reasoning(tmp_path: Path) -> None:
    replies = {"a/0": body("never done", "length"), "b/0": body("hm</think>Yes."), "c/0": body("No.")}
    output = tmp_path / "teacher.jsonl"
    found = taught(Scripted(replies), prompts(tmp_path, "a", "b", "c"), output)
    rows = [json.loads(line) for line in output.read_text().splitlines()]
    assert [(row["answer"], row["reasoning"]) for row in rows] == [("", "never done"), ("Yes.", "hm"), ("No.", None)]
    assert found.reasoned == 2
    silent = {"chat_template_kwargs": {"enable_thinking": False}}
    path = tmp_path / "prompts.jsonl"
    lines = [{"id": "a", "prompt": "a?", **silent}, {"id": "b", "prompt": "b?"}]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    taught(Scripted(replies), DistillPrompts(path), output)
    assert json.loads(output.read_text().splitlines()[0])["reasoning"] is None  # another template option


@given(st.floats(min_value=-10_000, max_value=0))
def test_rounding_error_is_at_most_one_in_2048(value: float) -> None:
    assert math.isclose(rounded(value), value, rel_tol=1 / 2048)
    assert rounded(rounded(value)) == rounded(value)


def test_a_forecast_has_all_lines_or_an_even_sample(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    few = prospect_of(prompts(tmp_path, "a", "b"), DistillOptions(samples=3, max_tokens=100, top_logprobs=20))
    assert (few.rows, few.stages[0].jobs, len(few.stages[0].lines), few.stages[0].output_tokens) == (6, 6, 6, 100)
    assert "temperature 0.7" in few.notes[0]
    every = prompts(tmp_path, *map(str, range(2000)))
    assert len(prospect_of(every, DistillOptions(samples=2)).stages[0].lines) == 4000
    monkeypatch.setattr("tokenmill.recipes.distillation.recipe.MAX_LINES", 3999)
    many = prospect_of(every, DistillOptions(samples=2))
    (stage,) = many.stages
    assert stage.jobs == 4000
    assert 900 <= len(stage.lines) <= 1100
    names = [line["custom_id"] for line in stage.lines]
    assert names[:4] == ["0/0", "0/1", "4/0", "4/1"]  # samples of one prompt are adjacent, because they share it


def test_long_prompts_are_sampled_to_save_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tokenmill.recipes.distillation.recipe._MAX_CHARACTERS", 100)
    (stage,) = prospect_of(prompts(tmp_path, *map(str, range(2000))), DistillOptions()).stages
    assert (stage.jobs, len(stage.lines)) == (2000, 500)


def test_a_forecast_uses_the_max_tokens_of_lines(tmp_path: Path) -> None:
    path = tmp_path / "own.jsonl"
    path.write_text('{"prompt": "a", "max_tokens": 10}\n{"prompt": "b"}\n')
    found = prospect_of(DistillPrompts(path), DistillOptions(max_tokens=30, top_logprobs=4))
    assert "30 tokens" in (found.stages[0].assumed or "")
    assert "800 B" in found.notes[1]
