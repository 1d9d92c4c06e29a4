"""Answers as OpenAI's response objects. The types are also the schemas in /openapi.json."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal, NotRequired, TypedDict, cast

from msgspec import Meta

from tokenmill.engine.answer_parts import parts_of
from tokenmill.engine.engine import Answer, Identity, Usage
from tokenmill.jobs.openai.call import Endpoint
from tokenmill.jobs.openai.logprobs import chat_logprobs, text_logprobs
from tokenmill.jobs.openai.responses.answers import response_body

_Count = Annotated[int, Meta(ge=0)]


class PromptTokensDetails(TypedDict):
    """Details of the prompt tokens."""

    cached_tokens: Annotated[int, Meta(ge=0, description="Not computed again.")]


class CompletionUsage(TypedDict):
    """Tokens of a request; counts that the engine does not report are absent."""

    prompt_tokens: _Count
    completion_tokens: _Count
    total_tokens: _Count
    prompt_tokens_details: NotRequired[PromptTokensDetails]


class ResponseMessage(TypedDict):
    """The model's message."""

    role: Literal["assistant"]
    content: str | None
    tool_calls: NotRequired[list[dict[str, Any]]]
    reasoning_content: NotRequired[str]


class ChatChoice(TypedDict):
    """One answer to a chat."""

    index: int
    message: ResponseMessage
    logprobs: NotRequired[dict[str, Any] | None]
    finish_reason: Literal["stop", "length", "tool_calls"]


class CompletionChoice(TypedDict):
    """One answer to a prompt."""

    index: int
    text: str
    logprobs: NotRequired[dict[str, Any] | None]
    finish_reason: Literal["stop", "length", "tool_calls"]


class ChatCompletion(TypedDict):
    """The response of /v1/chat/completions."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    system_fingerprint: NotRequired[Annotated[str, Meta(description="The engine and its build.")]]
    choices: Annotated[list[ChatChoice], Meta(min_length=1)]
    usage: CompletionUsage


class Completion(TypedDict):
    """The response of /v1/completions."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    system_fingerprint: NotRequired[Annotated[str, Meta(description="The engine and its build.")]]
    choices: Annotated[list[CompletionChoice], Meta(min_length=1)]
    usage: CompletionUsage


def answer_body(
    endpoint: Endpoint,
    answer: Answer,
    *,
    id: str,
    model: str,
    created_s: float,
    made_by: str | None = None,
    request: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """The answer as OpenAI's chat.completion, text_completion, response or list of embeddings.

    `id` is given without its prefix.

    `request`: the body of a response request, whose options the response repeats.

    `made_by`: see the function; recorded as the system_fingerprint, because answers may be reused later.
    """
    fingerprint: dict[str, Any] = {} if made_by is None else {"system_fingerprint": made_by}
    if endpoint == "responses":
        reason, usage = answer.finish_reason, answer.usage
        return response_body(
            request or {}, parts_of(answer), reason, usage, id=id, created_s=created_s, model=model, **fingerprint
        )
    if endpoint == "embeddings":
        return {**(answer.message or {}), "model": model}
    chat = endpoint == "chat"
    return {
        "id": f"{'chatcmpl' if chat else 'cmpl'}-{id}",
        "object": "chat.completion" if chat else "text_completion",
        "created": int(created_s),
        "model": model,
        **fingerprint,
        "choices": [choice(endpoint, answer)],
        "usage": usage_body(answer.usage),
    }


def made_by(identity: Identity) -> str:
    """The engine and its build; the `system_fingerprint` of its answers."""
    return f"{identity.kind} {identity.build}"


def choice(endpoint: Endpoint, answer: Answer, index: int = 0) -> ChatChoice | CompletionChoice:
    """The answer as one choice of a response object."""
    tokens = answer.logprobs
    if endpoint == "chat":
        return {
            "index": index,
            "message": _message(answer),
            "logprobs": None if tokens is None else chat_logprobs(tokens),
            "finish_reason": answer.finish_reason,
        }
    return {
        "index": index,
        "text": answer.text,
        "logprobs": None if tokens is None else text_logprobs(tokens),
        "finish_reason": answer.finish_reason,
    }


def usage_body(usage: Usage) -> CompletionUsage:
    """Token counts as OpenAI's usage object."""
    body: CompletionUsage = {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }
    if usage.cached_tokens is not None:
        body["prompt_tokens_details"] = {"cached_tokens": usage.cached_tokens}
    return body


def text_of(body: Mapping[str, Any]) -> str | None:
    """The text of a stored answer of any endpoint; None if it has none, such as a tool call."""
    if body.get("object") == "response":
        contents = [part for item in body["output"] if item["type"] == "message" for part in item["content"]]
        return "".join(part["text"] for part in contents) if contents else None
    first = (body.get("choices") or [{}])[0]
    found = first["message"].get("content") if "message" in first else first.get("text")
    return found if isinstance(found, str) else None


def finish_reason_of(body: Mapping[str, Any]) -> str:
    """OpenAI's finish reason of a stored answer of any endpoint; stop if it has none, like embeddings."""
    if body.get("object") == "response":
        if body["status"] == "incomplete":
            return "length"
        called = any(item["type"] in ("function_call", "custom_tool_call") for item in body["output"])
        return "tool_calls" if called else "stop"
    first = (body.get("choices") or [{}])[0]
    return first.get("finish_reason") or "stop"


def is_cut(body: Mapping[str, Any]) -> bool:
    """Whether a stored answer was cut off at max_tokens or the end of the context."""
    return finish_reason_of(body) == "length"


def _message(answer: Answer) -> ResponseMessage:
    if answer.message is None:
        return {"role": "assistant", "content": answer.text}
    message = cast(ResponseMessage, {"role": "assistant", "content": None, **answer.message})
    if message["content"] is None and not message.get("tool_calls"):
        message["content"] = answer.text
    return message
