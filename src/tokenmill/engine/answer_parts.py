"""The parts of an answer: reasoning, text and tool calls.

An `AnswerReader` turns the events of a stream into parts as they arrive; `parts_of` splits a complete answer.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tokenmill.engine.engine import Answer, FinishReason, Piece, TokenLogprob
from tokenmill.engine.output_parser import OutputParser, ParsedPart, ReasoningPart
from tokenmill.engine.tool_formats import ToolCall


@dataclass(frozen=True, slots=True)
class AnswerText:
    """Text of the answer."""

    text: str
    logprobs: tuple[TokenLogprob, ...] = ()


AnswerPart = AnswerText | ReasoningPart | ToolCall


class AnswerReader:
    """Reads the events of one choice."""

    def __init__(self, parser: OutputParser | None) -> None:
        """`parser`: separates reasoning and tool calls from the text; None if the engine does."""
        self._parser = parser
        self._reasoned = False  # reasoning has been returned
        self._logprobs: list[TokenLogprob] = []  # of tokens whose text was held back, or is not text of the answer

    def piece(self, piece: Piece) -> list[AnswerPart]:
        """The parts of a piece; empty while its text may belong to a tag or a tool call."""
        parts: list[AnswerPart] = []
        if piece.reasoning:
            self._reasoned = True
            parts.append(ReasoningPart(piece.reasoning))
        if self._parser is not None:
            self._logprobs += piece.logprobs
            return [*parts, *self._parts(self._parser.feed(piece.text))]
        if piece.text or piece.logprobs:
            parts.append(AnswerText(piece.text, piece.logprobs))
        return parts

    def _parts(self, parsed: list[ParsedPart]) -> list[AnswerPart]:
        parts: list[AnswerPart] = []
        for part in parsed:
            if isinstance(part, str):
                parts.append(AnswerText(part, tuple(self._logprobs)))
                self._logprobs.clear()
            else:
                parts.append(part)
        return parts

    def end(self, answer: Answer) -> tuple[list[AnswerPart], FinishReason]:
        """The last parts, with the tool calls and the reasoning that the engine parsed, and the finish reason.

        Reasoning that was returned before is not repeated.
        """
        parts = self._parts(self._parser.end()) if self._parser is not None else []
        if self._logprobs:
            parts.append(AnswerText("", tuple(self._logprobs)))
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
        return [AnswerText(answer.text, answer.logprobs or ())]
    calls = [call_of(call) for call in answer.tool_calls]
    content = message.get("content")
    text = ("" if calls else answer.text) if content is None else content
    parts: list[AnswerPart] = []
    if message.get("reasoning_content"):
        parts.append(ReasoningPart(str(message["reasoning_content"])))
    if text or not calls:
        parts.append(AnswerText(text, answer.logprobs or ()))
    return [*parts, *calls]
