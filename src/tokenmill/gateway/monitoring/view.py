"""The JSON of /api/status and of the dashboard's events, built from a `Monitor`."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any, cast

from tokenmill.gateway.monitoring.backend_monitor import BackendMonitor
from tokenmill.gateway.monitoring.memory_view import memory_view
from tokenmill.gateway.monitoring.monitor import Monitor
from tokenmill.gateway.monitoring.throughput import quantile
from tokenmill.gateway.schemas import (
    EnginePrefixes,
    EngineStatusObject,
    Health,
    PrefixSegment,
    SlotActivity,
    StatusObject,
)
from tokenmill.version import __version__

MAX_PREFIXES = 200
MAX_RUNNING = 64


def status_view(monitor: Monitor) -> StatusObject:
    """The status without the prefix tree."""
    state = monitor.state
    states = [monitored.state for monitored in monitor.backends]
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
        "engines": [_engine(monitored) for monitored in monitor.backends],
        "memory": memory_view(state.ready_engines, monitor.memories),
        "tokens": {
            "prompt": tally.prompt_tokens,
            "reused": tally.cached_tokens,
            "generated": tally.completion_tokens,
            "answers": tally.answers,
        },
        "times": {
            "first_token_s": {
                "median": _rounded(quantile(monitor.first_token_s, 0.5)),
                "p95": _rounded(quantile(monitor.first_token_s, 0.95)),
                "of": len(monitor.first_token_s),
            },
            "token_s": {
                "median": _rounded(quantile(monitor.token_s, 0.5)),
                "p95": _rounded(quantile(monitor.token_s, 0.95)),
                "of": len(monitor.token_s),
            },
        },
        "batches": None if monitor.batches is None else dict(monitor.batches),
        "misses": list(reversed(monitor.misses)),
        "errors": list(reversed(monitor.errors)),
        "notices": list(reversed(monitor.notices)),
    }


def prefix_view(monitor: Monitor) -> list[EnginePrefixes]:
    """The prefix tree of every engine that reports one, limited to the most used prefixes and their ancestors."""
    found: list[EnginePrefixes] = []
    for monitored in monitor.backends:
        if monitored.prefixes is None:
            continue
        held = {digest.name: digest.held.get(monitored.backend.name) for digest in monitor.state.digests}
        lengths = {name: prefix.prompt_tokens for name, prefix in held.items() if prefix is not None}
        prefixes = _most_used(with_digests(monitored.prefixes, lengths))
        found.append(
            {
                "engine": monitored.backend.name,
                "total": len(monitored.prefixes),
                "segments": cast(list[PrefixSegment], prefixes),
            }
        )
    return found


def with_digests(prefixes: Sequence[dict[str, Any]], lengths: Mapping[str, int]) -> list[dict[str, Any]]:
    """The prefixes, each with the digest that ends in it. Matched by length; an ambiguous length matches none."""
    names: dict[int, str] = {}
    for name, length in lengths.items():
        ends = [
            (at, prefix["start"] + prefix["tokens"])
            for at, prefix in enumerate(prefixes)
            if prefix["pinned"] and prefix["start"] < length <= prefix["start"] + prefix["tokens"]
        ]
        sure = [at for at, end in ends if end == length] or [at for at, _ in ends]
        if len(sure) == 1 and sure[0] not in names:
            names[sure[0]] = name
    return [{**prefix, "digest": names.get(at)} for at, prefix in enumerate(prefixes)]


def _engine(monitored: BackendMonitor) -> EngineStatusObject:
    backend = monitored.backend
    identity = backend.engine.identity
    gate = backend.gate
    rates = monitored.rates
    counters = monitored.status.counters if monitored.status is not None else None
    running = None if monitored.running is None else cast(list[SlotActivity], monitored.running[:MAX_RUNNING])
    busy = counters.running if counters is not None and counters.running is not None else gate.running
    waiting = sum(gate.waiting(priority) for priority in ("interactive", "batch")) + (
        (counters and counters.waiting) or 0
    )
    return {
        "name": backend.name,
        "state": monitored.state,
        "detail": monitored.detail,
        "kind": identity.kind,
        "model": identity.model,
        "model_id": identity.model_id,
        "build": identity.build,
        "context": identity.context,
        "lanes": {
            "total": gate.slots,
            "busy": busy,
            "waiting": waiting,
            "interactive": gate.inside["interactive"],
            "batch": gate.inside["batch"],
        },
        "at_work": running,
        "counters": asdict(counters) if counters is not None else None,
        "rates": {
            "generated_tok_s": _rounded(rates.per_s("generated_tokens")),
            "prompt_tok_s": _rounded(rates.per_s("prompt_tokens_computed")),
            "reused_tok_s": _rounded(rates.per_s("prompt_tokens_reused")),
        },
    }


def _most_used(prefixes: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """At most MAX_PREFIXES prefixes, each with all its ancestors, in the same order."""
    if len(prefixes) <= MAX_PREFIXES:
        return prefixes
    order = sorted(
        range(len(prefixes)), key=lambda at: (-prefixes[at]["pinned"], -prefixes[at]["hits"], prefixes[at]["depth"])
    )
    above = _parents(prefixes)
    shown: set[int] = set()
    for at in order:
        path = [at]
        while (parent := above[path[-1]]) is not None and parent not in shown:
            path.append(parent)
        if len(shown) + len(path) > MAX_PREFIXES:
            break
        shown.update(path)
    return [prefix for at, prefix in enumerate(prefixes) if at in shown]


def _parents(prefixes: list[dict[str, Any]]) -> list[int | None]:
    """Index of each prefix's parent; the list is the tree in depth-first order."""
    parents: list[int | None] = []
    path: list[int] = []
    for at, prefix in enumerate(prefixes):
        del path[prefix["depth"] :]
        parents.append(path[-1] if path else None)
        path.append(at)
    return parents


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 4)
