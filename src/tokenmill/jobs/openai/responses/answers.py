"""Builds response objects from answers. The types are also the schemas in /openapi.json."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, Literal, NotRequired, TypedDict

from msgspec import Meta

from tokenmill.engine.answer_parts import AnswerPart
from tokenmill.engine.engine import FinishReason, TokenLogprob, Usage
from tokenmill.engine.output_parser import ReasoningPart
from tokenmill.engine.tool_formats import ToolCall
from tokenmill.jobs.openai.logprobs import chat_logprobs
from tokenmill.jobs.openai.responses.items import CUSTOM_INPUT
from tokenmill.jobs.openai.responses.tools import custom_tools
from tokenmill.storage.json_text import parse

Item = dict[str, Any]
Status = Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]
_ECHOED: Mapping[str, Any] = {
    "background": False,
    "instructions": None,
    "max_output_tokens": None,
    "max_tool_calls": None,
    "metadata": {},
    "parallel_tool_calls": True,
    "previous_response_id": None,
    "reasoning": {"effort": None, "summary": None},
    "service_tier": "default",
    "store": True,
    "temperature": None,
    "text": {"format": {"type": "text"}},
    "tool_choice": "auto",
    "tools": [],
    "top_logprobs": 0,
    "top_p": None,
    "truncation": "disabled",
    "user": None,
}
"""Keys of the request that the response repeats, and their values if they are absent."""


class ResponseFault(TypedDict):
    """The error of a failed response."""

    code: str
    message: str


class IncompleteDetails(TypedDict):
    """The reason for an incomplete response."""

    reason: Literal["max_output_tokens"]


class ResponseUsage(TypedDict):
    """Tokens of a response; counts that the engine does not report are absent."""

    input_tokens: int
    input_tokens_details: NotRequired[dict[str, int]]
    output_tokens: int
    output_tokens_details: NotRequired[dict[str, int]]
    total_tokens: int


class ResponseObject(TypedDict):
    """A response; it repeats the options of the request."""

    id: str
    object: Literal["response"]
    created_at: int
    completed_at: NotRequired[int | None]
    status: Status
    model: str
    system_fingerprint: NotRequired[Annotated[str, Meta(description="The engine and its build.")]]
    output: Annotated[
        list[dict[str, Any]], Meta(description="Items: reasoning, message, function_call, custom_tool_call.")
    ]
    error: ResponseFault | None
    incomplete_details: IncompleteDetails | None
    usage: NotRequired[ResponseUsage | None]
    instructions: NotRequired[str | None]
    metadata: NotRequired[dict[str, Any] | None]
    previous_response_id: NotRequired[str | None]
    background: NotRequired[bool | None]
    tools: list[dict[str, Any]]
    tool_choice: Any
    parallel_tool_calls: bool


def response_object(
    request: Mapping[str, Any], *, id: str, created_s: float, model: str, status: Status, **more: Any
) -> dict[str, Any]:
    """A response object; `id` is given without its prefix, `more` replaces or adds keys."""
    echoed = {key: default if request.get(key) is None else request[key] for key, default in _ECHOED.items()}
    return {
        "id": f"resp_{id}",
        "object": "response",
        "created_at": int(created_s),
        "status": status,
        "model": model,
        "output": [],
        "error": None,
        "incomplete_details": None,
        "usage": None,
        **echoed,
        **more,
    }


def ended(reason: FinishReason) -> dict[str, Any]:
    """Status and details of a response that ended for this reason."""
    if reason == "length":
        return {"status": "incomplete", "incomplete_details": {"reason": "max_output_tokens"}}
    return {"status": "completed", "incomplete_details": None}


def output_items(request: Mapping[str, Any], parts: Iterable[AnswerPart], id: str, reason: FinishReason) -> list[Item]:
    """The output of an answer."""
    custom = custom_tools(request.get("tools") or ())
    status = "incomplete" if reason == "length" else "completed"
    return [item_of(part, f"{id}{number}", custom, status) for number, part in enumerate(parts)]


def item_of(part: AnswerPart, id: str, custom: frozenset[str], status: str) -> Item:
    """An output item; `id` is given without its prefix."""
    if isinstance(part, ReasoningPart):
        content = [{"type": "reasoning_text", "text": part.text}]
        return {"id": f"rs_{id}", "type": "reasoning", "summary": [], "content": content, "status": status}
    if isinstance(part, ToolCall):
        return call_item(part, id, custom, status)
    content = [text_content(part.text, part.logprobs)]
    return {"id": f"msg_{id}", "type": "message", "role": "assistant", "status": status, "content": content}


def text_content(text: str, logprobs: Sequence[TokenLogprob] = ()) -> Item:
    """The content of a message."""
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprob_list(logprobs)}


def call_item(call: ToolCall, id: str, custom: frozenset[str], status: str) -> Item:
    """A call of a function or of a custom tool."""
    common = {"call_id": call.id, "name": call.name, "status": status}
    if call.name in custom:
        return {"id": f"ctc_{id}", "type": "custom_tool_call", "input": custom_input(call.arguments), **common}
    return {"id": f"fc_{id}", "type": "function_call", "arguments": call.arguments, **common}


def custom_input(arguments: str) -> str:
    """The input of a custom tool, from the arguments of the function that represents it."""
    try:
        found = parse(arguments).get(CUSTOM_INPUT)
    except ValueError:
        return arguments
    return found if isinstance(found, str) else arguments


def logprob_list(tokens: Sequence[TokenLogprob]) -> list[Any]:
    """Token probabilities, as in a chat."""
    listed: list[Any] = chat_logprobs(tokens)["content"]
    return listed


def response_usage(usage: Usage, *, reasoned: bool) -> ResponseUsage:
    """Token counts of a response; `reasoned`: it has reasoning, whose tokens are not counted separately."""
    body: ResponseUsage = {
        "input_tokens": usage.prompt_tokens,
        "output_tokens": usage.completion_tokens,
        "total_tokens": usage.total_tokens,
    }
    if usage.cached_tokens is not None:
        body["input_tokens_details"] = {"cached_tokens": usage.cached_tokens}
    if not reasoned:
        body["output_tokens_details"] = {"reasoning_tokens": 0}
    return body


def response_body(
    request: Mapping[str, Any],
    parts: Sequence[AnswerPart],
    reason: FinishReason,
    usage: Usage,
    *,
    id: str,
    created_s: float,
    model: str,
    **more: Any,
) -> dict[str, Any]:
    """A complete answer as a response object."""
    reasoned = any(isinstance(part, ReasoningPart) for part in parts)
    return response_object(
        request,
        id=id,
        created_s=created_s,
        model=model,
        output=output_items(request, parts, id, reason),
        usage=response_usage(usage, reasoned=reasoned),
        **ended(reason),
        **more,
    )
