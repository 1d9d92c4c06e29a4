"""A request body as a `Call`, from which an engine request is made.

A body is validated once, with a model of `requests.py`: by `check` for a line of a batch, by `check_request` in the
gateway. `stored_call` converts a body that was validated before it was stored. All three produce the same values.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from tokenmill.engine.engine import Chat, Priority, Prompt, Request, Sampling
from tokenmill.errors import RequestRefused
from tokenmill.jobs.openai.embeddings import checked_embeddings, embedding_values
from tokenmill.jobs.openai.requests import ChatJob, ChatRequest, CompletionJob, CompletionRequest
from tokenmill.jobs.openai.responses.request import chat_body, check_response
from tokenmill.jobs.openai.validation import number_type, validate
from tokenmill.storage.json_text import compact_json, shown

Endpoint = Literal["chat", "completion", "responses", "embeddings"]
URLS: Mapping[str, Endpoint] = {
    "/v1/chat/completions": "chat",
    "/v1/completions": "completion",
    "/v1/responses": "responses",
    "/v1/embeddings": "embeddings",
}
_JOBS: Mapping[Endpoint, type[msgspec.Struct]] = {"chat": ChatJob, "completion": CompletionJob}
_REQUESTS: Mapping[Endpoint, type[msgspec.Struct]] = {"chat": ChatRequest, "completion": CompletionRequest}
_ONLY_OVER_HTTP = ("background", "previous_response_id")
_SAMPLING = (
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "repeat_penalty",
    "presence_penalty",
    "frequency_penalty",
    "penalty_last_n",
    "seed",
    "logit_bias",
    "top_logprobs",
    "grammar",
    "json_schema",
)
_HINTS = {
    "functions": "deprecated by OpenAI: use tools",
    "function_call": "deprecated by OpenAI: use tool_choice",
    "audio": "only text is supported",
    "modalities": "only text is supported",
    "verbosity": "not supported by local models",
    "web_search_options": "web search is not supported",
    "suffix": "insertion is not supported",
}
_ONE = "a job has one answer; for several, repeat the line with another seed and custom_id"


def _hints(own: type[msgspec.Struct], other: type[msgspec.Struct], url: str, **more: str) -> Mapping[str, str]:
    elsewhere = set(other.__struct_fields__) - set(own.__struct_fields__)
    return {**dict.fromkeys(elsewhere, f"only valid for {url}"), **_HINTS, **more}


_JOB_HINTS: Mapping[Endpoint, Mapping[str, str]] = {
    "chat": _hints(ChatJob, CompletionJob, "/v1/completions", n=_ONE),
    "completion": _hints(CompletionJob, ChatJob, "/v1/chat/completions", n=_ONE, best_of=_ONE),
}
_REQUEST_HINTS: Mapping[Endpoint, Mapping[str, str]] = {
    "chat": _hints(ChatRequest, CompletionRequest, "/v1/completions"),
    "completion": _hints(CompletionRequest, ChatRequest, "/v1/chat/completions"),
}


@dataclass(frozen=True, slots=True)
class Call:
    """A validated body: its endpoint, and its values under canonical names."""

    endpoint: Endpoint
    values: Mapping[str, Any]

    @property
    def prompt(self) -> Prompt:
        """The prompt for an engine."""
        if "prompt" in self.values:
            prompt: str | tuple[int, ...] = self.values["prompt"]
            return prompt
        tools = self.values.get("tools", ())
        arguments = self.values.get("template_arguments", {})
        return Chat(tuple(self.values["messages"]), tuple(tools), self.values.get("tool_choice"), arguments)

    @property
    def model(self) -> str | None:
        """The model named in the body."""
        name: str | None = self.values.get("model")
        return name

    def request(self, priority: Priority = "batch") -> Request:
        """The request for an engine."""
        values = self.values
        extra = {key: values[key] for key in ("parallel_tool_calls",) if key in values}
        return Request(
            prompt=self.prompt,
            sampling=Sampling(**{key: values[key] for key in _SAMPLING if key in values}),
            max_tokens=values.get("max_tokens"),
            stop=values.get("stop", ()),
            ignore_eos=values.get("ignore_eos", False),
            priority=priority,
            timeout_s=values.get("timeout"),
            extra=extra,
        )


def check(endpoint: Endpoint, body: Mapping[str, Any]) -> Call:
    """Validate a job's body. Raises RequestRefused, which names the key."""
    return Call(endpoint, checked(endpoint, body))


def checked(endpoint: Endpoint, body: Mapping[str, Any]) -> dict[str, Any]:
    """Like `check`, but returns only the values."""
    if endpoint == "responses":
        return _checked_response(body)
    if endpoint == "embeddings":
        return checked_embeddings(body)
    validate(_JOBS[endpoint], body, _JOB_HINTS[endpoint])
    values = _values(endpoint, body)
    if "stream" in values:
        raise RequestRefused("stream: not supported in a batch", param="stream", hint="remove stream")
    if type(values.get("prompt")) is list:
        message = f"prompt: has {len(values['prompt'])} prompts, but a job has one"
        raise RequestRefused(message, param="prompt", hint="put each prompt on its own line")
    return values


def _checked_response(body: Mapping[str, Any]) -> dict[str, Any]:
    """The values of the chat to which a response request is translated, and the body under `response`."""
    check_response(body)
    for key in _ONLY_OVER_HTTP:
        if body.get(key):
            raise RequestRefused(f"{key}: not supported in a batch", param=key, hint=f"remove {key}")
    return {**checked("chat", chat_body(body)), "response": body}


def check_request(endpoint: Endpoint, body: Mapping[str, Any]) -> dict[str, Any]:
    """Validate a body sent to the gateway; `prompt` is a list if there are several. Raises RequestRefused."""
    validate(_REQUESTS[endpoint], body, _REQUEST_HINTS[endpoint])
    return _values(endpoint, body)


def stored_call(endpoint: Endpoint, body: Mapping[str, Any]) -> Call:
    """Convert a body that `check` accepted before, without validating it again.

    Raises RequestRefused if the body cannot be decoded: the store is damaged, or another version accepted it.
    """
    try:
        if endpoint == "responses":
            return Call(endpoint, {**_values("chat", chat_body(body)), "response": body})
        if endpoint == "embeddings":
            return Call(endpoint, embedding_values(body))
        return Call(endpoint, _values(endpoint, body))
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        raise RequestRefused(
            f"the stored request cannot be decoded: {type(error).__name__}: {error}",
            hint="run tokenmill lint on the file and submit it again",
        ) from error


# ---- conversion


def _values(endpoint: Endpoint, body: Mapping[str, Any]) -> dict[str, Any]:
    """The values of a validated body under canonical names, without keys that cannot affect the answer."""
    conversions = _CONVERSIONS[endpoint]
    values: dict[str, Any] = {}
    for name, value in body.items():
        if value is None:
            continue
        target, convert = conversions[name]
        if target is None:
            continue
        made = value if convert is None else convert(value)
        if made is not None and values.setdefault(target, made) != made:
            raise RequestRefused(f"{name}: contradicts {target}", param=name, hint="give one of them")
    prompt = "messages" if endpoint == "chat" else "prompt"
    if prompt not in values:
        raise RequestRefused(f"{prompt} is missing", param=prompt)
    if not _TOGETHER.isdisjoint(values):
        _combine(endpoint, values)
    return values


_TOGETHER = frozenset(("grammar", "logprobs", "top_logprobs", "effort", "tool_choice", "parallel_tool_calls"))


def _combine(endpoint: Endpoint, values: dict[str, Any]) -> None:
    """Check rules that involve several keys, and merge related keys, in `values`."""
    if "grammar" in values and "json_schema" in values:
        raise RequestRefused("grammar: cannot be combined with a JSON format", param="grammar", hint="give one of them")
    if endpoint == "completion":
        return
    if values.pop("logprobs", None):
        values.setdefault("top_logprobs", 0)
    elif values.pop("top_logprobs", 0):
        raise RequestRefused("top_logprobs: requires logprobs to be true", param="top_logprobs")
    if "effort" in values:
        values["template_arguments"] = values.pop("effort") | values.get("template_arguments", {})
    choice = values.get("tool_choice")
    tools = values.get("tools")
    if tools is None:
        values.pop("parallel_tool_calls", None)
        if choice is not None and values.pop("tool_choice") != "none":
            raise RequestRefused("tool_choice: requires tools", param="tool_choice")
    elif isinstance(choice, dict) and all(tool["function"]["name"] != choice["function"]["name"] for tool in tools):
        name = shown(choice["function"]["name"])
        raise RequestRefused(f"tool_choice: unknown tool {name}", param="tool_choice")


def _or_absent(value: Any) -> Any:
    return value or None


def _to_seed(value: Any) -> int | None:
    return None if value == -1 else int(value)  # llama.cpp's -1: random


def _to_top_k(value: Any) -> int:
    return 0 if value == -1 else int(value)  # vLLM's -1 and llama.cpp's 0: all tokens


def _to_stop(value: Any) -> tuple[str, ...] | None:
    return (value,) if type(value) is str else tuple(value) or None


def _to_logit_bias(value: Any) -> tuple[tuple[int, float], ...] | None:
    return tuple(sorted((int(token), float(amount)) for token, amount in value.items())) or None


def _to_schema(value: Any) -> str | None:
    if value["type"] == "text":
        return None
    if value["type"] == "json_object":
        return compact_json(value.get("schema") or {})  # the schema is llama.cpp's addition
    return compact_json(value["json_schema"]["schema"])


def _to_prompt(value: Any) -> str | tuple[int, ...] | list[str | tuple[int, ...]]:
    """One prompt, or a list of several."""
    if type(value) is str:
        return value
    kinds = set(map(type, value))
    if kinds == {int}:
        return tuple(value)
    if int in kinds:
        raise RequestRefused("prompt: must be a list of tokens or of prompts, not of both", param="prompt")
    prompts = [prompt if type(prompt) is str else tuple(prompt) for prompt in value]
    return prompts if len(prompts) > 1 else prompts[0]


def _to_messages(value: Any) -> Any:
    """The messages without keys that are null."""
    for message in value:
        if len(message) > 2 and None in message.values():  # messages with two keys have only role and content
            return [{key: item for key, item in message.items() if item is not None} for message in value]
    return value


def _to_tools(value: Any) -> tuple[dict[str, Any], ...] | None:
    return tuple(value) or None


def _to_tool_choice(value: Any) -> Any:
    if type(value) is str:
        return None if value == "auto" else value  # "auto" is the default
    return {"type": "function", "function": {"name": value["function"]["name"]}}


def _to_effort(value: Any) -> dict[str, Any]:
    # As in llama-server: "none" disables thinking, other values are passed to the chat template.
    return {"enable_thinking": False} if value == "none" else {"reasoning_effort": value}


def _to_parallel(value: Any) -> bool | None:
    # true, the default, allows several calls but does not require them; false must reach the engine.
    return None if value else False


_Conversion = tuple[str | None, Callable[[Any], Any] | None]
"""Name in Call.values (None: the key cannot affect the answer), and a function that returns None for "as if absent"."""
_IGNORED: _Conversion = (None, None)
_SPECIAL: Mapping[str, _Conversion] = {
    "messages": ("messages", _to_messages),
    "prompt": ("prompt", _to_prompt),
    "top_k": ("top_k", _to_top_k),
    "repetition_penalty": ("repeat_penalty", float),
    "repeat_last_n": ("penalty_last_n", int),
    "seed": ("seed", _to_seed),
    "max_completion_tokens": ("max_tokens", int),
    "stop": ("stop", _to_stop),
    "logit_bias": ("logit_bias", _to_logit_bias),
    "response_format": ("json_schema", _to_schema),
    "json_schema": ("json_schema", compact_json),
    "grammar": ("grammar", _or_absent),
    "ignore_eos": ("ignore_eos", _or_absent),
    "stream": ("stream", _or_absent),
    "stream_options": ("stream_options", _or_absent),
    "tools": ("tools", _to_tools),
    "tool_choice": ("tool_choice", _to_tool_choice),
    "parallel_tool_calls": ("parallel_tool_calls", _to_parallel),
    "chat_template_kwargs": ("template_arguments", _or_absent),
    "reasoning_effort": ("effort", _to_effort),
    "n": _IGNORED,
    "best_of": _IGNORED,
    "user": _IGNORED,
    "metadata": _IGNORED,
    "cache_prompt": _IGNORED,
    "service_tier": _IGNORED,
    "echo": _IGNORED,
    "suffix": _IGNORED,
    "functions": _IGNORED,
    "function_call": _IGNORED,
    "audio": _IGNORED,
    "modalities": _IGNORED,
    "verbosity": _IGNORED,
    "web_search_options": _IGNORED,
    "prediction": _IGNORED,
    "store": _IGNORED,
    "safety_identifier": _IGNORED,
    "prompt_cache_key": _IGNORED,
    "prompt_cache_retention": _IGNORED,
}


def _conversions(*models: type[msgspec.Struct]) -> Mapping[str, _Conversion]:
    fields = [field for model in models for field in msgspec.structs.fields(model)]
    return {field.name: _SPECIAL.get(field.name, (field.name, number_type(field.type))) for field in fields}


_CONVERSIONS: Mapping[Endpoint, Mapping[str, _Conversion]] = {
    "chat": {**_conversions(ChatJob, ChatRequest), "logprobs": ("logprobs", _or_absent)},
    "completion": {**_conversions(CompletionJob, CompletionRequest), "logprobs": ("top_logprobs", int)},
}
