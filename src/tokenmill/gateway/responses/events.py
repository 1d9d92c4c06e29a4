"""Writes answers as response objects, or as the streaming events of OpenAI's Responses API.

response.created, response.in_progress
for each item:  response.output_item.added ... response.output_item.done
  reasoning     response.reasoning_text.delta ... .done
  message       response.content_part.added, response.output_text.delta ... .done, response.content_part.done
  call          response.function_call_arguments.delta, .done  (custom tools: response.custom_tool_call_input)
response.completed | response.incomplete | response.failed
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from tokenmill.engine.answer_parts import AnswerPart, AnswerText, parts_of
from tokenmill.engine.engine import Answer, FinishReason, TokenLogprob, Usage
from tokenmill.engine.output_parser import ReasoningPart
from tokenmill.engine.tool_formats import ToolCall
from tokenmill.errors import TokenmillError
from tokenmill.jobs.openai.responses.answers import (
    Item,
    call_item,
    ended,
    item_of,
    logprob_list,
    response_body,
    response_object,
    response_usage,
    text_content,
)
from tokenmill.jobs.openai.responses.tools import custom_tools
from tokenmill.storage.json_text import encode


class ResponseEncoder:
    """Writes one response; see `AnswerEncoder`. `response` is the last state of the response object."""

    def __init__(
        self,
        request: Mapping[str, Any],
        *,
        id: str,
        created_s: float,
        model: str,
        fingerprint: str,
        previous: str | None = None,
    ) -> None:
        """`id` is given without its prefix."""
        self._request = {**request, "previous_response_id": previous}
        self._id = id
        self._created_s = created_s
        self._model = model
        self._more = {"system_fingerprint": fingerprint}
        self._custom = custom_tools(request.get("tools") or ())
        self._number = 0  # of the next event
        self._output: list[Item] = []
        self._open: _OpenItem | None = None
        self._reason: FinishReason = "stop"
        self.response: dict[str, Any] = {}

    def whole(self, answers: Sequence[Answer], usage: Usage) -> Mapping[str, Any]:
        """The response object."""
        answer = answers[0]
        self.response = response_body(
            self._request,
            parts_of(answer),
            answer.finish_reason,
            usage,
            id=self._id,
            created_s=self._created_s,
            model=self._model,
            **self._more,
        )
        return self.response

    def opening(self, index: int) -> bytes:
        """The first two events."""
        response = self._object("in_progress")
        return self._event("response.created", response=response) + self._event(
            "response.in_progress", response=response
        )

    def parts(self, index: int, parts: Iterable[AnswerPart]) -> bytes:
        """The events of some parts."""
        return b"".join([event for part in parts for event in self._part(part)])

    def end(self, index: int, reason: FinishReason) -> bytes:
        """The end of the last item; an answer without any has an empty message."""
        self._reason = reason
        events = [] if self._output or self._open else self._begin(AnswerText(""), "message")
        return b"".join([*events, *self._close("incomplete" if reason == "length" else "completed")])

    def closing(self, usage: Usage) -> bytes:
        """The response, completed or incomplete."""
        reasoned = any(item["type"] == "reasoning" for item in self._output)
        details = ended(self._reason)
        self.response = self._object(output=self._output, usage=response_usage(usage, reasoned=reasoned), **details)
        return self._event(f"response.{details['status']}", response=self.response)

    def failure(self, error: TokenmillError) -> bytes:
        """The response, failed."""
        fault = {"code": error.code, "message": error.message}
        self.response = self._object("failed", error=fault, output=self._output)
        return self._event("response.failed", response=self.response)

    def _object(self, status: Any = None, **more: Any) -> dict[str, Any]:
        more = {**self._more, **({} if status is None else {"status": status}), **more}
        return response_object(self._request, id=self._id, created_s=self._created_s, model=self._model, **more)

    def _part(self, part: AnswerPart) -> Iterator[bytes]:
        if isinstance(part, ToolCall):
            yield from self._close()
            yield from self._call(part)
            return
        kind = "reasoning" if isinstance(part, ReasoningPart) else "message"
        if self._open is None or self._open.item["type"] != kind:
            if not part.text:
                return  # probabilities of tokens that are not part of a text
            yield from self._close()
            yield from self._begin(part, kind)
        assert self._open is not None  # noqa: S101  opened above
        logprobs = part.logprobs if isinstance(part, AnswerText) else ()
        self._open.text.append(part.text)
        self._open.logprobs += logprobs
        if part.text:
            more = {"logprobs": logprob_list(logprobs)} if kind == "message" else {}
            yield self._event(f"{self._open.name}.delta", **self._open.place, delta=part.text, **more)

    def _begin(self, part: AnswerText | ReasoningPart, kind: str) -> Iterator[bytes]:
        index = len(self._output)
        item = item_of(type(part)(""), f"{self._id}{index}", self._custom, "in_progress") | {"content": []}
        self._open = _OpenItem(item, index)
        yield self._event("response.output_item.added", output_index=index, item=item)
        if kind == "message":
            yield self._event("response.content_part.added", **self._open.place, part=text_content(""))

    def _close(self, status: str = "completed") -> Iterator[bytes]:
        """End the open item, if any."""
        opened = self._open
        if opened is None:
            return
        self._open = None
        text = "".join(opened.text)
        logprobs = tuple(opened.logprobs)
        if opened.item["type"] == "message":
            part = text_content(text, logprobs)
            yield self._event(f"{opened.name}.done", **opened.place, text=text, logprobs=part["logprobs"])
            yield self._event("response.content_part.done", **opened.place, part=part)
        else:
            part = {"type": "reasoning_text", "text": text}
            yield self._event(f"{opened.name}.done", **opened.place, text=text)
        item = {**opened.item, "status": status, "content": [part]}
        self._output.append(item)
        yield self._event("response.output_item.done", output_index=opened.index, item=item)

    def _call(self, call: ToolCall) -> Iterator[bytes]:
        index = len(self._output)
        item = call_item(call, f"{self._id}{index}", self._custom, "completed")
        key = "input" if item["type"] == "custom_tool_call" else "arguments"
        name = "custom_tool_call_input" if key == "input" else "function_call_arguments"
        place = {"item_id": item["id"], "output_index": index}
        started = {**item, key: "", "status": "in_progress"}
        yield self._event("response.output_item.added", output_index=index, item=started)
        yield self._event(f"response.{name}.delta", **place, delta=item[key])
        yield self._event(f"response.{name}.done", **place, **{key: item[key]})
        self._output.append(item)
        yield self._event("response.output_item.done", output_index=index, item=item)

    def _event(self, kind: str, **fields: Any) -> bytes:
        data = encode({"type": kind, "sequence_number": self._number, **fields})
        self._number += 1
        return b"event: " + kind.encode() + b"\ndata: " + data + b"\n\n"


class _OpenItem:
    """An item whose text is being generated."""

    def __init__(self, item: Item, index: int) -> None:
        self.item = item
        self.index = index
        self.text: list[str] = []
        self.logprobs: list[TokenLogprob] = []
        message = item["type"] == "message"
        self.name = "response.output_text" if message else "response.reasoning_text"
        self.place = {"item_id": item["id"], "output_index": index, "content_index": 0}
