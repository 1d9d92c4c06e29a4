"""Streaming parsers of a model's output: reasoning, text and tool calls.

OutputParser        separates reasoning, by its tags or by gpt-oss's channels
ToolCallParser      separates tool calls in the text after it
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from tokenmill.engine.engine import FinishReason
from tokenmill.engine.reasoning import TAGS, WRAPPERS
from tokenmill.engine.tool_formats import ENDS, INNER_MARKS, ToolCall, Tools, calls_in, make_call

_FIRST_KEY = re.compile(r'\s*\{\s*"([^"]*)"')
_BARE_LIST = re.compile(r"\[\s*[\w.]*(?:\(.*)?", re.DOTALL)  # Llama 4: [name(key=value)]
_CHANNEL_STARTS = ("<|channel|>", "<|start|>")
_MESSAGE_ENDS = (*_CHANNEL_STARTS, "<|end|>", "<|call|>", "<|return|>")
_RECIPIENT = re.compile(r"\bto=(?:functions\.)?([\w.-]+)")
_MARKS = tuple(ENDS)
_AFTER = {"<|close|>response<|sep|>": "<|close|>message<|sep|>"}  # Kimi K3: end of the answer -> end of the message
OUTPUT_MARKS = frozenset(
    (*(tag for pair in (*TAGS, *WRAPPERS) for tag in pair), *ENDS, *ENDS.values(), *_MESSAGE_ENDS, *INNER_MARKS)
)
"""Texts that separate the parts of an output; in many vocabularies control tokens, which are otherwise not printed."""
_SAFE_WRAPPERS = tuple(pair for pair in WRAPPERS if pair[0].startswith("<|"))  # also without reasoning before them
_CALL_KEYS = frozenset(("name", "type", "function", "parameters", "arguments", "id"))


@dataclass(frozen=True, slots=True)
class ReasoningPart:
    """Reasoning before the answer."""

    text: str


ParsedPart = str | ReasoningPart | ToolCall


class ToolCallParser:
    """Streaming parser of text into text and calls. Holds text back only while it may be part of a call."""

    def __init__(self, tools: Tools, *, parallel: bool = True) -> None:
        """`tools`: the request's tools. Without `parallel`, calls after the first are dropped."""
        self._tools = tools
        self._parallel = parallel
        self._held = ""
        self._end: str | None = None  # end mark of the current call; "": it ends with the answer
        self._began = False  # non-whitespace text was returned
        self._ends_in_text = False  # the last part returned was text, not a call
        self.calls = 0

    def feed(self, text: str) -> list[ParsedPart]:
        """Add text and return the parts that are complete."""
        self._held += text
        out: list[ParsedPart] = []
        while self._step(out):
            pass
        return [part for part in out if part]

    def end(self) -> list[ParsedPart]:
        """Return the remaining parts. Call it once, after the last `feed`."""
        held = self._held
        self._held = ""
        calls = calls_in(held, self._tools) if self._end is not None or not self._began else []
        self._end = None
        return list(self._taken(calls)) if calls else [text for text in (self._text(held),) if text]

    def finish_reason(self, reason: FinishReason) -> FinishReason:
        """The finish reason after `end`: "tool_calls" if there were calls and no text was cut off after them."""
        return reason if not self.calls or (reason == "length" and self._ends_in_text) else "tool_calls"

    def _step(self, out: list[ParsedPart]) -> bool:
        """Parse one part of the held text; returns whether there may be more."""
        if self._end is not None:
            return self._inside(out, self._end)
        if not self._began and self._may_be_bare():
            return False
        start, mark = min(((at, mark) for mark in ENDS if (at := self._held.find(mark)) >= 0), default=(-1, ""))
        if start >= 0:
            out.append(self._text(self._held[:start]))
            self._held = self._held[start:]
            self._end = ENDS.get(mark, "")
            return True
        free = len(self._held) - _begun(self._held, _MARKS)
        out.append(self._text(self._held[:free]))
        self._held = self._held[free:]
        return False

    def _inside(self, out: list[ParsedPart], end: str) -> bool:
        at = self._held.find(end) if end else -1
        if at < 0:
            return False
        whole = self._held[: at + len(end)]
        self._held = self._held[at + len(end) :]
        self._end = None
        calls = calls_in(whole, self._tools)
        out.extend(self._taken(calls) if calls else [self._text(whole)])
        return True

    def _may_be_bare(self) -> bool:
        """Whether the held text may be a call without marks, which starts with a JSON object."""
        start = self._held.lstrip()
        if not start:
            return True
        if not start.startswith("{"):
            return _BARE_LIST.fullmatch(start) is not None
        key = _FIRST_KEY.match(start)
        return key is None or key[1] in _CALL_KEYS

    def _text(self, text: str) -> str:
        visible = bool(text.strip())
        if self.calls and not visible:
            return ""  # whitespace between calls
        self._began = self._began or visible
        self._ends_in_text = self._ends_in_text or visible
        return text

    def _taken(self, calls: Sequence[ToolCall]) -> Iterator[ToolCall]:
        self._ends_in_text = False
        for call in calls:
            if self._parallel or not self.calls:
                self.calls += 1
                yield call


class OutputParser:
    """Streaming parser of one answer. Holds text back only while it may be part of a tag or a call."""

    def __init__(self, calls: ToolCallParser | None) -> None:
        """`calls`: finds tool calls in the text after the reasoning; None if the request has no tools."""
        self.separated = False  # the output has reasoning, which may be empty
        self._calls = calls
        self._state: Literal["start", "reasoning", "after", "answer", "channels"] = "start"
        self._held = ""
        self._end = ""  # end tag of the reasoning, or of the answer's wrapper
        self._channels = _Channels(calls is not None)

    def feed(self, text: str) -> list[ParsedPart]:
        """Add text and return the parts that are complete."""
        self._held += text
        out: list[ParsedPart] = []
        while self._step(out):
            pass
        return [part for part in out if part and part != ReasoningPart("")]

    def end(self) -> list[ParsedPart]:
        """Return the remaining parts. Call it once, after the last `feed`."""
        held, self._held = self._held, ""
        out: list[ParsedPart] = []
        if self._state == "reasoning":
            out = [ReasoningPart(held)]
        elif self._state == "channels":
            out = self._channels.end()
        elif held and not (self._state == "after" and self.separated):
            self._answer(held, out)
        if self._calls is not None:
            out += self._calls.end()
        return [part for part in out if part and part != ReasoningPart("")]

    def finish_reason(self, reason: FinishReason) -> FinishReason:
        """The finish reason after `end`: "tool_calls" if there were calls and no text was cut off after them."""
        if self._channels.calls:
            return "tool_calls"
        return reason if self._calls is None else self._calls.finish_reason(reason)

    def _step(self, out: list[ParsedPart]) -> bool:
        """Parse one part of the held text; returns whether there may be more."""
        if self._state == "channels":
            held, self._held = self._held, ""
            out += self._channels.feed(held)
            return False
        if self._state in ("start", "after"):
            return self._begin()
        before, found, rest = self._until(self._end) if self._end else (self._held, False, "")
        if self._state == "reasoning":
            out.append(ReasoningPart(before))
        else:
            self._answer(before, out)
        self._held = rest
        if found:
            self._end = "" if self._state == "reasoning" else _AFTER.get(self._end, "")
            self._state = "after" if self._state == "reasoning" else "answer"
        return found

    def _begin(self) -> bool:
        """Find the tag with which the reasoning, or the answer after it, begins; False: more text is needed."""
        begun = self._held.lstrip()
        tags = TAGS if self._state == "start" else _SAFE_WRAPPERS if not self.separated else WRAPPERS
        starts = [start for start, _ in tags] + list(_CHANNEL_STARTS if self._state == "start" else ())
        if (not begun and (self._held or self.separated)) or any(
            start.startswith(begun) and start != begun for start in starts
        ):
            return False
        if self._state == "start" and begun.startswith(_CHANNEL_STARTS):
            self._state = "channels"
            self.separated = True
            return True
        tag = next((pair for pair in tags if begun.startswith(pair[0])), None)
        if self._state == "start":
            self._state = "reasoning" if tag else "after"
            self.separated = tag is not None
        else:
            self._state = "answer"
            self._held = begun if self.separated else self._held
        if tag:
            self._held, self._end = begun[len(tag[0]) :].lstrip(), tag[1]
        return bool(self._held)

    def _until(self, end: str) -> tuple[str, bool, str]:
        """The held text before an end tag, whether it was found, and the rest, which may be the beginning of one."""
        before, found, rest = self._held.partition(end)
        if found:
            return before, True, rest
        free = len(before) - _begun(before, (end,))
        return before[:free], False, before[free:]

    def _answer(self, text: str, out: list[ParsedPart]) -> None:
        if self._calls is None:
            out.append(text)
        else:
            out += self._calls.feed(text)


class _Channels:
    """gpt-oss: messages with a header; `final` is the answer, those to a function are calls, others are reasoning."""

    def __init__(self, parses_calls: bool) -> None:
        self.calls = 0
        self._parses_calls = parses_calls
        self._held = ""
        self._header: str | None = None  # of the current message; None: it is not complete

    def feed(self, text: str) -> list[ParsedPart]:
        self._held += text
        out: list[ParsedPart] = []
        while self._step(out):
            pass
        return out

    def end(self) -> list[ParsedPart]:
        held, self._held = self._held, ""
        return [] if self._header is None else [self._part(self._header, held)]

    def _step(self, out: list[ParsedPart]) -> bool:
        if self._header is None:
            header, found, rest = self._held.partition("<|message|>")
            if found:
                self._header, self._held = header, rest
            return bool(found)
        at, end = min(((at, end) for end in _MESSAGE_ENDS if (at := self._held.find(end)) >= 0), default=(-1, ""))
        if at >= 0:
            out.append(self._part(self._header, self._held[:at]))
            self._held = self._held[at + (len(end) if end not in _CHANNEL_STARTS else 0) :]
            self._header = None
            return True
        if _RECIPIENT.search(self._header) is None:  # a call is complete at its end
            free = len(self._held) - _begun(self._held, _MESSAGE_ENDS)
            out.append(self._part(self._header, self._held[:free]))
            self._held = self._held[free:]
        return False

    def _part(self, header: str, text: str) -> ParsedPart:
        to = _RECIPIENT.search(header)
        if to is not None and self._parses_calls:
            self.calls += 1
            return make_call(to[1], text.strip() or "{}")
        return text if "<|channel|>final" in header else ReasoningPart(text)


def _begun(text: str, marks: Sequence[str]) -> int:
    """Length of the longest end of the text that may be the beginning of a mark."""
    for size in range(min(max(map(len, marks)), len(text)), 0, -1):
        if any(mark.startswith(text[-size:]) for mark in marks):
            return size
    return 0
