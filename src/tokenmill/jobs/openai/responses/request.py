"""The body of /v1/responses, and its translation to the body of a chat."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from tokenmill.errors import RequestRefused
from tokenmill.jobs.openai.requests import GenerationRequest, ServiceTier
from tokenmill.jobs.openai.responses.items import Item, items_of, messages_of
from tokenmill.jobs.openai.responses.tools import allowed_tools, chat_tool_choice, chat_tools
from tokenmill.jobs.openai.validation import validate

_Objects = list[dict[str, Any]]
_Unused = Annotated[Any, Meta(description="Ignored.")]
# Keys that responses and chats share.
_SHARED = (
    "model",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repeat_penalty",
    "repetition_penalty",
    "repeat_last_n",
    "penalty_last_n",
    "seed",
    "max_tokens",
    "stop",
    "logit_bias",
    "grammar",
    "ignore_eos",
    "stream",
    "timeout",
    "parallel_tool_calls",
    "chat_template_kwargs",
    "service_tier",
    "response_format",
    "json_schema",
)


class Reasoning(Struct):
    """How much the model thinks; other keys are ignored."""

    effort: Annotated[str | None, Meta(description="none: no thinking; other values: see reasoning_effort.")] = None


class TextOptions(Struct):
    """The format of the text; other keys are ignored."""

    format: Annotated[
        dict[str, Any] | None, Meta(description="type: text, json_object, or json_schema with name and schema.")
    ] = None


class ResponseRequest(GenerationRequest):
    """The body of /v1/responses."""

    input: Annotated[
        str | Annotated[_Objects, Meta(min_length=1)],
        Meta(description="A text, or items: messages, reasoning, function calls and their outputs."),
    ]
    instructions: Annotated[str | None, Meta(description="A system message before the input.")] = None
    previous_response_id: Annotated[
        str | None, Meta(description="Continues a stored response; its instructions are not carried over.")
    ] = None
    background: Annotated[
        bool | None, Meta(description="Answer with the queued response, which is run as a batch job and polled.")
    ] = None
    store: Annotated[bool | None, Meta(description="Keep the response for 30 days; default: true.")] = None
    max_output_tokens: Annotated[int, Meta(ge=1)] | None = None
    tools: Annotated[_Objects | None, Meta(description="Functions and custom tools; hosted tools are left out.")] = None
    tool_choice: Literal["none", "auto", "required"] | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    reasoning: Reasoning | None = None
    text: TextOptions | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    include: Annotated[
        list[str] | None, Meta(description="message.output_text.logprobs; other values are ignored.")
    ] = None
    truncation: Annotated[Literal["disabled"] | None, Meta(description="auto is not supported.")] = None
    chat_template_kwargs: Annotated[
        dict[str, Any] | None, Meta(description="llama.cpp, vLLM: variables of the chat template.")
    ] = None
    service_tier: ServiceTier = None
    conversation: Annotated[None, Meta(description="Not supported: use previous_response_id.")] = None
    prompt: Annotated[None, Meta(description="Not supported: stored prompts are OpenAI's.")] = None
    stream_options: _Unused = None
    max_tool_calls: _Unused = None
    prompt_cache_key: _Unused = None
    prompt_cache_options: _Unused = None
    prompt_cache_retention: _Unused = None
    safety_identifier: _Unused = None
    client_metadata: _Unused = None
    context_management: _Unused = None
    moderation: _Unused = None


_HINTS = {
    "messages": "use input",
    "truncation": "leave it out; a prompt that does not fit the context is refused",
    "conversation": "use previous_response_id",
    "prompt": "stored prompts are OpenAI's; send the text as input",
    "tools": "a tool is an object with type and name",
}


def check_response(body: Mapping[str, Any]) -> None:
    """Validate a body; raises RequestRefused, which names the key."""
    validate(ResponseRequest, body, _HINTS)


def chat_body(body: Mapping[str, Any], history: Sequence[Item] = ()) -> dict[str, Any]:
    """A validated body as the body of a chat; `history` are the items of the previous responses."""
    chat = {key: body[key] for key in _SHARED if body.get(key) is not None}
    chat["messages"] = messages_of([*history, *items_of(body["input"])], body.get("instructions"))
    if body.get("max_output_tokens") is not None:
        chat["max_completion_tokens"] = body["max_output_tokens"]
    if effort := (body.get("reasoning") or {}).get("effort"):
        chat["reasoning_effort"] = effort
    if form := _response_format(body):
        chat["response_format"] = form
    choice = body.get("tool_choice")
    tools = chat_tools(allowed_tools(choice, body.get("tools") or ()))
    if tools:
        chat["tools"] = tools
        chat["tool_choice"] = chat_tool_choice(choice)
    elif choice not in (None, "auto", "none"):
        raise RequestRefused("tool_choice: requires tools that the model can call", param="tool_choice")
    if "message.output_text.logprobs" in (body.get("include") or ()) or body.get("top_logprobs"):
        chat |= {"logprobs": True, "top_logprobs": body.get("top_logprobs") or 0}
    return chat


def _response_format(body: Mapping[str, Any]) -> dict[str, Any] | None:
    """`text.format` as a chat's response_format."""
    form = (body.get("text") or {}).get("format") or {}
    if form.get("type") != "json_schema":
        return dict(form) or None
    return {"type": "json_schema", "json_schema": {key: value for key, value in form.items() if key != "type"}}
