"""Translates requests into the JSON of each server; unsupported options are refused, never dropped.

Pure. Knows llama.cpp's server and its ik_llama.cpp fork (which share their spelling), vLLM before and after it renamed
guided decoding, and any other server of OpenAI's protocol, of which only that protocol is expected.
"""

import json
import math
from dataclasses import dataclass
from typing import Any

from tokenmill.engine.engine import MOST_LOGPROBS, Capabilities, Chat, EngineKind, Request, Sampling, Speech
from tokenmill.engine.schema_bounds import bounded
from tokenmill.errors import RequestRefused

LLAMA: tuple[EngineKind, ...] = ("llama-server", "ik_llama")
_NAMES: dict[EngineKind, str] = {
    "llama-server": "llama-server",
    "ik_llama": "ik_llama.cpp's server",
    "vllm": "vLLM",
    "url": "this server",
}
URGENT, PATIENT = 0, 1  # vLLM works on lower numbers first


@dataclass(frozen=True, slots=True)
class ServerCall:
    """Path and body of a POST request."""

    path: str
    body: dict[str, Any]


def call_of(request: Request, speech: Speech) -> ServerCall:
    """Return the call for a request; RequestRefused if the server does not support it."""
    chat = isinstance(request.prompt, Chat)
    body: dict[str, Any] = {"model": speech.model, "stream": True, "stream_options": {"include_usage": True}}
    body |= _prompt(request)
    body |= _common(request.sampling)
    if request.stop:
        body["stop"] = list(request.stop)
    body |= _length(request, speech, chat)
    if speech.kind in LLAMA:
        body |= _llama(request, speech, chat)
    elif speech.kind == "vllm":
        body |= _vllm(request, speech, chat)
    else:
        body |= _any(request, speech, chat)
    return ServerCall("/v1/chat/completions" if chat else "/v1/completions", body | dict(request.extra))


def capabilities_of(speech: Speech, *, reports_cached: bool, saves_heads: bool = False) -> Capabilities:
    """Return the capabilities of a kind of server."""
    llama = speech.kind in LLAMA
    vllm = speech.kind == "vllm"
    return Capabilities(
        shares_prefixes=vllm,
        keeps_prefixes=llama or vllm,
        chooses_lanes=llama and speech.lanes is not None,
        interactive_first=speech.priorities,
        pins_heads=False,
        saves_heads=saves_heads,
        changes_threads=False,
        changes_context=False,
        reports_cached_tokens=reports_cached,
        grammar=llama or vllm,
        json_schema=True,
        logit_bias=True,
        tools_parsed=speech.tools,
        most_logprobs=MOST_LOGPROBS,
        notes=_notes(speech, reports_cached),
        saves_slots=llama,
        embeddings=True,
    )


def _notes(speech: Speech, reports_cached: bool) -> tuple[str, ...]:
    notes = []
    if speech.kind in LLAMA:
        notes.append("every slot has its own copy of a shared head: jobs with one head belong on one lane")
    if not speech.priorities:
        notes.append("it works in the order of arrival; interactive requests go first only while they wait here")
    if not reports_cached:
        notes.append("it does not say how much of a prompt it reused")
    if not speech.tools and speech.kind == "vllm":
        notes.append("tool calls are not parsed: vLLM wants --enable-auto-tool-choice and --tool-call-parser for that")
    elif not speech.tools:
        notes.append("the model's chat template has no place for tools")
    if speech.kind == "url":
        notes.append("nothing beyond OpenAI's own protocol is asked of it: no grammar, top_k, min_p or repeat_penalty")
    return tuple(notes)


def _prompt(request: Request) -> dict[str, Any]:
    prompt = request.prompt
    if isinstance(prompt, str):
        return {"prompt": prompt}
    if isinstance(prompt, tuple):
        return {"prompt": list(prompt)}
    return chat_body(prompt)


def chat_body(chat: Chat) -> dict[str, Any]:
    """Return the body fields of a chat."""
    body: dict[str, Any] = {"messages": [dict(message) for message in chat.messages]}
    if chat.tools:
        body["tools"] = [bounded(tool) for tool in chat.tools]  # llama.cpp compiles their parameters
    if chat.tool_choice is not None:
        body["tool_choice"] = chat.tool_choice
    if chat.template_arguments:
        body["chat_template_kwargs"] = dict(chat.template_arguments)
    return body


def _common(sampling: Sampling) -> dict[str, Any]:
    """Return the body fields that all servers share."""
    names = ("temperature", "top_p", "presence_penalty", "frequency_penalty", "seed")
    body = {name: getattr(sampling, name) for name in names if getattr(sampling, name) is not None}
    for token, bias in sampling.logit_bias:
        if token < 0 or math.isnan(bias):
            raise RequestRefused(f"logit_bias: token {token} with {bias} makes no sense")
    if sampling.top_logprobs is not None and not 0 <= sampling.top_logprobs <= MOST_LOGPROBS:
        raise RequestRefused(f"top_logprobs: {sampling.top_logprobs} is not between 0 and {MOST_LOGPROBS}")
    return body


def _length(request: Request, speech: Speech, chat: bool) -> dict[str, Any]:
    if request.max_tokens is not None:
        if request.max_tokens < 1 and speech.kind not in LLAMA:
            raise _cannot(speech, "answer with no token at all", "max_tokens of at least 1")
        return {"max_tokens": request.max_tokens}
    if chat or speech.kind in LLAMA:
        return {}
    if speech.kind == "vllm":
        return {"max_tokens": None}  # left out, it would mean 16
    raise _cannot(speech, "complete text as far as the context goes", "give max_tokens: OpenAI's default is 16")


def _llama(request: Request, speech: Speech, chat: bool) -> dict[str, Any]:
    sampling = request.sampling
    if isinstance(request.prompt, Chat) and request.prompt.tools and not speech.tools:
        raise _cannot(speech, "offer tools to this model: its chat template has no place for them", "leave tools out")
    given = {
        "top_k": sampling.top_k,
        "min_p": sampling.min_p,
        "repeat_penalty": sampling.repeat_penalty,
        "repeat_last_n": sampling.penalty_last_n,
        "grammar": sampling.grammar,
    }
    body: dict[str, Any] = {"cache_prompt": True, "timings_per_token": True}
    body |= {name: value for name, value in given.items() if value is not None}
    if sampling.json_schema is not None:
        if sampling.grammar is not None:
            raise _cannot(speech, "obey a grammar and a JSON schema at once", "give one of them")
        schema = _schema(sampling.json_schema)
        if chat:
            body["response_format"] = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
        else:
            body["json_schema"] = schema
    if sampling.logit_bias:
        # false bans a token: JSON has no word for minus infinity
        body["logit_bias"] = [[token, False if bias == -math.inf else bias] for token, bias in sampling.logit_bias]
    if sampling.top_logprobs is not None:
        wanted = max(1, sampling.top_logprobs)  # with none it gives no probabilities at all
        body |= {"logprobs": True, "top_logprobs": wanted} if chat else {"n_probs": wanted}
    if request.ignore_eos:
        body["ignore_eos"] = True
    if request.lane is not None:
        # a slot it does not have is not refused by the server: it takes any
        if speech.lanes is None or not 0 <= request.lane < speech.lanes:
            raise RequestRefused(
                f"there is no lane {request.lane}", hint=f"lanes 0 to {(speech.lanes or 1) - 1}, or none for any"
            )
        body["id_slot"] = request.lane
    return body


def _vllm(request: Request, speech: Speech, chat: bool) -> dict[str, Any]:
    sampling = request.sampling
    _no_lane(request, speech)
    if sampling.penalty_last_n is not None:
        raise _cannot(speech, "limit penalties to the last tokens", "leave penalty_last_n out: it looks at all of them")
    given = {"top_k": sampling.top_k, "min_p": sampling.min_p, "repetition_penalty": sampling.repeat_penalty}
    # its word for no top_k is -1, and 0 in newer versions
    body: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    body["stream_options"] = {"include_usage": True, "continuous_usage_stats": True}
    if sampling.grammar is not None and sampling.json_schema is not None:
        raise _cannot(speech, "obey a grammar and a JSON schema at once", "give one of them")
    if sampling.grammar is not None:
        grammar = sampling.grammar
        body |= {"guided_grammar": grammar} if speech.guided else {"structured_outputs": {"grammar": grammar}}
    body |= _openai(request, speech, chat)
    if request.ignore_eos:
        body["ignore_eos"] = True
    if speech.priorities:
        body["priority"] = URGENT if request.priority == "interactive" else PATIENT
    return body


def _any(request: Request, speech: Speech, chat: bool) -> dict[str, Any]:
    sampling = request.sampling
    _no_lane(request, speech)
    for name in ("top_k", "min_p", "repeat_penalty", "penalty_last_n", "grammar"):
        if getattr(sampling, name) is not None:
            raise _cannot(speech, f"be asked for {name}", "leave it out, or pass the server's own spelling in `extra`")
    if request.ignore_eos:
        raise _cannot(speech, "be told to ignore the end of a text", "leave ignore_eos out")
    return _openai(request, speech, chat)


def _openai(request: Request, speech: Speech, chat: bool) -> dict[str, Any]:
    """Return JSON schema, logprobs and logit bias in OpenAI's format."""
    sampling = request.sampling
    body: dict[str, Any] = {}
    if sampling.json_schema is not None:
        schema = _schema(sampling.json_schema)
        body["response_format"] = (
            {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
            if schema
            else {"type": "json_object"}
        )
    if sampling.logit_bias:
        if any(math.isinf(bias) for _, bias in sampling.logit_bias):
            raise _cannot(speech, "ban a token for good", "a bias of -100 nearly does")
        body["logit_bias"] = {str(token): bias for token, bias in sampling.logit_bias}
    if sampling.top_logprobs is not None:
        top = sampling.top_logprobs
        body |= {"logprobs": True, "top_logprobs": top} if chat else {"logprobs": top}
    return body


def _schema(text: str) -> Any:
    try:
        schema = json.loads(text)
    except ValueError as error:
        raise RequestRefused(f"the JSON schema is not JSON: {error}") from error
    if not isinstance(schema, dict):
        raise RequestRefused("a JSON schema must be an object")
    return bounded(schema)


def _no_lane(request: Request, speech: Speech) -> None:
    if request.lane is not None:
        raise _cannot(speech, f"be told to use lane {request.lane}", "leave the lane out: capabilities say who can")


def _cannot(speech: Speech, what: str, hint: str) -> RequestRefused:
    return RequestRefused(f"{_NAMES[speech.kind]} cannot {what}", hint=hint)
