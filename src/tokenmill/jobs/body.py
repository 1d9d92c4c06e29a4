"""OpenAI request bodies in, engine requests and OpenAI answer bodies out.

A body is checked once, where a user hands it in: `check` refuses unknown keys and values out of range by name, so that
nothing is dropped silently. `stored_call` reads a body that was checked before it was stored. Both make a `Call`: the
values, each under one name. What a file of jobs or HTTP looks like around a body is not known here.
"""

import difflib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from math import isfinite
from typing import Any, Literal, NoReturn

from tokenmill.engine.engine import Answer, Chat, Priority, Prompt, Request, Sampling, TokenLogprob, Usage
from tokenmill.errors import RequestRefused
from tokenmill.jobs.openai_schema import CHAT, COMPLETION, Key, Wrong, shown

Endpoint = Literal["chat", "completion"]
URLS: Mapping[str, Endpoint] = {"/v1/chat/completions": "chat", "/v1/completions": "completion"}
_KEYS: Mapping[Endpoint, Mapping[str, Key]] = {"chat": CHAT, "completion": COMPLETION}
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
_TOGETHER = frozenset(("grammar", "logprobs", "top_logprobs", "effort", "tool_choice", "parallel_tool_calls"))
_LOWEST_LOGPROB = -9999.0  # what OpenAI writes for a token that cannot come; JSON has no infinity


@dataclass(frozen=True, slots=True)
class Call:
    """One checked call: which endpoint, and the values that were given, each under one name."""

    endpoint: Endpoint
    values: Mapping[str, Any]

    @property
    def prompt(self) -> Prompt:
        """What the engine is to read."""
        if self.endpoint == "completion":
            prompt: str | tuple[int, ...] = self.values["prompt"]
            return prompt
        tools = self.values.get("tools", ())
        arguments = self.values.get("template_arguments", {})
        return Chat(tuple(self.values["messages"]), tuple(tools), self.values.get("tool_choice"), arguments)

    @property
    def model(self) -> str | None:
        """The model that the body names; which one answers is decided elsewhere."""
        name: str | None = self.values.get("model")
        return name

    def request(self, priority: Priority = "batch") -> Request:
        """The same for an engine."""
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


def check(endpoint: Endpoint, body: Mapping[str, Any], *, streams: bool = False) -> Call:
    """Read a body; RequestRefused names the key and what it may hold. `streams`: stream and its options are allowed."""
    return Call(endpoint, checked(endpoint, body, streams=streams))


def checked(endpoint: Endpoint, body: Mapping[str, Any], *, streams: bool = False) -> dict[str, Any]:
    """The values of a call; null says the same as absence."""
    given = _values(endpoint, body, validate=True)
    if not streams and "stream" in given:
        raise RequestRefused("stream: a job's answer comes whole", hint="leave stream out")
    return given


def stored_call(endpoint: Endpoint, body: Mapping[str, Any]) -> Call:
    """Convert a body that `check` accepted before, without checking its values again.

    Raises RequestRefused if the body cannot be decoded: the store is damaged, or another version accepted it.
    """
    try:
        return Call(endpoint, _values(endpoint, body, validate=False))
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        raise RequestRefused(
            f"the stored request cannot be decoded: {type(error).__name__}: {error}",
            hint="run tokenmill lint on the file and submit it again",
        ) from error


def _values(endpoint: Endpoint, body: Mapping[str, Any], *, validate: bool) -> dict[str, Any]:
    keys = _KEYS[endpoint]
    given = dict[str, Any]()
    name = ""
    try:
        for name, value in body.items():
            key = keys.get(name)
            if key is None:
                raise _unknown(endpoint, name)
            if value is None:
                continue
            target, check_value, convert = key
            if validate:
                check_value(value)
            if target is None:
                continue
            made = value if convert is None else convert(value)
            if made is not None and given.setdefault(target, made) != made:
                _refuse_twice()
    except Wrong as error:
        raise RequestRefused(f"{name}{'' if str(error).startswith('[') else ': '}{error}") from None
    prompt = "messages" if endpoint == "chat" else "prompt"
    if prompt not in given:
        raise RequestRefused(f"{prompt} is missing")
    if not _TOGETHER.isdisjoint(given):
        _check_together(endpoint, given)
    return given


def _refuse_twice() -> NoReturn:
    raise Wrong("is given twice, under two names that mean the same, with two values")


def _check_together(endpoint: Endpoint, given: dict[str, Any]) -> None:
    """Rules about several keys, and the folding of those that say one thing together."""
    if "grammar" in given and "json_schema" in given:
        raise RequestRefused("grammar and a JSON format cannot both hold", hint="give one of them")
    if endpoint == "completion":
        return
    if given.pop("logprobs", None):
        given.setdefault("top_logprobs", 0)
    elif given.pop("top_logprobs", 0):
        raise RequestRefused("top_logprobs needs logprobs: true")
    if "effort" in given:
        given["template_arguments"] = given.pop("effort") | given.get("template_arguments", {})
    choice = given.get("tool_choice")
    tools = given.get("tools")
    if tools is None:
        given.pop("parallel_tool_calls", None)
        if choice is not None and given.pop("tool_choice") != "none":
            raise RequestRefused("tool_choice asks for a tool, but there are no tools")
    elif isinstance(choice, dict) and all(tool["function"]["name"] != choice["function"]["name"] for tool in tools):
        raise RequestRefused(f"tool_choice: no tool is called {shown(choice['function']['name'])}")


def _unknown(endpoint: Endpoint, key: str) -> RequestRefused:
    return RequestRefused(f"unknown key {shown(key)}", hint=_nearest(endpoint, key))


@lru_cache(4096)  # a file with a wrong key has it on every line
def _nearest(endpoint: Endpoint, key: str) -> str:
    if near := difflib.get_close_matches(key[:80], _KEYS[endpoint], n=1):
        return f"did you mean {near[0]!r}?"
    other: Endpoint = "completion" if endpoint == "chat" else "chat"
    if key in _KEYS[other]:
        return f"only {'/v1/completions' if other == 'completion' else '/v1/chat/completions'} has it"
    return "nothing is ignored silently: leave it out, or use a key that is known"


def answer_body(
    endpoint: Endpoint, answer: Answer, *, id: str, model: str, created_s: float, made_by: str | None = None
) -> dict[str, Any]:
    """The answer as OpenAI's chat.completion or text_completion object; `id` without its prefix.

    `made_by`: the engine and its build, which stay with the answer: others of the same model may take it over.
    """
    chat = endpoint == "chat"
    choice: dict[str, Any] = {"index": 0}
    if chat:
        choice["message"] = _message(answer)
        choice["logprobs"] = None if answer.logprobs is None else chat_logprobs(answer.logprobs)
    else:
        choice["text"] = answer.text
        choice["logprobs"] = None if answer.logprobs is None else text_logprobs(answer.logprobs)
    choice["finish_reason"] = answer.finish_reason
    return {
        "id": f"{'chatcmpl' if chat else 'cmpl'}-{id}",
        "object": "chat.completion" if chat else "text_completion",
        "created": int(created_s),
        "model": model,
        **({} if made_by is None else {"system_fingerprint": made_by}),
        "choices": [choice],
        "usage": usage_body(answer.usage),
    }


def encode(body: Mapping[str, Any]) -> bytes:
    """A body as the bytes that are stored and sent: UTF-8, one line."""
    text = json.dumps(body, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    return text.encode("utf-8", "replace")  # half of a surrogate pair in a model's text becomes a question mark


def usage_body(usage: Usage) -> dict[str, Any]:
    """Tokens as OpenAI counts them; what the engine does not say is left out."""
    body: dict[str, Any] = {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }
    if usage.cached_tokens is not None:
        body["prompt_tokens_details"] = {"cached_tokens": usage.cached_tokens}
    return body


def _message(answer: Answer) -> dict[str, Any]:
    if answer.message is None:
        return {"role": "assistant", "content": answer.text}
    message = {"role": "assistant", "content": None, **answer.message}
    if message["content"] is None and not message.get("tool_calls"):
        message["content"] = answer.text
    return message


def chat_logprobs(tokens: tuple[TokenLogprob, ...]) -> dict[str, Any]:
    """Token probabilities as chats have them."""
    return {
        "content": [_token(token) | {"top_logprobs": [_token(top) for top in token.top]} for token in tokens],
        "refusal": None,
    }


def _token(token: TokenLogprob) -> dict[str, Any]:
    entry: dict[str, Any] = {"token": token.text, "logprob": _finite(token.logprob), "bytes": list(token.raw)}
    if token.token is not None:
        entry["id"] = token.token  # not OpenAI's: llama-server has it there, too
    return entry


def text_logprobs(tokens: tuple[TokenLogprob, ...], offset: int = 0) -> dict[str, Any]:
    """Token probabilities in the older form of completions; `offset`: of the first token in the text."""
    offsets = []
    for token in tokens:
        offsets.append(offset)
        offset += len(token.text)
    return {
        "tokens": [token.text for token in tokens],
        "token_logprobs": [_finite(token.logprob) for token in tokens],
        "top_logprobs": [{top.text: _finite(top.logprob) for top in token.top} for token in tokens],
        "text_offset": offsets,
    }


def _finite(logprob: float) -> float:
    return logprob if isfinite(logprob) else _LOWEST_LOGPROB
