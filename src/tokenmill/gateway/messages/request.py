"""The body of /v1/messages, and its translation to the body of a chat."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from msgspec import Meta, Struct

from tokenmill.errors import RequestRefused
from tokenmill.gateway.messages.blocks import chat_messages, system_message
from tokenmill.jobs.openai.validation import validate
from tokenmill.storage.json_text import shown

_Objects = list[dict[str, Any]]
_Unused = Annotated[Any, Meta(description="Ignored.")]
_SHARED = ("model", "max_tokens", "temperature", "top_p", "top_k", "stream", "seed", "min_p", "chat_template_kwargs")
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}


class _Common(Struct, forbid_unknown_fields=True, kw_only=True):
    messages: Annotated[_Objects, Meta(min_length=1, description="Messages with text or content blocks.")]
    model: Annotated[str | None, Meta(description="A name from /v1/models; default: the first.")] = None
    system: Annotated[str | _Objects | None, Meta(description="The system prompt.")] = None
    tools: Annotated[_Objects | None, Meta(description="Tools with input_schema; hosted tools are left out.")] = None
    tool_choice: dict[str, Any] | None = None
    thinking: Annotated[
        dict[str, Any] | None, Meta(description="type: enabled (with budget_tokens), adaptive or disabled.")
    ] = None
    output_config: Annotated[dict[str, Any] | None, Meta(description="effort, and format with a JSON schema.")] = None
    output_format: Annotated[dict[str, Any] | None, Meta(description="The older name of output_config.format.")] = None
    cache_control: Annotated[Any, Meta(description="Ignored: prefixes are always reused.")] = None
    betas: _Unused = None
    context_management: _Unused = None
    speed: _Unused = None


class CountTokensRequest(_Common):
    """The body of /v1/messages/count_tokens."""


class MessageRequest(_Common):
    """The body of /v1/messages."""

    max_tokens: Annotated[int, Meta(ge=1)]
    stop_sequences: list[Annotated[str, Meta(min_length=1)]] | None = None
    stream: bool | None = None
    temperature: Annotated[float, Meta(ge=0, le=100)] | None = None
    top_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=0)] | None = None
    min_p: Annotated[Annotated[float, Meta(ge=0, le=1)] | None, Meta(description="Not in Anthropic's API.")] = None
    seed: Annotated[int | None, Meta(description="Not in Anthropic's API.")] = None
    chat_template_kwargs: Annotated[
        dict[str, Any] | None, Meta(description="llama.cpp, vLLM: variables of the chat template.")
    ] = None
    service_tier: _Unused = None
    metadata: _Unused = None
    container: _Unused = None
    diagnostics: _Unused = None
    inference_geo: _Unused = None


def check_message(body: Mapping[str, Any], model: type[_Common] = MessageRequest) -> None:
    """Validate a body; raises RequestRefused, which names the key."""
    validate(model, body)


def chat_body(body: Mapping[str, Any]) -> dict[str, Any]:
    """A validated body as the body of a chat."""
    chat = {key: body[key] for key in _SHARED if body.get(key) is not None}
    chat["messages"] = [*system_message(body.get("system")), *chat_messages(body["messages"])]
    if body.get("stop_sequences"):
        chat["stop"] = body["stop_sequences"]
    output = body.get("output_config") or {}
    form = output.get("format") or body.get("output_format")
    if form:
        chat["response_format"] = {"type": "json_schema", "json_schema": {"schema": form.get("schema")}}
    chat |= _thinking(body.get("thinking") or {}, output.get("effort"))
    tools = [_tool(index, tool) for index, tool in enumerate(body.get("tools") or ()) if not _is_hosted(tool)]
    choice = body.get("tool_choice") or {}
    if tools:
        chat["tools"] = tools
        chat["tool_choice"] = _tool_choice(choice)
        if choice.get("disable_parallel_tool_use"):
            chat["parallel_tool_calls"] = False
    elif choice.get("type", "auto") not in ("auto", "none"):
        raise RequestRefused("tool_choice: requires tools that the model can call", param="tool_choice")
    return chat


def hosted_tools(tools: Sequence[Mapping[str, Any]]) -> list[str]:
    """The types of tools that run on Anthropic's servers, which the model does not see."""
    return sorted({str(tool["type"]) for tool in tools if _is_hosted(tool)})


def _is_hosted(tool: Mapping[str, Any]) -> bool:
    return "input_schema" not in tool and tool.get("type", "custom") != "custom"


def _tool(index: int, tool: Mapping[str, Any]) -> dict[str, Any]:
    name = tool.get("name")
    if not isinstance(name, str):
        raise RequestRefused(f"tools[{index}].name: must be a string, not {shown(name)}", param="tools")
    function = {"name": name, "parameters": tool.get("input_schema") or {"type": "object"}}
    if tool.get("description") is not None:
        function["description"] = tool["description"]
    return {"type": "function", "function": function}


def _tool_choice(choice: Mapping[str, Any]) -> Any:
    kind = choice.get("type", "auto")
    if kind == "tool" and isinstance(choice.get("name"), str):
        return {"type": "function", "function": {"name": choice["name"]}}
    if kind not in _CHOICES:
        raise RequestRefused(f"tool_choice: {shown(kind)} is not supported", param="tool_choice")
    return _CHOICES[kind]


def _thinking(thinking: Mapping[str, Any], effort: Any) -> dict[str, Any]:
    """How much the model thinks, as keys of a chat."""
    kind = thinking.get("type")
    if kind == "disabled":
        return {"reasoning_effort": "none"}
    return {"reasoning_effort": effort} if effort else {}
