"""The parts of an answer: reasoning, text and tool calls.

An `AnswerReader` turns the events of a stream into parts as they arrive; `parts_of` splits a complete answer.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tokenmill.engine.engine import Answer, FinishReason, Piece, TokenLogprob
from tokenmill.engine.tool_calls import ParsedPart, ToolCall, ToolCallParser


@dataclass(frozen=True, slots=True)
class TextPart:
    """Text of the answer."""

    text: str
    logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class ReasoningPart:
    """Reasoning before the answer."""

    text: str


AnswerPart = TextPart | ReasoningPart | ToolCall


class AnswerReader:
    """Reads the events of one choice."""

    def __init__(self, parser: ToolCallParser | None) -> None:
        """`parser`: finds tool calls in the text; None if there are none to find."""
        self._parser = parser
        self._reasoned = False  # reasoning has been returned

    def piece(self, piece: Piece) -> list[AnswerPart]:
        """The parts of a piece; empty while its text may belong to a tool call."""
        parts: list[AnswerPart] = []
        if piece.reasoning:
            self._reasoned = True
            parts.append(ReasoningPart(piece.reasoning))
        if self._parser is not None:
            return [*parts, *map(_part, self._parser.feed(piece.text))]
        if piece.text or piece.logprobs:
            parts.append(TextPart(piece.text, piece.logprobs))
        return parts

    def end(self, answer: Answer) -> tuple[list[AnswerPart], FinishReason]:
        """The last parts, with the tool calls and the reasoning that the engine parsed, and the finish reason.

        Reasoning that was returned before is not repeated.
        """
        parts = [_part(part) for part in self._parser.end()] if self._parser is not None else []
        message = answer.message or {}
        if message.get("reasoning_content") and not self._reasoned:
            parts.append(ReasoningPart(str(message["reasoning_content"])))
        parts += [call_of(call) for call in answer.tool_calls]
        reason = answer.finish_reason if self._parser is None else self._parser.finish_reason(answer.finish_reason)
        return parts, reason


def call_of(call: Mapping[str, Any]) -> ToolCall:
    """An entry of OpenAI's `tool_calls` as a ToolCall."""
    function = call["function"]
    return ToolCall(function["name"], function["arguments"], call["id"])


def parts_of(answer: Answer) -> list[AnswerPart]:
    """The parts of a complete answer, in order: reasoning, text, tool calls."""
    message = answer.message
    if message is None:
        return [TextPart(answer.text, answer.logprobs or ())]
    calls = [call_of(call) for call in answer.tool_calls]
    text = message.get("content") or ("" if calls else answer.text)
    parts: list[AnswerPart] = []
    if message.get("reasoning_content"):
        parts.append(ReasoningPart(str(message["reasoning_content"])))
    if text or not calls:
        parts.append(TextPart(text, answer.logprobs or ()))
    return [*parts, *calls]


def _part(part: ParsedPart) -> AnswerPart:
    return TextPart(part) if isinstance(part, str) else part
