"""Converts answers into new examples and judge scores, or the reason for rejecting them. Pure."""

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal, NamedTuple

from tokenmill.recipes.expansion.lines import ExpansionJob
from tokenmill.recipes.expansion.prompts import PromptFile, shown, values_of
from tokenmill.recipes.expansion.schema import answer_schema, document, response_format, schema_error
from tokenmill.recipes.expansion.seeds import Example, Shape
from tokenmill.recipes.expansion.transforms import INSTRUCTION, Variant
from tokenmill.recipes.runner import Answered, Line, chat_line, finish_reason, text_of
from tokenmill.storage.json_text import compact_json

Why = Literal["failed", "invalid", "near-duplicate", "too low"]
CUT = "cut at max_tokens"
_THINKING = re.compile(r"\A\s*<think>.*?</think>", re.DOTALL)


class Dropped(NamedTuple):
    """Why a line was rejected."""

    why: Why
    reason: str  # details, for the user


def example_of(answer: Answered, job: ExpansionJob, shape: Shape, schema: dict[str, Any] | None) -> Example | Dropped:
    """The new example, or why it is rejected."""
    text = _written(answer)
    if isinstance(text, Dropped):
        return text
    old = job.parent.example
    if job.variant.way == INSTRUCTION:
        return replace(old, task=text, input="")
    wanted = answer_schema(shape, schema)
    return replace(old, answer=text) if wanted is None else _from_json(text, wanted, old, shape)


def _written(answer: Answered) -> str | Dropped:
    """The complete text of an answer."""
    text = text_of(answer)
    if text is None:
        return Dropped("failed", answer.message or answer.code or "no answer")
    if finish_reason(answer.body) == "length":
        return Dropped("invalid", CUT)
    text = _THINKING.sub("", text).strip()
    return text or Dropped("invalid", "empty")


def _from_json(text: str, wanted: Mapping[str, Any], old: Example, shape: Shape) -> Example | Dropped:
    try:
        value = document(text)
        error = schema_error(wanted, value)
    except ValueError:
        return Dropped("invalid", "not JSON")
    except RecursionError:
        return Dropped("invalid", "nested too deeply")
    if error is not None:
        return Dropped("invalid", error)
    if not shape.parts:
        return replace(old, answer=compact_json(value))
    return _of_parts(value, old)


def _of_parts(value: Mapping[str, Any], old: Example) -> Example | Dropped:
    texts = {part: one.strip() if isinstance(one, str) else compact_json(one) for part, one in value.items()}
    blank = next((part for part, text in texts.items() if not text and part != "input"), None)
    if blank is not None:
        return Dropped("invalid", f"{blank} is empty")
    return Example(texts["instruction"], texts.get("input", ""), texts.get("output", ""), old.before)


def compared(example: Example, *, task_alone: bool) -> str:
    """The text compared for near-duplicates."""
    parts = (example.task, example.input) if task_alone else (example.task, example.input, example.answer)
    return "\n".join(part for part in parts if part)


MAX_SCORE = 5
MAX_TOKENS = 64
_SCHEMA: Mapping[str, Any] = {
    "type": "object",
    # Score first, so that it survives a cut reason.
    "properties": {
        "score": {"type": "integer", "enum": list(range(1, MAX_SCORE + 1))},
        "reason": {"type": "string", "maxLength": 120},
    },
    "required": ["score"],
    "additionalProperties": False,
}
_SCORE_AT_START = re.compile(r'\s*\{\s*"score"\s*:\s*([1-5])\s*[,}]')


class JudgeScore(NamedTuple):
    """A score from 1 to 5 with its reason."""

    score: int
    reason: str | None


def judge_line(name: str, new: Example, old: Example, variant: Variant, prompt: PromptFile, shape: Shape) -> Line:
    """The line that requests a score, decoded greedily."""
    way = " ".join([variant.way, *variant.words.values()])
    values = {**values_of(new, shape), "original": shown(old, shape), "way": way}
    return chat_line(
        f"judge-{name}",
        prompt.messages(values),
        max_tokens=MAX_TOKENS,
        temperature=0.0,
        response_format=response_format("verdict", _SCHEMA),
    )


def verdict_of(answer: Answered) -> JudgeScore | None:
    """The judge's score; None if the answer has none."""
    text = text_of(answer)
    if text is None:
        return None
    try:
        value = document(text)
    except (ValueError, RecursionError):
        found = _SCORE_AT_START.match(text)
        return None if found is None else JudgeScore(int(found[1]), None)
    score, reason = (value.get("score"), value.get("reason")) if isinstance(value, dict) else (None, None)
    if not isinstance(score, int) or isinstance(score, bool) or not 1 <= score <= MAX_SCORE:
        return None
    return JudgeScore(score, reason if isinstance(reason, str) else None)
