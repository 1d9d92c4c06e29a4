"""Every key of OpenAI's chat and completion bodies by name, what it may hold, and what it becomes.

Each key has a check, which raises `Wrong` for a value that the key cannot have, and a conversion, which turns a value
that passed its check into what the request is made of. A body is checked once, where a user hands it in; a stored line
is only converted. Keys that our users know from llama.cpp and vLLM are here as well. What an engine can do is not known
here.
"""

import json
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from tokenmill.engine.engine import MOST_LOGPROBS

MOST_STOPS = 64
MOST_BIASES = 1024
HIGHEST_PRIORITY = 1000
_INT64 = 1 << 63

Check = Callable[[Any], None]
Convert = Callable[[Any], Any]


def _or_absent(value: Any) -> Any:
    return value or None


Key = tuple[str | None, Check, Convert | None]
"""The name in Call.values (None: the key cannot change an answer and is left out), the check, and the conversion.

A conversion returns None where the value says no more than its absence would; without one, the value stays as it is. A
plain tuple, because it is unpacked for every key of a million lines.
"""

TEXT = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode
"""JSON with the key order kept: schemas, tools and arguments mean something else in another order."""


class Wrong(ValueError):
    """A value that its key cannot have."""


def shown(value: Any) -> str:
    """A value as it stood in the file, shortened."""
    text = json.dumps(value, ensure_ascii=False, default=repr)
    return text if len(text) <= 60 else text[:57] + "..."


def _number(low: float, high: float) -> Check:
    def check(value: Any) -> None:
        if not ((type(value) is float or type(value) is int) and low <= value <= high):
            raise Wrong(f"must be a number from {low:g} to {high:g}, not {shown(value)}")

    return check


def _integer(low: int, high: int, *, none: int | None = None) -> Check:
    """Whole numbers, `2.0` as well; `none` is what others write for "no value"."""

    def check(value: Any) -> None:
        whole = int(value) if type(value) is float and value.is_integer() else value
        if type(whole) is not int or not (low <= whole <= high or whole == none):
            raise Wrong(f"must be a whole number from {low} to {high}, not {shown(value)}")

    return check


def _to_seed(value: Any) -> int | None:
    return None if value == -1 else int(value)  # llama.cpp's -1: drawn anew


def _top_k(value: Any) -> None:
    if value != -1:
        _WHOLE(value)


def _to_top_k(value: Any) -> int:
    return 0 if value == -1 else int(value)  # vLLM's -1 and llama.cpp's 0: all tokens


def _boolean(value: Any) -> None:
    if type(value) is not bool:
        raise Wrong(f"must be true or false, not {shown(value)}")


def _text(value: Any) -> None:
    if type(value) is not str:
        raise Wrong(f"must be a text, not {shown(value)}")


def _object(value: Any) -> None:
    if type(value) is not dict:
        raise Wrong(f"must be an object, not {shown(value)}")


def _any(value: Any) -> None:
    pass


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


def _stop(value: Any) -> None:
    texts = [value] if type(value) is str else value
    if type(texts) is not list or not all(type(text) is str and text for text in texts):
        raise Wrong(f"must be a text or a list of texts, none of them empty, not {shown(value)}")
    if len(texts) > MOST_STOPS:
        raise Wrong(f"has {len(texts)} texts; {MOST_STOPS} are the most")


def _to_stop(value: Any) -> tuple[str, ...] | None:
    return (value,) if type(value) is str else tuple(value) or None


def _logit_bias(value: Any) -> None:
    if type(value) is not dict or len(value) > MOST_BIASES:
        raise Wrong(f"must be an object of at most {MOST_BIASES} token numbers, not {shown(value)}")
    for token in value:
        if not (token.isascii() and token.isdigit() and len(token) < 10):
            raise Wrong(f"{shown(token)} is not a token's number")
    for amount in value.values():
        _BIAS(amount)


def _to_logit_bias(value: Any) -> tuple[tuple[int, float], ...] | None:
    return tuple(sorted((int(token), float(amount)) for token, amount in value.items())) or None


def _json_schema(value: Any) -> None:
    if type(value) is not dict:
        raise Wrong(f"must be a JSON schema, which is an object, not {shown(value)}")


def _response_format(value: Any) -> None:
    kind = value.get("type") if type(value) is dict else None
    if kind == "json_object":
        _json_schema(value.get("schema") or {})
    elif kind == "json_schema":
        inner = value.get("json_schema")
        if type(inner) is not dict or type(inner.get("schema")) is not dict:
            raise Wrong("json_schema needs its schema in response_format.json_schema.schema")
    elif kind != "text":
        raise Wrong(f'its type must be "text", "json_object" or "json_schema": {shown(value)}')


def _to_schema(value: Any) -> str | None:
    if value["type"] == "text":
        return None
    if value["type"] == "json_object":
        return TEXT(value.get("schema") or {})  # the schema is llama.cpp's addition
    return TEXT(value["json_schema"]["schema"])


def _single(prompt: Any) -> Any:
    """The prompt in a list of one."""
    if type(prompt) is list and len(prompt) == 1 and type(prompt[0]) in (str, list):
        return prompt[0]
    return prompt


def _prompt(value: Any) -> None:
    prompt = _single(value)
    if type(prompt) is str:
        return
    if type(prompt) is list and prompt:
        if all(type(token) is int and 0 <= token < 1 << 31 for token in prompt):
            return
        if all(type(text) in (str, list) for text in prompt):
            raise Wrong(f"holds {len(prompt)} prompts; one line has one: write each on a line of its own")
    raise Wrong(f"must be a text or a list of token numbers, not {shown(prompt)}")


def _to_prompt(value: Any) -> str | tuple[int, ...]:
    prompt = _single(value)
    return prompt if type(prompt) is str else tuple(prompt)


_ROLES = frozenset(("system", "developer", "user", "assistant", "tool", "function"))
_MESSAGE_KEYS = frozenset(
    (
        "role",
        "content",
        "name",
        "tool_calls",
        "tool_call_id",
        "function_call",
        "refusal",
        "reasoning_content",
        "reasoning",
        "annotations",
        "audio",
    )
)


def _messages(value: Any) -> None:
    if type(value) is not list or not value:
        raise Wrong(f"must be a list with at least one message, not {shown(value)}")
    for index, message in enumerate(value):
        # Nearly every message is a role and a text: this loop runs for a million lines.
        plain = (
            type(message) is dict
            and len(message) == 2
            and type(message.get("content")) is str
            and type(role := message.get("role")) is str
            and role in _ROLES
        )
        if not plain:
            _message(index, message)


def _to_messages(value: Any) -> Any:
    """The messages without keys that are null."""
    for message in value:
        if None in message.values():
            return [{key: item for key, item in message.items() if item is not None} for message in value]
    return value


def _message(index: int, message: Any) -> None:
    if type(message) is not dict:
        raise Wrong(f"[{index}] must be an object, not {shown(message)}")
    for key in message:
        if key not in _MESSAGE_KEYS:
            raise Wrong(f"[{index}] has the unknown key {shown(key)}; known are {', '.join(sorted(_MESSAGE_KEYS))}")
    role = message.get("role")
    content = message.get("content")
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


def _check_parts(index: int, parts: list[Any]) -> None:
    for place, part in enumerate(parts):
        kind = part.get("type") if type(part) is dict else None
        if kind not in ("text", "refusal"):
            raise Wrong(f"[{index}].content[{place}] is of type {shown(kind)}; only text can be answered")
        if type(part.get(kind)) is not str:
            raise Wrong(f"[{index}].content[{place}].{kind} must be a text")
    if not parts:
        raise Wrong(f"[{index}].content has no parts")


def _tools(value: Any) -> None:
    if type(value) is not list:
        raise Wrong(f"must be a list, not {shown(value)}")
    for index, tool in enumerate(value):
        function = tool.get("function") if type(tool) is dict and tool.get("type") == "function" else None
        if type(function) is not dict or type(function.get("name")) is not str:
            raise Wrong(f'[{index}] must be {{"type": "function", "function": {{"name": ...}}}}, not {shown(tool)}')


def _to_tools(value: Any) -> tuple[dict[str, Any], ...] | None:
    return tuple(value) or None


def _tool_choice(value: Any) -> None:
    if value in ("auto", "none", "required"):
        return
    function = value.get("function") if type(value) is dict and value.get("type") == "function" else None
    if type(function) is not dict or type(function.get("name")) is not str:
        raise Wrong(f'must be "none", "auto", "required" or a function\'s name, not {shown(value)}')


def _to_tool_choice(value: Any) -> Any:
    if type(value) is str:
        return None if value == "auto" else value  # "auto" is what its absence means
    return {"type": "function", "function": {"name": value["function"]["name"]}}


def _to_effort(value: Any) -> dict[str, Any]:
    # As llama-server reads it: "none" switches thinking off, any other word is for the model's template.
    return {"enable_thinking": False} if value == "none" else {"reasoning_effort": value}


def _to_parallel(value: Any) -> bool | None:
    # true allows several calls and is kept by an answer with one; false forbids, and must reach the engine.
    return None if value else False


_ONE = "a line has one answer: write the line again with another seed and custom_id"
_LOGPROBS = _integer(0, MOST_LOGPROBS)
_MAX_TOKENS = _integer(1, (1 << 31) - 1)
_REPEAT = _number(0.01, 100)
_WHOLE = _integer(0, (1 << 31) - 1)
_BIAS = _number(-100, 100)
_LAST_N = _integer(-1, (1 << 31) - 1)

_SHARED: dict[str, Key] = {
    "model": ("model", _text, None),
    "temperature": ("temperature", _number(0, 100), float),
    "top_p": ("top_p", _number(0, 1), float),
    "top_k": ("top_k", _top_k, _to_top_k),
    "min_p": ("min_p", _number(0, 1), float),
    "presence_penalty": ("presence_penalty", _number(-2, 2), float),
    "frequency_penalty": ("frequency_penalty", _number(-2, 2), float),
    "repeat_penalty": ("repeat_penalty", _REPEAT, float),  # llama.cpp
    "repetition_penalty": ("repeat_penalty", _REPEAT, float),  # vLLM
    "repeat_last_n": ("penalty_last_n", _LAST_N, int),
    "penalty_last_n": ("penalty_last_n", _LAST_N, int),
    "seed": ("seed", _integer(-_INT64, _INT64 - 1, none=-1), _to_seed),
    "max_tokens": ("max_tokens", _MAX_TOKENS, int),
    "stop": ("stop", _stop, _to_stop),
    "logit_bias": ("logit_bias", _logit_bias, _to_logit_bias),
    "response_format": ("json_schema", _response_format, _to_schema),
    "json_schema": ("json_schema", _json_schema, TEXT),  # llama.cpp
    "grammar": ("grammar", _text, _or_absent),  # llama.cpp
    "ignore_eos": ("ignore_eos", _boolean, _or_absent),  # llama.cpp, vLLM
    "n": (None, _only(1, _ONE), None),
    "stream": ("stream", _boolean, _or_absent),
    "stream_options": ("stream_options", _object, _or_absent),
    "user": (None, _any, None),
    "metadata": (None, _any, None),
    "cache_prompt": (None, _any, None),  # llama.cpp: prompts are reused where they can be, whatever is said
    "timeout": ("timeout", _number(0.001, 10_000_000), float),  # seconds, from when an engine took it
    "priority": ("priority", _integer(-HIGHEST_PRIORITY, HIGHEST_PRIORITY), int),  # higher first
    "deadline": ("deadline", _number(0, 1e11), float),  # Unix time, seconds
}

CHAT: Mapping[str, Key] = _SHARED | {
    "messages": ("messages", _messages, _to_messages),
    "max_completion_tokens": ("max_tokens", _MAX_TOKENS, int),
    "logprobs": ("logprobs", _boolean, _or_absent),
    "top_logprobs": ("top_logprobs", _LOGPROBS, int),
    "tools": ("tools", _tools, _to_tools),
    "tool_choice": ("tool_choice", _tool_choice, _to_tool_choice),
    "parallel_tool_calls": ("parallel_tool_calls", _boolean, _to_parallel),
    "chat_template_kwargs": ("template_arguments", _object, _or_absent),
    "reasoning_effort": ("effort", _text, _to_effort),
    "functions": (None, _never("is OpenAI's older form: write tools"), None),
    "function_call": (None, _never("is OpenAI's older form: write tool_choice"), None),
    "audio": (None, _never("cannot be answered: only text is"), None),
    "modalities": (None, _only(["text"], "only text is"), None),
    "verbosity": (None, _only("medium", "local models have no such setting"), None),
    "web_search_options": (None, _never("cannot be answered: nothing is searched"), None),
    "prediction": (None, _any, None),  # speed only
    "service_tier": (None, _any, None),
    "store": (None, _any, None),
    "safety_identifier": (None, _any, None),
    "prompt_cache_key": (None, _any, None),
    "prompt_cache_retention": (None, _any, None),
}

COMPLETION: Mapping[str, Key] = _SHARED | {
    "prompt": ("prompt", _prompt, _to_prompt),
    "logprobs": ("top_logprobs", _LOGPROBS, int),
    "echo": (None, _only(False, "the prompt is not repeated"), None),
    "suffix": (None, _only("", "text is only written at the end"), None),
    "best_of": (None, _only(1, _ONE), None),
}

LINE_KEYS = frozenset(("custom_id", "method", "url", "body"))


def known_names() -> Iterable[str]:
    """Every key that a plain line may have."""
    return {"custom_id", *CHAT, *COMPLETION}
