"""Converts a teacher's answers to rows: text, reasoning, tokens with probabilities, provenance.

Token ids come only from the engine. Text is never tokenised again to obtain them, because another tokenisation would
represent another answer.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Literal

from tokenmill.errors import UsageError
from tokenmill.recipes.distillation.prompts import TeacherPrompt
from tokenmill.recipes.reasoning import Parted, has_marks, part
from tokenmill.recipes.runner import Answered, AnswerOrigin, Line, made_by
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
"""Of the probabilities of the likeliest tokens, as many as float16 has: what is stored is wrong by 1 in 2048 at most,
and packs to half. The type is float32 all the same, which every reader of Parquet knows."""
_LOOKED_AT = 256  # number of answers examined to find out whether the template opens the reasoning


@dataclass(frozen=True, slots=True)
class AnswerTokens:
    """The tokens of one answer; fields are None if the engine does not report them."""

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
    parted: Parted,
    tokens: AnswerTokens,
) -> dict[str, Any]:
    """The row of an answer."""
    asked = line["body"]
    body = answered.body or {}
    origin = made_by(answered, origin)
    usage = body.get("usage") or {}
    return {
        "id": answered.custom_id,
        "prompt_id": prompt.id,
        "sample": sample,
        "messages": list(prompt.messages),
        "answer": parted.answer,
        "reasoning": parted.reasoning,
        "finish_reason": finish_of(body),
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
        "temperature": asked.get("temperature"),
        "top_p": asked.get("top_p"),
        "seed": asked.get("seed"),
        "max_tokens": asked.get("max_tokens", asked.get("max_completion_tokens")),
    }


def finish_of(body: Mapping[str, Any]) -> str | None:
    """The finish reason of an answer."""
    choices = body.get("choices") or [{}]
    reason: str | None = choices[0].get("finish_reason")
    return reason


def parted_of(body: Mapping[str, Any], tokens: AnswerTokens, *, thinking: Thinking, opened: bool) -> Parted | None:
    """Reasoning and answer; None if the answer is not text."""
    message = (body.get("choices") or [{}])[0].get("message") or {}
    content = message.get("content")
    thought = message.get("reasoning_content") or message.get("reasoning")
    if not isinstance(content, str) and not thought:
        return None
    text = content if isinstance(content, str) else ""
    if thinking == "off":
        return Parted(text, thought or None)
    if thought:  # separated by the engine
        return Parted(text.strip(), str(thought).strip())
    if tokens.text is not None and not has_marks(text) and has_marks(tokens.text):
        return _by_tokens(text, tokens.text)
    return part(text, cut=finish_of(body) == "length", opened=opened or thinking == "opened")


def _by_tokens(text: str, written: str) -> Parted:
    """Split by marks that are control tokens, which the text lacks; text cut by a stop sequence is dropped."""
    parted = part(written)
    whole = parted.answer
    end = len(parted.answer)
    while end and not text.rstrip().endswith(whole[:end].rstrip()):
        end -= 1
    return Parted(whole[:end].rstrip(), parted.reasoning, parted.by_template)


def opened_by(body: Mapping[str, Any]) -> str:
    """Key of lines whose template begins the answer in the same way."""
    return compact_json([body.get("chat_template_kwargs"), body.get("reasoning_effort")])


def templates_that_open(answers: Iterable[tuple[Line, Answered]]) -> frozenset[str]:
    """Keys of lines whose template opens the reasoning, judged by the first answers."""
    found: set[str] = set()
    with_text = ((line, answer.body) for line, answer in answers if answer.body)
    for line, body in islice(with_text, _LOOKED_AT):
        message = (body.get("choices") or [{}])[0].get("message") or {}
        if isinstance(message.get("content"), str) and part(message["content"]).by_template:
            found.add(opened_by(line["body"]))
    return frozenset(found)


def tokens_of(body: Mapping[str, Any]) -> AnswerTokens:
    """The tokens in an engine's response."""
    logprobs = (body.get("choices") or [{}])[0].get("logprobs") or {}
    content: Sequence[Mapping[str, Any]] | None = logprobs.get("content")
    if content is None:
        return AnswerTokens()
    tops: list[Sequence[Mapping[str, Any]]] = [entry.get("top_logprobs") or () for entry in content]
    told = any(tops)
    return AnswerTokens(
        ids=_ids(content),
        logprobs=[entry["logprob"] for entry in content],
        top_ids=_nested_ids(tops) if told else None,
        top_logprobs=[[rounded(top["logprob"]) for top in each] for each in tops] if told else None,
        text=_text(content),
    )


def rounded(value: float) -> float:
    """Round to `SIGNIFICANT_BITS`."""
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
