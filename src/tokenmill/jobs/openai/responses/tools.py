"""Converts the tools of a /v1/responses request to chat tools.

A custom tool, whose input is free text, becomes a function with one string. Hosted tools, such as web search, run on
OpenAI's servers; they are left out, and the response's X-Tokenmill-Not-Told header names them.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from tokenmill.errors import RequestRefused
from tokenmill.jobs.openai.responses.items import CUSTOM_INPUT
from tokenmill.storage.json_text import shown

Tool = Mapping[str, Any]
HOSTED = frozenset(
    (
        "web_search",
        "web_search_2025_08_26",
        "web_search_preview",
        "web_search_preview_2025_03_11",
        "file_search",
        "code_interpreter",
        "image_generation",
        "mcp",
        "computer",
        "computer_use_preview",
        "local_shell",
        "shell",
        "apply_patch",
        "tool_search",
    )
)


def flat_tools(tools: Sequence[Tool]) -> list[Tool]:
    """All tools; namespaces are replaced by the tools in them."""
    flat: list[Tool] = []
    for tool in tools:
        inner = tool.get("tools") if tool.get("type") == "namespace" else None
        flat += inner if isinstance(inner, list) else [tool]
    return flat


def chat_tools(tools: Sequence[Tool]) -> list[dict[str, Any]]:
    """The tools as chat tools, without hosted ones; raises RequestRefused for unknown types."""
    return [
        {"type": "function", "function": _function(f"tools[{index}]", tool)}
        for index, tool in enumerate(flat_tools(tools))
        if tool.get("type") not in HOSTED
    ]


def hosted_tools(tools: Sequence[Tool]) -> list[str]:
    """The types of the tools that are left out."""
    return sorted({str(tool["type"]) for tool in flat_tools(tools) if tool.get("type") in HOSTED})


def custom_tools(tools: Sequence[Tool]) -> frozenset[str]:
    """The names of custom tools."""
    return frozenset(str(tool.get("name")) for tool in flat_tools(tools) if tool.get("type") == "custom")


def chat_tool_choice(choice: Any) -> Any:
    """Convert `tool_choice` to that of a chat; raises RequestRefused for unsupported types."""
    if choice is None or isinstance(choice, str):
        return choice
    kind = choice.get("type")
    if kind == "allowed_tools":
        return choice.get("mode", "auto")
    if kind in ("function", "custom") and isinstance(choice.get("name"), str):
        return {"type": "function", "function": {"name": choice["name"]}}
    raise RequestRefused(
        f"tool_choice: {shown(kind)} is not supported", param="tool_choice", hint="choose a function, or auto"
    )


def allowed_tools(choice: Any, tools: Sequence[Tool]) -> Sequence[Tool]:
    """The tools that `tool_choice` allows."""
    if not isinstance(choice, Mapping) or choice.get("type") != "allowed_tools":
        return tools
    names = {one.get("name") for one in choice.get("tools") or () if isinstance(one, Mapping)}
    return [tool for tool in flat_tools(tools) if tool.get("name") in names]


def _function(where: str, tool: Tool) -> dict[str, Any]:
    kind = tool.get("type")
    if kind not in ("function", "custom"):
        raise RequestRefused(f"{where}: tools of type {shown(kind)} are not supported", param="tools")
    if not isinstance(tool.get("name"), str):
        raise RequestRefused(f"{where}.name: must be a string, not {shown(tool.get('name'))}", param="tools")
    if kind == "function":
        return {key: tool[key] for key in ("name", "description", "parameters") if tool.get(key) is not None}
    description = "\n".join(filter(None, (tool.get("description"), _syntax(tool))))
    schema = {
        "type": "object",
        "properties": {CUSTOM_INPUT: {"type": "string"}},
        "required": [CUSTOM_INPUT],
        "additionalProperties": False,
    }
    return {"name": tool["name"], "description": description, "parameters": schema}


def _syntax(tool: Tool) -> str | None:
    form = tool.get("format")
    definition = form.get("definition") if isinstance(form, Mapping) else None
    return f"The input follows this grammar:\n{definition}" if definition else None
