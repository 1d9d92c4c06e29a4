"""/api/status as plain JSON: everything that the dashboard shows. Pure, except for reading `Monitor`."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any, cast

from tokenmill.gateway.monitoring.backend_monitor import BackendMonitor
from tokenmill.gateway.monitoring.memory_view import memory_view
from tokenmill.gateway.monitoring.monitor import Monitor
from tokenmill.gateway.monitoring.throughput import quantile
from tokenmill.gateway.schemas import EngineStatusObject, Forest, Health, PrefixSegment, SlotActivity, StatusObject
from tokenmill.version import __version__

MOST_HEADS = 200
MOST_AT_WORK = 64


def status_view(watch: Monitor) -> StatusObject:
    """The status without the prefix tree."""
    state = watch.state
    states = [eye.state for eye in watch.eyes]
    up = sum(one == "ready" for one in states)
    health: Health = "ok" if up == len(states) else "degraded" if up else "down"
    if state.shutting_down.is_set():
        health = "stopping"
    tally = state.counters
    return {
        "status": health,
        "version": __version__,
        "url": state.url,
        "now_s": round(time.time(), 3),
        "started_s": round(state.started_s, 3),
        "models": [model.id for model in state.routes.models()],
        "engines": [_engine(eye) for eye in watch.eyes],
        "memory": memory_view(state.ups, watch.rooms),
        "tokens": {
            "prompt": tally.prompt_tokens,
            "reused": tally.cached_tokens,
            "generated": tally.completion_tokens,
            "answers": tally.answers,
        },
        "times": {
            "first_token_s": {
                "median": _rounded(quantile(watch.first_token_s, 0.5)),
                "p95": _rounded(quantile(watch.first_token_s, 0.95)),
                "of": len(watch.first_token_s),
            },
            "token_s": {
                "median": _rounded(quantile(watch.token_s, 0.5)),
                "p95": _rounded(quantile(watch.token_s, 0.95)),
                "of": len(watch.token_s),
            },
        },
        "batches": None if watch.batches is None else dict(watch.batches),
        "misses": list(reversed(watch.misses)),
        "errors": list(reversed(watch.errors)),
        "notices": list(reversed(watch.notices)),
    }


def heads_view(watch: Monitor) -> list[Forest]:
    """The prefix tree of every engine that reports it; of very many prefixes, the most used and their ancestors."""
    found: list[Forest] = []
    for eye in watch.eyes:
        if eye.heads is None:
            continue
        held = {digest.name: digest.held.get(eye.backend.name) for digest in watch.state.digests}
        lengths = {name: head.prompt_tokens for name, head in held.items() if head is not None}
        heads = _worth_showing(named(eye.heads, lengths))
        found.append({"engine": eye.backend.name, "total": len(eye.heads), "heads": cast(list[PrefixSegment], heads)})
    return found


def named(heads: Sequence[dict[str, Any]], lengths: Mapping[str, int]) -> list[dict[str, Any]]:
    """Prefixes with the digest that ends in each: matched by length alone, so an ambiguous length matches none."""
    names: dict[int, str] = {}
    for name, length in lengths.items():
        ends = [
            (at, head["start"] + head["tokens"])
            for at, head in enumerate(heads)
            if head["pinned"] and head["start"] < length <= head["start"] + head["tokens"]
        ]
        sure = [at for at, end in ends if end == length] or [at for at, _ in ends]
        if len(sure) == 1 and sure[0] not in names:
            names[sure[0]] = name
    return [{**head, "digest": names.get(at)} for at, head in enumerate(heads)]


def _engine(eye: BackendMonitor) -> EngineStatusObject:
    backend = eye.backend
    identity = backend.engine.identity
    gate = backend.gate
    pace = eye.pace
    counters = eye.status.counters if eye.status is not None else None
    at_work = None if eye.at_work is None else cast(list[SlotActivity], eye.at_work[:MOST_AT_WORK])
    busy = counters.running if counters is not None and counters.running is not None else gate.running
    waiting = sum(gate.waiting(lane) for lane in ("interactive", "batch")) + ((counters and counters.waiting) or 0)
    return {
        "name": backend.name,
        "state": eye.state,
        "detail": eye.detail,
        "kind": identity.kind,
        "model": identity.model,
        "model_id": identity.model_id,
        "build": identity.build,
        "context": identity.context,
        "lanes": {
            "total": gate.lanes,
            "busy": busy,
            "waiting": waiting,
            "interactive": gate.inside["interactive"],
            "batch": gate.inside["batch"],
        },
        "at_work": at_work,
        "counters": asdict(counters) if counters is not None else None,
        "rates": {
            "generated_tok_s": _rounded(pace.per_s("generated_tokens")),
            "prompt_tok_s": _rounded(pace.per_s("prompt_tokens_computed")),
            "reused_tok_s": _rounded(pace.per_s("prompt_tokens_reused")),
        },
    }


def _worth_showing(heads: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Limit to a readable number; ancestors of shown prefixes are shown too, and the order stays."""
    if len(heads) <= MOST_HEADS:
        return heads
    order = sorted(range(len(heads)), key=lambda at: (-heads[at]["pinned"], -heads[at]["hits"], heads[at]["depth"]))
    above = _parents(heads)
    kept: set[int] = set()
    for at in order:
        path = [at]
        while (parent := above[path[-1]]) is not None and parent not in kept:
            path.append(parent)
        if len(kept) + len(path) > MOST_HEADS:
            break
        kept.update(path)
    return [head for at, head in enumerate(heads) if at in kept]


def _parents(heads: list[dict[str, Any]]) -> list[int | None]:
    """Parent indexes in the list, which is the tree in depth-first order."""
    parents: list[int | None] = []
    path: list[int] = []
    for at, head in enumerate(heads):
        del path[head["depth"] :]
        parents.append(path[-1] if path else None)
        path.append(at)
    return parents


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 4)
