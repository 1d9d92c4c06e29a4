"""Translates requests into the JSON of each server; unsupported options are refused, never dropped.

Pure. Supports the formats of llama.cpp (also used by ik_llama.cpp), of vLLM before and after it renamed guided
decoding, and OpenAI's API for all other servers.
"""

import json
import math
from dataclasses import dataclass
from typing import Any

from tokenmill.engine.engine import MAX_LOGPROBS, Capabilities, Chat, EngineKind, HttpApi, Prompt, Request, Sampling
from tokenmill.engine.media import NO_AUDIO, NO_IMAGES, has_remote_media, media_kinds
from tokenmill.engine.schema_bounds import bounded
from tokenmill.errors import RequestRefused

LLAMA: tuple[EngineKind, ...] = ("llama-server", "ik_llama")
_NAMES: dict[EngineKind, str] = {
    "llama-server": "llama-server",
    "ik_llama": "ik_llama.cpp's server",
    "vllm": "vLLM",
    "url": "this server",
}
INTERACTIVE_PRIORITY, BATCH_PRIORITY = 0, 1  # vLLM schedules lower numbers first


@dataclass(frozen=True, slots=True)
class ServerCall:
    """Path and body of a POST request."""

    path: str
    body: dict[str, Any]


def call_of(request: Request, api: HttpApi) -> ServerCall:
    """Return the call for a request; RequestRefused if the server does not support it."""
    chat = isinstance(request.prompt, Chat)
    _check_media(request.prompt, api)
    body: dict[str, Any] = {"model": api.model, "stream": True, "stream_options": {"include_usage": True}}
    body |= _prompt(request)
    body |= _common(request.sampling)
    if request.stop:
        body["stop"] = list(request.stop)
    body |= _length(request, api, chat)
    if api.kind in LLAMA:
        body |= _llama(request, api, chat)
    elif api.kind == "vllm":
        body |= _vllm(request, api, chat)
    else:
        body |= _any(request, api, chat)
    return ServerCall("/v1/chat/completions" if chat else "/v1/completions", body | dict(request.extra))


def capabilities_of(api: HttpApi, *, reports_cached: bool, saves_prefixes: bool = False) -> Capabilities:
    """Return the capabilities of a kind of server."""
    llama = api.kind in LLAMA
    vllm = api.kind == "vllm"
    return Capabilities(
        shares_prefixes=vllm,
        keeps_prefixes=llama or vllm,
        chooses_slots=llama and api.slots is not None,
        interactive_first=api.priorities,
        pins_prefixes=False,
        saves_prefixes=saves_prefixes,
        changes_threads=False,
        changes_context=False,
        reports_cached_tokens=reports_cached,
        grammar=llama or vllm,
        json_schema=True,
        logit_bias=True,
        tools_parsed=api.tools,
        max_logprobs=MAX_LOGPROBS,
        notes=_notes(api, reports_cached),
        saves_slots=llama,
        embeddings=True,
        images=api.images,
        audio=api.audio,
    )


def _notes(api: HttpApi, reports_cached: bool) -> tuple[str, ...]:
    notes = []
    if api.kind in LLAMA:
        notes.append("each slot has its own prefix cache: requests that share a prefix reuse it only in the same slot")
    if not api.priorities:
        notes.append("it processes requests in order of arrival: only requests queued in tokenmill are prioritized")
    if not reports_cached:
        notes.append("it does not report cached prompt tokens")
    if not api.tools and api.kind == "vllm":
        notes.append("it does not parse tool calls: start vLLM with --enable-auto-tool-choice and --tool-call-parser")
    elif not api.tools:
        notes.append("the model's chat template does not support tools")
    if api.kind == "url":
        notes.append("only parameters of OpenAI's API are supported: no grammar, top_k, min_p or repeat_penalty")
    return tuple(notes)


def _check_media(prompt: Prompt, api: HttpApi) -> None:
    """Refuse images and audio that the server does not accept, and URLs that it may not fetch."""
    if not isinstance(prompt, Chat):
        return
    kinds = media_kinds(prompt.messages)
    if not api.images and "image" in kinds:
        raise _cannot(api, "read images: its model has no vision projector", "start it with --mmproj", NO_IMAGES)
    if not api.audio and "audio" in kinds:
        raise _cannot(api, "read audio: its model has no audio projector", "start it with --mmproj", NO_AUDIO)
    if not api.remote_media and has_remote_media(prompt.messages):
        raise RequestRefused(
            "messages: images by URL are not allowed, because the server would fetch any address",
            param="messages",
            code="remote_media_not_allowed",
            hint="send the image as a data: URL, or set engine.remote_media",
        )


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
            raise RequestRefused(f"logit_bias: invalid token {token} or bias {bias}")
    if sampling.top_logprobs is not None and not 0 <= sampling.top_logprobs <= MAX_LOGPROBS:
        raise RequestRefused(f"top_logprobs must be 0-{MAX_LOGPROBS} (got {sampling.top_logprobs})")
    return body


def _length(request: Request, api: HttpApi, chat: bool) -> dict[str, Any]:
    if request.max_tokens is not None:
        if request.max_tokens < 1 and api.kind not in LLAMA:
            raise _cannot(api, "generate no tokens", "set max_tokens to at least 1")
        return {"max_tokens": request.max_tokens}
    if chat or api.kind in LLAMA:
        return {}
    if api.kind == "vllm":
        return {"max_tokens": None}  # the default is 16
    raise _cannot(api, "complete text without a limit", "set max_tokens; OpenAI's default is 16")


def _llama(request: Request, api: HttpApi, chat: bool) -> dict[str, Any]:
    sampling = request.sampling
    if isinstance(request.prompt, Chat) and request.prompt.tools and not api.tools:
        raise _cannot(api, "use tools: the model's chat template does not support them", "remove tools")
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
            raise _cannot(api, "combine a grammar with a JSON schema", "use only one of them")
        schema = _schema(sampling.json_schema)
        if chat:
            body["response_format"] = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
        else:
            body["json_schema"] = schema
    if sampling.logit_bias:
        # false bans a token; JSON cannot represent minus infinity
        body["logit_bias"] = [[token, False if bias == -math.inf else bias] for token, bias in sampling.logit_bias]
    if sampling.top_logprobs is not None:
        wanted = max(1, sampling.top_logprobs)  # with 0 it returns no probabilities
        body |= {"logprobs": True, "top_logprobs": wanted} if chat else {"n_probs": wanted}
    if request.ignore_eos:
        body["ignore_eos"] = True
    if request.slot is not None:
        # llama-server would silently use any slot instead of an invalid one
        if api.slots is None or not 0 <= request.slot < api.slots:
            raise RequestRefused(
                f"slot {request.slot} does not exist", hint=f"use slot 0-{(api.slots or 1) - 1}, or omit it"
            )
        body["id_slot"] = request.slot
    return body


def _vllm(request: Request, api: HttpApi, chat: bool) -> dict[str, Any]:
    sampling = request.sampling
    _refuse_slot(request, api)
    if sampling.penalty_last_n is not None:
        raise _cannot(api, "limit penalties to the last tokens", "omit penalty_last_n; vLLM considers all tokens")
    given = {"top_k": sampling.top_k, "min_p": sampling.min_p, "repetition_penalty": sampling.repeat_penalty}
    # top_k is disabled with -1, in newer versions also with 0
    body: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    body["stream_options"] = {"include_usage": True, "continuous_usage_stats": True}
    if sampling.grammar is not None and sampling.json_schema is not None:
        raise _cannot(api, "combine a grammar with a JSON schema", "use only one of them")
    if sampling.grammar is not None:
        grammar = sampling.grammar
        body |= {"guided_grammar": grammar} if api.guided else {"structured_outputs": {"grammar": grammar}}
    body |= _openai(request, api, chat)
    if request.ignore_eos:
        body["ignore_eos"] = True
    if api.priorities:
        body["priority"] = INTERACTIVE_PRIORITY if request.priority == "interactive" else BATCH_PRIORITY
    return body


def _any(request: Request, api: HttpApi, chat: bool) -> dict[str, Any]:
    sampling = request.sampling
    _refuse_slot(request, api)
    for name in ("top_k", "min_p", "repeat_penalty", "penalty_last_n", "grammar"):
        if getattr(sampling, name) is not None:
            raise _cannot(api, f"use {name}", "omit it, or pass the server's own parameter in `extra`")
    if request.ignore_eos:
        raise _cannot(api, "ignore the end-of-text token", "omit ignore_eos")
    return _openai(request, api, chat)


def _openai(request: Request, api: HttpApi, chat: bool) -> dict[str, Any]:
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
            raise _cannot(api, "ban a token completely", "use a bias of -100")
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


def _refuse_slot(request: Request, api: HttpApi) -> None:
    if request.slot is not None:
        raise _cannot(api, f"use slot {request.slot}: its slots cannot be selected", "omit slot")


def _cannot(api: HttpApi, what: str, hint: str, code: str | None = None) -> RequestRefused:
    return RequestRefused(f"{_NAMES[api.kind]} cannot {what}", hint=hint, code=code)
