"""What /v1/chat/completions and /v1/completions take and give, for /openapi.json."""

from typing import Any

from tokenmill.engine.engine import MOST_LOGPROBS
from tokenmill.gateway.openapi import json_body, ref, refusals
from tokenmill.jobs.openai.requests import MAX_BIASES, MAX_STOPS

_INT31 = (1 << 31) - 1
_INT63 = (1 << 63) - 1


def _or_null(schema: dict[str, Any]) -> dict[str, Any]:
    if isinstance(schema.get("type"), str):
        return schema | {"type": [schema["type"], "null"]}
    return {"anyOf": [schema, {"type": "null"}]}


def _number(low: float, high: float, what: str) -> dict[str, Any]:
    return _or_null({"type": "number", "minimum": low, "maximum": high, "description": what})


def _whole(low: int, high: int, what: str) -> dict[str, Any]:
    return _or_null({"type": "integer", "minimum": low, "maximum": high, "description": what})


_FLAG = {"type": ["boolean", "null"]}
_ANY_OBJECT = {"type": ["object", "null"]}
_SHARED: dict[str, Any] = {
    "model": {"type": ["string", "null"], "description": "A name from /v1/models; without one, the first."},
    "temperature": _number(0, 100, "0: the likeliest token."),
    "top_p": _number(0, 1, "Share of the likeliest tokens."),
    "top_k": _whole(-1, _INT31, "The likeliest tokens; 0 and -1: all."),
    "min_p": _number(0, 1, "Least share of the likeliest token's probability."),
    "presence_penalty": _number(-2, 2, "For tokens that have come."),
    "frequency_penalty": _number(-2, 2, "For each time a token has come."),
    "repeat_penalty": _number(0.01, 100, "llama.cpp's; repetition_penalty is the same."),
    "seed": _whole(-_INT63, _INT63, "The same seed draws the same tokens; choice i uses seed + i. -1: drawn anew."),
    "max_tokens": _whole(1, _INT31, "Tokens of the answer at most; default: as far as the context goes."),
    "stop": {
        "anyOf": [
            {"type": "string", "minLength": 1},
            {"type": "array", "maxItems": MAX_STOPS, "items": {"type": "string", "minLength": 1}},
            {"type": "null"},
        ]
    },
    "logit_bias": _or_null(
        {
            "type": "object",
            "maxProperties": MAX_BIASES,
            "propertyNames": {"pattern": "^[0-9]{1,9}$"},
            "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100},
        }
    ),
    "response_format": _or_null(
        {
            "oneOf": [
                {"type": "object", "required": ["type"], "properties": {"type": {"const": "text"}}},
                {"type": "object", "required": ["type"], "properties": {"type": {"const": "json_object"}}},
                {
                    "type": "object",
                    "required": ["type", "json_schema"],
                    "properties": {
                        "type": {"const": "json_schema"},
                        "json_schema": {
                            "type": "object",
                            "required": ["schema"],
                            "properties": {"name": {"type": "string"}, "schema": {"type": "object"}},
                        },
                    },
                },
            ]
        }
    ),
    "n": _whole(1, 16, "Answers to the prompt, which is computed once; gateway.max_choices sets the most."),
    "stream": _FLAG,
    "stream_options": _or_null(
        {
            "type": "object",
            "additionalProperties": False,
            "properties": {"include_usage": {"type": "boolean"}, "include_obfuscation": {"type": "boolean"}},
        }
    ),
    "timeout": _number(0.001, 10_000_000, "Seconds that the answer may take."),
    "service_tier": {
        "enum": ["auto", "default", "flex", "scale", "priority", "fast", None],
        "description": "flex: the batch lane, behind interactive requests.",
    },
    "user": {"type": ["string", "null"]},
    "metadata": _ANY_OBJECT,
}
_MESSAGE = {
    "type": "object",
    "required": ["role"],
    "properties": {
        "role": {"enum": ["system", "developer", "user", "assistant", "tool", "function"]},
        "content": {
            "anyOf": [
                {"type": "string"},
                {"type": "null"},
                {
                    "type": "array",
                    "minItems": 1,
                    "items": {
                        "type": "object",
                        "required": ["type", "text"],
                        "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
                    },
                },
            ]
        },
        "name": {"type": "string"},
        "tool_calls": {"type": "array", "items": {"type": "object"}},
        "tool_call_id": {"type": "string"},
    },
}
_TOOL = {
    "type": "object",
    "required": ["type", "function"],
    "properties": {
        "type": {"const": "function"},
        "function": {
            "type": "object",
            "required": ["name"],
            "properties": {
                "name": {"type": "string"},
                "description": {"type": "string"},
                "parameters": {"type": "object"},
            },
        },
    },
}
_USAGE = {
    "type": "object",
    "required": ["prompt_tokens", "completion_tokens", "total_tokens"],
    "properties": {
        "prompt_tokens": {"type": "integer", "minimum": 0},
        "completion_tokens": {"type": "integer", "minimum": 0},
        "total_tokens": {"type": "integer", "minimum": 0},
        "prompt_tokens_details": {
            "type": "object",
            "properties": {"cached_tokens": {"type": "integer", "minimum": 0, "description": "Not computed again."}},
        },
    },
}
_REASON = {"enum": ["stop", "length", "tool_calls"]}


def _answer(kind: str, choice: dict[str, Any]) -> dict[str, Any]:
    return {
        "type": "object",
        "required": ["id", "object", "created", "model", "choices", "usage"],
        "properties": {
            "id": {"type": "string"},
            "object": {"const": kind},
            "created": {"type": "integer"},
            "model": {"type": "string"},
            "system_fingerprint": {"type": "string", "description": "The same for the same model and build."},
            "choices": {"type": "array", "minItems": 1, "items": choice},
            "usage": ref("Usage"),
        },
    }


SCHEMAS: dict[str, Any] = {
    "Message": _MESSAGE,
    "Tool": _TOOL,
    "Usage": _USAGE,
    "ChatRequest": {
        "type": "object",
        "required": ["messages"],
        "properties": _SHARED
        | {
            "messages": {"type": "array", "minItems": 1, "items": ref("Message")},
            "max_completion_tokens": _whole(1, _INT31, "The same as max_tokens."),
            "logprobs": _FLAG,
            "top_logprobs": _whole(0, MOST_LOGPROBS, "Needs logprobs."),
            "tools": {"type": ["array", "null"], "items": ref("Tool")},
            "tool_choice": {
                "anyOf": [{"enum": ["none", "auto", "required", None]}, {"type": "object", "required": ["function"]}]
            },
            "parallel_tool_calls": _FLAG,
            "chat_template_kwargs": _ANY_OBJECT,
            "reasoning_effort": {"type": ["string", "null"]},
            "store": _FLAG,
        },
    },
    "CompletionRequest": {
        "type": "object",
        "required": ["prompt"],
        "properties": _SHARED
        | {
            "prompt": {
                "anyOf": [
                    {"type": "string"},
                    {"type": "array", "minItems": 1, "items": {"type": "string"}},
                    {"type": "array", "minItems": 1, "items": {"type": "integer", "minimum": 0, "maximum": _INT31}},
                ]
            },
            "logprobs": _whole(0, MOST_LOGPROBS, "The likeliest tokens at each place."),
        },
    },
    "Chat": _answer(
        "chat.completion",
        {
            "type": "object",
            "required": ["index", "message", "finish_reason"],
            "properties": {
                "index": {"type": "integer"},
                "finish_reason": _REASON,
                "logprobs": {"type": ["object", "null"]},
                "message": {
                    "type": "object",
                    "required": ["role", "content"],
                    "properties": {
                        "role": {"const": "assistant"},
                        "content": {"type": ["string", "null"]},
                        "tool_calls": {"type": "array", "items": {"type": "object"}},
                        "reasoning_content": {"type": "string"},
                    },
                },
            },
        },
    ),
    "Completion": _answer(
        "text_completion",
        {
            "type": "object",
            "required": ["index", "text", "finish_reason"],
            "properties": {
                "index": {"type": "integer"},
                "text": {"type": "string"},
                "finish_reason": _REASON,
                "logprobs": {"type": ["object", "null"]},
            },
        },
    ),
}
_LANE = {
    "name": "X-Tokenmill-Lane",
    "in": "header",
    "required": False,
    "schema": {"enum": ["interactive", "batch"]},
    "description": "batch: behind interactive requests.",
}
_HEADERS = {
    "X-Tokenmill-Engine": {"schema": {"type": "string"}, "description": "The engine that answered."},
    "X-Tokenmill-Cached-Tokens": {"schema": {"type": "integer"}, "description": "Of the prompt; not with streams."},
    "X-Request-Id": {"schema": {"type": "string"}, "description": "As it was given, else made here."},
}


def _post(operation: str, summary: str, body: str, answer: str) -> dict[str, Any]:
    return {
        "post": {
            "operationId": operation,
            "summary": summary,
            "parameters": [_LANE],
            "requestBody": json_body(body),
            "responses": {
                "200": {
                    "description": "The answer, whole or, with stream, as events that end with [DONE].",
                    "headers": _HEADERS,
                    "content": {
                        "application/json": {"schema": ref(answer)},
                        "text/event-stream": {},
                    },
                },
                **refusals(400, 401, 403, 404, 408, 413, 415, 429, 501, 502, 503, 504),
            },
        }
    }


PATHS = {
    "/v1/chat/completions": _post("createChatCompletion", "Answer a conversation.", "ChatRequest", "Chat"),
    "/v1/completions": _post("createCompletion", "Continue a text.", "CompletionRequest", "Completion"),
}
