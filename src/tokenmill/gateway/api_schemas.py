"""How /api/status, /api/events, /metrics and the page are described in /openapi.json."""

from typing import Any

from tokenmill.gateway.openapi import NO_KEY, NOT_FOUND, json_answer, ref, refusals

_BYTES = {"type": ["integer", "null"], "minimum": 0}
_RATE = {"type": ["number", "null"], "description": "Over the last few seconds; null: not known."}
_TIME = {"type": "number", "description": "Unix time in seconds."}
_COUNT = {"type": "integer", "minimum": 0}
_WORDS = {"type": ["string", "null"]}


def _object(properties: dict[str, Any], description: str | None = None) -> dict[str, Any]:
    """An object that has all of these."""
    made: dict[str, Any] = {"type": "object", "required": list(properties), "properties": properties}
    return made if description is None else {**made, "description": description}


def _list(items: dict[str, Any]) -> dict[str, Any]:
    return {"type": "array", "items": items}


_QUANTILES = _object({"median": _RATE, "p95": _RATE, "of": _COUNT}, "Of the last requests of the interactive lane.")
_PART = _object(
    {
        "engine": {"type": "string"},
        "item": {"type": "string"},
        "predicted_bytes": _BYTES,
        "measured_bytes": _BYTES,
        "source": {"enum": ["engine", "process", "driver"], "description": "Who measured it."},
        "explanation": _WORDS,
    }
)
SCHEMAS: dict[str, Any] = {
    "EngineStatus": _object(
        {
            "name": {"type": "string"},
            "state": {"type": "string"},
            "detail": _WORDS,
            "kind": {"type": "string"},
            "model": {"type": "string"},
            "model_id": {"type": "string", "description": "Of the model's very bytes."},
            "build": {"type": "string"},
            "context": {"type": ["integer", "null"]},
            "lanes": _object(
                {
                    "total": {"type": ["integer", "null"]},
                    "busy": _COUNT,
                    "waiting": _COUNT,
                    "interactive": _COUNT,
                    "batch": _COUNT,
                }
            ),
            "at_work": {
                "type": ["array", "null"],
                "description": "What each sequence that runs is doing; null: the engine does not tell.",
                "items": _object(
                    {
                        "id": {},
                        "priority": {"enum": ["interactive", "batch"]},
                        "doing": {"enum": ["waiting", "prompt", "answer"]},
                        "prompt_tokens": _COUNT,
                        "ready_tokens": _COUNT,
                        "reused_tokens": _COUNT,
                        "generated_tokens": _COUNT,
                    }
                ),
            },
            "counters": {"type": ["object", "null"], "description": "Since the engine started; null: not told."},
            "rates": _object({"generated_tok_s": _RATE, "prompt_tok_s": _RATE, "reused_tok_s": _RATE}),
        }
    ),
    "Memory": _object(
        {
            "tier": {"type": "string", "description": "gpu0, ...; host: every memory that is no GPU's."},
            "capacity_bytes": _BYTES,
            "free_bytes": _BYTES,
            "other_bytes": {**_BYTES, "description": "Used by others."},
            "parts": _list(_PART),
            "sums": {**_list(_PART), "description": "The same as the system sees it: mapped, own, total."},
        }
    ),
    "Forest": _object(
        {
            "engine": {"type": "string"},
            "total": {**_COUNT, "description": "Heads there are; the list may be shorter."},
            "heads": {
                **_list(
                    _object(
                        {
                            "depth": _COUNT,
                            "start": _COUNT,
                            "tokens": _COUNT,
                            "hits": _COUNT,
                            "pinned": {"type": "boolean"},
                            "locked": {"type": "boolean"},
                            "last_used": _COUNT,
                            "digest": _WORDS,
                        }
                    )
                ),
                "description": "Segments, depth first: a deeper segment continues the last shallower one before it.",
            },
        }
    ),
    "Status": _object(
        {
            "status": {"enum": ["ok", "degraded", "down", "stopping"]},
            "version": {"type": "string"},
            "url": {"type": "string"},
            "now_s": _TIME,
            "started_s": _TIME,
            "models": _list({"type": "string"}),
            "engines": _list(ref("EngineStatus")),
            "memory": _list(ref("Memory")),
            "tokens": _object(
                {"prompt": _COUNT, "reused": _COUNT, "generated": _COUNT, "answers": _COUNT},
                "Of requests that were answered one by one, since the gateway started.",
            ),
            "times": _object({"first_token_s": _QUANTILES, "token_s": _QUANTILES}),
            "batches": {"type": ["object", "null"], "additionalProperties": _COUNT, "description": "By status."},
            "misses": _list(
                _object(
                    {
                        "when_s": _TIME,
                        "backend": {"type": "string"},
                        "lane": {"type": "string"},
                        "prompt_tokens": _COUNT,
                        "cached_tokens": {"type": ["integer", "null"]},
                        "words": {"type": "string"},
                    }
                )
            ),
            "errors": _list(
                _object(
                    {
                        "when_s": _TIME,
                        "id": {"type": "string"},
                        "route": {"type": "string"},
                        "status": {"type": "integer"},
                        "code": {"type": "string"},
                    }
                )
            ),
            "notices": _list(
                _object({"when_s": _TIME, "backend": {"type": "string"}, "state": {"type": "string"}, "words": _WORDS})
            ),
        }
    ),
    "StatusWithForest": {
        "allOf": [
            ref("Status"),
            {"type": "object", "required": ["forest"], "properties": {"forest": _list(ref("Forest"))}},
        ],
    },
}


def _page(operation: str, summary: str, types: tuple[str, ...]) -> dict[str, Any]:
    return {
        "operationId": operation,
        "summary": summary,
        "security": [],
        "responses": {
            "200": {"description": "It.", "content": {kind: {"schema": {"type": "string"}} for kind in types}},
            "304": {"description": "It has not changed."},
            **refusals(403, 503),
        },
    }


_EVENTS = (
    "Server-sent events: `history` (once), `status` (every second), `heads` (when it has changed), `stopping` (the "
    "last). Data is JSON: a list of rates, Status, a list of Forest, an empty object."
)
PATHS: dict[str, Any] = {
    "/": {"get": _page("page", "The page for people.", ("text/html",))},
    "/page/{file}": {
        "get": {
            **_page("pageFile", "A file of the page.", ("text/javascript", "text/css", "image/svg+xml")),
            "parameters": [{"name": "file", "in": "path", "required": True, "schema": {"type": "string"}}],
            "responses": {
                **_page("", "", ("text/javascript", "text/css", "image/svg+xml"))["responses"],
                **NOT_FOUND,
                **NO_KEY,
            },
        }
    },
    "/api/status": {
        "get": {
            "operationId": "status",
            "summary": "How the gateway and its engines are, what they hold and work on.",
            "responses": {"200": json_answer("StatusWithForest", "As of now."), **NO_KEY},
        }
    },
    "/api/events": {
        "get": {
            "operationId": "events",
            "summary": "The same as it changes.",
            "responses": {
                "200": {"description": _EVENTS, "content": {"text/event-stream": {}}},
                **refusals(429),
                **NO_KEY,
            },
        }
    },
    "/metrics": {
        "get": {
            "operationId": "metrics",
            "summary": "Figures for Prometheus.",
            "responses": {
                "200": {"description": "Its text format.", "content": {"text/plain": {"schema": {"type": "string"}}}},
                **NO_KEY,
            },
        }
    },
}
