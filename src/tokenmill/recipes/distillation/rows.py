"""Converts a teacher's answers to rows: text, reasoning, tokens with probabilities, provenance.

Token ids come only from the engine. Text is never tokenized again to obtain them, because several tokenizations can
have the same text and the model generated only one of them.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Literal

from tokenmill.engine.reasoning import SplitReasoning, has_reasoning, split_reasoning
from tokenmill.errors import UsageError
from tokenmill.recipes.distillation.prompts import TeacherPrompt
from tokenmill.recipes.runner import Answered, AnswerOrigin, Line, finish_reason, origin_of_answer
from tokenmill.storage.json_text import compact_json
from tokenmill.storage.rows import parquet_metadata, read_rows, suffix_of

Thinking = Literal["auto", "opened", "off"]
COLUMNS: Mapping[str, str] = {
    "id": "string",
    "prompt_id": "string",
    "sample": "int32",
    "messages": "json",
    "answer": "string",
    "reasoning": "string",
    "finish_reason": "string",
    "token_ids": "list<int32>",
    "logprobs": "list<float32>",
    "top_ids": "list<list<int32>>",
    "top_logprobs": "list<list<float32>>",
    "prompt_tokens": "int32",
    "completion_tokens": "int32",
    "model": "string",
    "model_id": "string",
    "engine": "string",
    "build": "string",
    "temperature": "float64",
    "top_p": "float64",
    "seed": "int64",
    "max_tokens": "int32",
}
SIGNIFICANT_BITS = 11
"""Precision of `top_logprobs`: that of float16, an error of at most 1 in 2048, which halves the compressed size. The
column type remains float32, which every Parquet reader supports."""
_SAMPLED_ANSWERS = 256  # answers examined to find out whether the template opens the reasoning


@dataclass(frozen=True, slots=True)
class AnswerTokens:
    """The tokens of one answer; None: not reported by the engine."""

    ids: list[int] | None = None
    logprobs: list[float] | None = None
    top_ids: list[list[int]] | None = None
    top_logprobs: list[list[float]] | None = None
    text: str | None = None  # concatenated text of all tokens, control tokens included


def row_of(
    prompt: TeacherPrompt,
    sample: int,
    line: Line,
    answered: Answered,
    origin: AnswerOrigin,
    *,
    split: SplitReasoning,
    tokens: AnswerTokens,
) -> dict[str, Any]:
    """The row of an answer."""
    request = line["body"]
    body = answered.body or {}
    origin = origin_of_answer(answered, origin)
    usage = body.get("usage") or {}
    return {
        "id": answered.custom_id,
        "prompt_id": prompt.id,
        "sample": sample,
        "messages": list(prompt.messages),
        "answer": split.answer,
        "reasoning": split.reasoning,
        "finish_reason": finish_reason(body),
        "token_ids": tokens.ids,
        "logprobs": tokens.logprobs,
        "top_ids": tokens.top_ids,
        "top_logprobs": tokens.top_logprobs,
        "prompt_tokens": usage.get("prompt_tokens"),
        "completion_tokens": usage.get("completion_tokens"),
        "model": origin.model,
        "model_id": origin.model_id,
        "engine": origin.engine,
        "build": origin.build,
        "temperature": request.get("temperature"),
        "top_p": request.get("top_p"),
        "seed": request.get("seed"),
        "max_tokens": request.get("max_tokens", request.get("max_completion_tokens")),
    }


def split_answer(
    body: Mapping[str, Any], tokens: AnswerTokens, *, thinking: Thinking, opened: bool
) -> SplitReasoning | None:
    """Reasoning and answer of a response; None if it has no text."""
    message = (body.get("choices") or [{}])[0].get("message") or {}
    content = message.get("content")
    thought = message.get("reasoning_content") or message.get("reasoning")
    if not isinstance(content, str) and not thought:
        return None
    text = content if isinstance(content, str) else ""
    if thinking == "off":
        return SplitReasoning(text, thought or None)
    if thought:  # separated by the engine
        return SplitReasoning(text.strip(), str(thought).strip())
    if tokens.text is not None and not has_reasoning(text) and has_reasoning(tokens.text):
        return _by_tokens(text, tokens.text)
    return split_reasoning(text, cut=finish_reason(body) == "length", opened=opened or thinking == "opened")


def _by_tokens(text: str, written: str) -> SplitReasoning:
    """Split by tags that are control tokens, which only `written` contains; text cut by a stop sequence is dropped."""
    split = split_reasoning(written)
    whole = split.answer
    end = len(split.answer)
    while end and not text.rstrip().endswith(whole[:end].rstrip()):
        end -= 1
    return SplitReasoning(whole[:end].rstrip(), split.reasoning, split.by_template)


def opened_by(body: Mapping[str, Any]) -> str:
    """Key of a line's template options; lines with equal keys begin their answers in the same way."""
    return compact_json([body.get("chat_template_kwargs"), body.get("reasoning_effort")])


def templates_that_open(answers: Iterable[tuple[Line, Answered]]) -> frozenset[str]:
    """Keys (`opened_by`) of the lines whose template opens the reasoning, judged by the first answers."""
    found: set[str] = set()
    with_text = ((line, answer.body) for line, answer in answers if answer.body)
    for line, body in islice(with_text, _SAMPLED_ANSWERS):
        message = (body.get("choices") or [{}])[0].get("message") or {}
        if isinstance(message.get("content"), str) and split_reasoning(message["content"]).by_template:
            found.add(opened_by(line["body"]))
    return frozenset(found)


def tokens_of(body: Mapping[str, Any]) -> AnswerTokens:
    """The tokens in an engine's response."""
    logprobs = (body.get("choices") or [{}])[0].get("logprobs") or {}
    content: Sequence[Mapping[str, Any]] | None = logprobs.get("content")
    if content is None:
        return AnswerTokens()
    tops: list[Sequence[Mapping[str, Any]]] = [entry.get("top_logprobs") or () for entry in content]
    has_tops = any(tops)
    return AnswerTokens(
        ids=_ids(content),
        logprobs=[entry["logprob"] for entry in content],
        top_ids=_nested_ids(tops) if has_tops else None,
        top_logprobs=[[rounded(top["logprob"]) for top in each] for each in tops] if has_tops else None,
        text=_text(content),
    )


def rounded(value: float) -> float:
    """The value rounded to `SIGNIFICANT_BITS`."""
    fraction, exponent = math.frexp(value)
    return math.ldexp(round(math.ldexp(fraction, SIGNIFICANT_BITS)), exponent - SIGNIFICANT_BITS)


def _ids(entries: Sequence[Mapping[str, Any]]) -> list[int] | None:
    ids = [entry.get("id") for entry in entries]
    return None if None in ids else [int(number) for number in ids if number is not None]


def _nested_ids(tops: Sequence[Sequence[Mapping[str, Any]]]) -> list[list[int]] | None:
    found = [_ids(each) for each in tops]
    return None if None in found else [each for each in found if each is not None]


def _text(entries: Sequence[Mapping[str, Any]]) -> str:
    raw = (entry["token"].encode() if entry.get("bytes") is None else bytes(entry["bytes"]) for entry in entries)
    return b"".join(raw).decode(errors="replace")


def is_distilled(path: Path) -> bool:
    """Whether `distill` wrote this file."""
    try:
        if suffix_of(path) == ".parquet":
            return parquet_metadata(path).get("tokenmill.recipe") == "distill"
        return list(next(read_rows(path), {})) == list(COLUMNS)
    except UsageError:
        return False
