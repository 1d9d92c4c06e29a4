"""State shared by the gateway's routes: configuration, engines, access, recording and shutdown.

Created by `serving.py`; belongs to one event loop.
"""

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tokenmill.config import Config
from tokenmill.engine.pinned_prefixes import PrefixResult
from tokenmill.gateway.backends.admission import AdmissionGates
from tokenmill.gateway.backends.backend import Backend
from tokenmill.gateway.backends.routing import Routes
from tokenmill.gateway.http.keys import Keys
from tokenmill.gateway.http.rate_limits import Limiter
from tokenmill.gateway.monitoring.recorder import Recorders, RequestTally
from tokenmill.native.launching import ReadyEngine

AccessLog = Callable[[Mapping[str, Any]], None]
"""Logs one event, such as a finished request. Values are plain; bodies and keys are never passed."""


@dataclass(slots=True)
class ServedDigest:
    """A digest and the backends that hold it."""

    name: str
    file: Path
    held: dict[str, PrefixResult] = field(default_factory=dict)  # by backend


@dataclass(slots=True)
class GatewayState:
    """State shared by all requests."""

    config: Config
    state_path: Path
    backends: list[Backend]
    routes: Routes
    gates: AdmissionGates
    keys: Keys
    limiter: Limiter
    ready_engines: dict[str, ReadyEngine] = field(default_factory=dict)  # engines that this gateway started, by backend
    digests: Sequence[ServedDigest] = ()
    counters: RequestTally = field(default_factory=RequestTally)
    recorder: Recorders = field(default_factory=Recorders)  # to add a recorder, append to `recorder.all`
    log: AccessLog = lambda _: None
    started_s: float = field(default_factory=time.time)  # Unix time
    url: str = ""  # set when the gateway serves
    shutting_down: asyncio.Event = field(default_factory=asyncio.Event)  # set: no new requests are accepted
    cancelling: asyncio.Event = field(default_factory=asyncio.Event)  # set: requests in flight are being cancelled
    in_flight: set[Callable[[str], None]] = field(default_factory=set)  # cancel functions; the argument is the reason

    def __post_init__(self) -> None:
        if self.counters not in self.recorder.all:
            self.recorder.all.append(self.counters)

    @staticmethod
    def now_s() -> float:
        """Clock for request timings; uvloop rounds the event loop's time to milliseconds."""
        return time.perf_counter()

    def cancel_all(self) -> None:
        """Cancel all requests in flight; each client gets an error."""
        self.cancelling.set()
        for cancel in tuple(self.in_flight):
            cancel("stopping")

    def key_name(self, owner: str | None) -> str | None:
        """The name of an owner's key, for routes; None without one, or if the key was revoked."""
        key = self.keys.owned_by(owner)
        return key.name if key is not None else None

    def backend(self, name: str) -> Backend | None:
        """The backend with this name."""
        return next((backend for backend in self.backends if backend.name == name), None)
