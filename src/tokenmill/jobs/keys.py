"""Every key of OpenAI's chat and completion bodies by name, what it may hold, and what it becomes.

A check takes a value as JSON gave it and returns what the request is made of, or None where the value says no more
than its absence would; `Wrong` carries the reason. Keys that our users know from llama.cpp and vLLM are here as well.
What an engine can do is not known here.
"""

import json
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from tokenmill.engine.engine import MOST_LOGPROBS

MOST_STOPS = 64
MOST_BIASES = 1024
HIGHEST_PRIORITY = 1000
_INT64 = 1 << 63

Check = Callable[[Any], Any]
Known = tuple[str | None, Check]
"""The name of what it becomes (None: it cannot change an answer, and is left out) and the check of its value."""

TEXT = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode
"""JSON with the key order kept: schemas, tools and arguments mean something else in another order."""


class Wrong(ValueError):
    """A value that its key cannot have."""


def shown(value: Any) -> str:
    """A value as it stood in the file, shortened."""
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else text[:57] + "..."


def _number(low: float, high: float) -> Check:
    def check(value: Any) -> float:
        if (type(value) is float or type(value) is int) and low <= value <= high:
            return float(value)
        raise Wrong(f"must be a number from {low:g} to {high:g}, not {shown(value)}")

    return check


def _integer(low: int, high: int, *, none: int | None = None) -> Check:
    """Whole numbers, `2.0` as well; `none` is what others write for "no value"."""

    def check(value: Any) -> int | None:
        whole = int(value) if type(value) is float and value.is_integer() else value
        if type(whole) is not int or not (low <= whole <= high or whole == none):
            raise Wrong(f"must be a whole number from {low} to {high}, not {shown(value)}")
        return None if whole == none else whole

    return check


def _top_k(value: Any) -> Any:
    return 0 if value == -1 else _WHOLE(value)  # vLLM's -1 and llama.cpp's 0: all tokens


def _boolean(value: Any) -> bool | None:
    if type(value) is not bool:
        raise Wrong(f"must be true or false, not {shown(value)}")
    return value or None  # every key of this kind is false when absent


def _text(value: Any) -> str:
    if type(value) is not str:
        raise Wrong(f"must be a text, not {shown(value)}")
    return value


def _object(value: Any) -> dict[str, Any] | None:
    if type(value) is not dict:
        raise Wrong(f"must be an object, not {shown(value)}")
    return value or None


def _any(value: Any) -> Any:
    return value


def _only(allowed: Any, why: str) -> Check:
    """A key that only one value of can be answered."""

    def check(value: Any) -> None:
        if type(value) is not type(allowed) or value != allowed:
            raise Wrong(f"is {shown(value)}, which cannot be answered: {why}")

    return check


def _never(why: str) -> Check:
    def check(value: Any) -> None:
        if value not in (None, [], {}):
            raise Wrong(why)

    return check


def _stop(value: Any) -> tuple[str, ...] | None:
    texts = [value] if type(value) is str else value
    if type(texts) is not list or not all(type(text) is str and text for text in texts):
        raise Wrong(f"must be a text or a list of texts, none of them empty, not {shown(value)}")
    if len(texts) > MOST_STOPS:
        raise Wrong(f"has {len(texts)} texts; {MOST_STOPS} are the most")
    return tuple(texts) or None


def _logit_bias(value: Any) -> tuple[tuple[int, float], ...] | None:
    if type(value) is not dict or len(value) > MOST_BIASES:
        raise Wrong(f"must be an object of at most {MOST_BIASES} token numbers, not {shown(value)}")
    bias = _number(-100, 100)
    for token in value:
        if not (token.isascii() and token.isdigit() and len(token) < 10):
            raise Wrong(f"{shown(token)} is not a token's number")
    return tuple(sorted((int(token), bias(amount)) for token, amount in value.items())) or None


def _json_schema(value: Any) -> str:
    if type(value) is not dict:
        raise Wrong(f"must be a JSON schema, which is an object, not {shown(value)}")
    return TEXT(value)


def _response_format(value: Any) -> str | None:
    kind = value.get("type") if type(value) is dict else None
    if kind == "text":
        return None
    if kind == "json_object":
        return _json_schema(value.get("schema") or {})  # the schema is llama.cpp's addition
    if kind == "json_schema":
        inner = value.get("json_schema")
        if type(inner) is dict and type(inner.get("schema")) is dict:
            return _json_schema(inner["schema"])
        raise Wrong("json_schema needs its schema in response_format.json_schema.schema")
    raise Wrong(f'its type must be "text", "json_object" or "json_schema": {shown(value)}')


def _prompt(value: Any) -> str | tuple[int, ...]:
    if type(value) is list and len(value) == 1 and type(value[0]) in (str, list):
        value = value[0]
    if type(value) is str:
        return value
    if type(value) is list and value:
        if all(type(token) is int and 0 <= token < 1 << 31 for token in value):
            return tuple(value)
        if all(type(text) in (str, list) for text in value):
            raise Wrong(f"holds {len(value)} prompts; one line has one: write each on a line of its own")
    raise Wrong(f"must be a text or a list of token numbers, not {shown(value)}")


_ROLES = frozenset(("system", "developer", "user", "assistant", "tool", "function"))
_MESSAGE_KEYS = frozenset(
    ("role", "content", "name", "tool_calls", "tool_call_id", "function_call", "refusal", "reasoning_content",
     "reasoning", "annotations", "audio")
)  # fmt: skip


def _messages(value: Any) -> list[dict[str, Any]]:
    if type(value) is not list or not value:
        raise Wrong(f"must be a list with at least one message, not {shown(value)}")
    plain = True
    for message in value:
        # Nearly every message is a role and a text: this loop runs for a million lines.
        if not (type(message) is dict and len(message) == 2 and type(message.get("content")) is str
                and type(role := message.get("role")) is str and role in _ROLES):  # fmt: skip
            plain = False
    return value if plain else [_message(index, message) for index, message in enumerate(value)]


def _message(index: int, message: Any) -> dict[str, Any]:
    if type(message) is not dict:
        raise Wrong(f"[{index}] must be an object, not {shown(message)}")
    for key in message:
        if key not in _MESSAGE_KEYS:
            raise Wrong(f"[{index}] has the unknown key {shown(key)}; known are {', '.join(sorted(_MESSAGE_KEYS))}")
    role, content = message.get("role"), message.get("content")
    if type(role) is not str or role not in _ROLES:
        raise Wrong(f"[{index}].role must be one of {', '.join(sorted(_ROLES))}, not {shown(role)}")
    if message.get("audio") is not None:
        raise Wrong(f"[{index}].audio cannot be answered: only text is")
    if content is None and not (role == "assistant" and (message.get("tool_calls") or message.get("function_call"))):
        raise Wrong(f"[{index}] has no content")
    if type(content) is list:
        _check_parts(index, content)
    elif content is not None and type(content) is not str:
        raise Wrong(f"[{index}].content must be a text or a list of text parts, not {shown(content)}")
    for key, kind in (("tool_calls", list), ("name", str), ("tool_call_id", str), ("reasoning_content", str)):
        if message.get(key) is not None and type(message[key]) is not kind:
            raise Wrong(f"[{index}].{key} must be a {'list' if kind is list else 'text'}, not {shown(message[key])}")
    return {key: item for key, item in message.items() if item is not None}


def _check_parts(index: int, parts: list[Any]) -> None:
    for place, part in enumerate(parts):
        kind = part.get("type") if type(part) is dict else None
        if kind not in ("text", "refusal"):
            raise Wrong(f"[{index}].content[{place}] is of type {shown(kind)}; only text can be answered")
        if type(part.get(kind)) is not str:
            raise Wrong(f"[{index}].content[{place}].{kind} must be a text")
    if not parts:
        raise Wrong(f"[{index}].content has no parts")


def _tools(value: Any) -> list[dict[str, Any]] | None:
    if type(value) is not list:
        raise Wrong(f"must be a list, not {shown(value)}")
    for index, tool in enumerate(value):
        function = tool.get("function") if type(tool) is dict and tool.get("type") == "function" else None
        if type(function) is not dict or type(function.get("name")) is not str:
            raise Wrong(f'[{index}] must be {{"type": "function", "function": {{"name": ...}}}}, not {shown(tool)}')
    return value or None


def _tool_choice(value: Any) -> Any:
    if value == "auto":
        return None  # what its absence means
    if value in ("none", "required"):
        return value
    function = value.get("function") if type(value) is dict and value.get("type") == "function" else None
    if type(function) is not dict or type(function.get("name")) is not str:
        raise Wrong(f'must be "none", "auto", "required" or a function\'s name, not {shown(value)}')
    return {"type": "function", "function": {"name": function["name"]}}


def _effort(value: Any) -> dict[str, Any]:
    # As llama-server reads it: "none" switches thinking off, any other word is for the model's template.
    return {"enable_thinking": False} if _text(value) == "none" else {"reasoning_effort": value}


def _parallel(value: Any) -> bool | None:
    # true allows several calls and is kept by an answer with one; false forbids, and must reach the engine.
    return False if _boolean(value) is None else None


_ONE = "a line has one answer: write the line again with another seed and custom_id"
_LOGPROBS = _integer(0, MOST_LOGPROBS)
_MAX_TOKENS = _integer(1, (1 << 31) - 1, none=-1)
_REPEAT = _number(0.01, 100)
_WHOLE = _integer(0, (1 << 31) - 1)
_LAST_N = _integer(-1, (1 << 31) - 1)

_SHARED: dict[str, Known] = {
    "model": ("model", _text),
    "temperature": ("temperature", _number(0, 100)),
    "top_p": ("top_p", _number(0, 1)),
    "top_k": ("top_k", _top_k),
    "min_p": ("min_p", _number(0, 1)),
    "presence_penalty": ("presence_penalty", _number(-2, 2)),
    "frequency_penalty": ("frequency_penalty", _number(-2, 2)),
    "repeat_penalty": ("repeat_penalty", _REPEAT),  # llama.cpp
    "repetition_penalty": ("repeat_penalty", _REPEAT),  # vLLM
    "repeat_last_n": ("penalty_last_n", _LAST_N),
    "penalty_last_n": ("penalty_last_n", _LAST_N),
    "seed": ("seed", _integer(-_INT64, _INT64 - 1, none=-1)),  # llama.cpp's -1: drawn anew
    "max_tokens": ("max_tokens", _MAX_TOKENS),
    "stop": ("stop", _stop),
    "logit_bias": ("logit_bias", _logit_bias),
    "response_format": ("json_schema", _response_format),
    "json_schema": ("json_schema", _json_schema),  # llama.cpp
    "grammar": ("grammar", lambda value: _text(value) or None),  # llama.cpp
    "ignore_eos": ("ignore_eos", _boolean),  # llama.cpp, vLLM
    "n": (None, _only(1, _ONE)),
    "stream": ("stream", _boolean),
    "stream_options": ("stream_options", _object),
    "user": (None, _any),
    "metadata": (None, _any),
    "cache_prompt": (None, _any),  # llama.cpp: prompts are reused where they can be, whatever is said
    "timeout": ("timeout", _number(0.001, 10_000_000)),  # seconds, from when an engine took it
    "priority": ("priority", _integer(-HIGHEST_PRIORITY, HIGHEST_PRIORITY)),  # higher first
    "deadline": ("deadline", _number(0, 1e11)),  # Unix time, seconds
}  # fmt: skip

CHAT: Mapping[str, Known] = _SHARED | {
    "messages": ("messages", _messages),
    "max_completion_tokens": ("max_tokens", _MAX_TOKENS),
    "logprobs": ("logprobs", _boolean),
    "top_logprobs": ("top_logprobs", _LOGPROBS),
    "tools": ("tools", _tools),
    "tool_choice": ("tool_choice", _tool_choice),
    "parallel_tool_calls": ("parallel_tool_calls", _parallel),
    "chat_template_kwargs": ("template_arguments", _object),
    "reasoning_effort": ("effort", _effort),
    "functions": (None, _never("is OpenAI's older form: write tools")),
    "function_call": (None, _never("is OpenAI's older form: write tool_choice")),
    "audio": (None, _never("cannot be answered: only text is")),
    "modalities": (None, _only(["text"], "only text is")),
    "verbosity": (None, _only("medium", "local models have no such setting")),
    "web_search_options": (None, _never("cannot be answered: nothing is searched")),
    "prediction": (None, _any),  # speed only
    "service_tier": (None, _any),
    "store": (None, _any),
    "safety_identifier": (None, _any),
    "prompt_cache_key": (None, _any),
    "prompt_cache_retention": (None, _any),
}

COMPLETION: Mapping[str, Known] = _SHARED | {
    "prompt": ("prompt", _prompt),
    "logprobs": ("top_logprobs", _LOGPROBS),
    "echo": (None, _only(False, "the prompt is not repeated")),
    "suffix": (None, _only("", "text is only written at the end")),
    "best_of": (None, _only(1, _ONE)),
}

LINE_KEYS = frozenset(("custom_id", "method", "url", "body"))


def known_names() -> Iterable[str]:
    """Every key that a plain line may have."""
    return {"custom_id", *CHAT, *COMPLETION}
