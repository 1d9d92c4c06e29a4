"""What a template supports, found by rendering small conversations and observing which values it reads.

llama.cpp decides in the same way, with the same conversations, how it changes messages before rendering: whether
content is a text or a list of parts, whether there is a system role, whether tool call arguments are read as a mapping.
As there, a value counts as used once the template has read it.
"""

import json
from collections.abc import Callable
from typing import Any

from tokenmill.native.chat.messages import ChatMessage, TemplateCapabilities
from tokenmill.native.chat.sandbox import TemplateError, Witness

RenderRun = Callable[[list[ChatMessage], list[dict[str, Any]], Witness], str]
_MARK = "STRING_MARKER"
# Filters that llama.cpp applies to lists only; they fail on a text.
_LIST_FILTERS = frozenset(
    {"first", "last", "list", "items", "reverse", "map", "sort", "unique", "sum", "min", "max", "join"}
    | {"select", "reject", "selectattr", "rejectattr"}
)
_AS_LIST = frozenset({"filter selectattr", "loop", "item"})
_TOOL = """{"name": "tool", "type": "function", "function": {"name": "tool1", "description": "Tool description",
  "parameters": {"type": "object", "properties": {"arg": {"type": "string", "description": "Arg description"}},
                 "required": ["arg"]}}}"""
_CALLED = """[{"role": "user", "content": "User message"},
  {"role": "assistant", "content": "", "tool_calls": [
    {"id": "call00001", "type": "function", "function": {"name": "tool1", "arguments": %s}}]},
  {"role": "tool", "content": "Tool response", "tool_call_id": "call00001"},
  {"role": "assistant", "content": "The tool response was 'tool response'"},
  {"role": "user", "content": "User message"}]"""


class _Watch:
    """Records the operations on some values, which are identified by `id`."""

    def __init__(self, **values: Any) -> None:
        self._values = values  # kept alive, so that no other value gets their id
        self._names = {id(value): name for name, value in values.items()}
        self.done: dict[str, set[str]] = {name: set() for name in values}

    def note(self, operation: str, value: object) -> None:
        """Mutates. Raises TypeError where llama.cpp would fail because a text is not a list."""
        if name := self._names.get(id(value)):
            self.done[name].add(operation)
        if operation == "deep":
            self._into(value, set())
        if isinstance(value, str) and (operation == "loop" or operation.removeprefix("filter ") in _LIST_FILTERS):
            raise TypeError("a text is not a list")

    def _into(self, value: object, seen: set[int]) -> None:
        """Visit all values inside, each once: a list may contain itself."""
        if id(value) in seen:
            return
        seen.add(id(value))
        if name := self._names.get(id(value)):
            self.done[name].add("deep")
        parts = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
        for part in parts:
            self._into(part, seen)


def capabilities(run: RenderRun) -> TemplateCapabilities:
    """What the template supports; `run` renders messages and tools or raises TemplateError."""
    text, typed = _content(run)
    calls, objects = _calls(run)
    return TemplateCapabilities(text, typed, _system(run), calls, objects)


def shows_tools(run: RenderRun) -> bool:
    """Whether the template writes the tools into the prompt."""
    written = _try(run, [{"role": "user", "content": "User message"}], [json.loads(_TOOL)], _Watch())
    return written is not None and "tool1" in written


def _content(run: RenderRun) -> tuple[bool, bool]:
    messages = json.loads(f'[{{"role": "user", "content": "{_MARK}"}}]')
    watch = _Watch(content=messages[0]["content"])
    written = _try(run, messages, [], watch)
    as_list = bool(watch.done["content"] & _AS_LIST)
    typed = as_list
    if "test string" in watch.done["content"]:
        messages = [{"role": "user", "content": []}]
        empty = _Watch(content=messages[0]["content"])
        typed |= _try(run, messages, [], empty) is not None and bool(empty.done["content"] & _AS_LIST)
    return written is not None and not (as_list and _MARK not in written), typed


def _system(run: RenderRun) -> bool:
    messages = json.loads(
        '[{"role": "system", "content": "System message"}, {"role": "user", "content": "User message"}]'
    )
    watch = _Watch(content=messages[0]["content"])
    _try(run, messages, [], watch)
    return bool(watch.done["content"])


def _calls(run: RenderRun) -> tuple[bool, bool]:
    messages = json.loads(_CALLED % '{"arg": "value"}')
    tools = [json.loads(_TOOL)]
    calls = messages[1]["tool_calls"]
    watch = _Watch(calls=calls, argument=calls[0]["function"]["arguments"]["arg"])
    as_objects = _try(run, messages, tools, watch) is not None
    if as_objects and watch.done["calls"] and watch.done["argument"]:
        return True, True
    messages = json.loads(_CALLED % json.dumps('{"arg": "value"}'))
    tools = [json.loads(_TOOL)]
    again = _Watch(calls=messages[1]["tool_calls"])
    as_texts = _try(run, messages, tools, again) is not None
    ignored = as_objects and not watch.done["calls"]
    return as_texts and bool(again.done["calls"]) and not ignored, False


def _try(run: RenderRun, messages: list[ChatMessage], tools: list[dict[str, Any]], watch: _Watch) -> str | None:
    """The text; None if it fails, with and without the empty reasoning that some templates require of every answer."""
    silent = [message for message in messages if message["role"] == "assistant"]
    try:
        return run(messages, tools, watch)
    except TemplateError:
        if not silent:
            return None
    for message in silent:
        message.setdefault("reasoning_content", "")
    try:
        return run(messages, tools, watch)
    except TemplateError:
        return None
