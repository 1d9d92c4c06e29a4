"""State shared by the gateway's parts: configuration, engines, access, recording and shutdown.

Created by `serving.py`; belongs to one event loop.
"""

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tokenmill.config import Config
from tokenmill.engine.pinned_prefixes import WarmedHead
from tokenmill.gateway.backends.admission import AdmissionGates
from tokenmill.gateway.backends.backend import Backend, Routes
from tokenmill.gateway.http.keys import Keys
from tokenmill.gateway.http.rate_limits import Limiter
from tokenmill.gateway.monitoring.recorder import Recorders, RequestTally
from tokenmill.native.launching import ReadyEngine

AccessLog = Callable[[Mapping[str, Any]], None]
"""Called for every request with plain values: no bodies, no keys."""


@dataclass(slots=True)
class HeldDigest:
    """A named prompt prefix that the engines hold."""

    name: str
    file: Path
    held: dict[str, WarmedHead] = field(default_factory=dict)  # by backend


@dataclass(slots=True)
class GatewayState:
    """The shared state."""

    config: Config
    state_path: Path
    backends: list[Backend]
    routes: Routes
    lanes: AdmissionGates
    keys: Keys
    limiter: Limiter
    ups: dict[str, ReadyEngine] = field(
        default_factory=dict
    )  # how each of our engines started, by backend: predicted, measured
    digests: Sequence[HeldDigest] = ()
    counters: RequestTally = field(default_factory=RequestTally)
    recorder: Recorders = field(default_factory=Recorders)  # append to `recorder.all`
    log: AccessLog = lambda _: None
    started_s: float = field(default_factory=time.time)  # Unix time
    url: str = ""  # the gateway's URL, once it serves
    shutting_down: asyncio.Event = field(default_factory=asyncio.Event)  # no new requests are accepted
    hand_back: asyncio.Event = field(default_factory=asyncio.Event)  # requests in flight must end now
    at_work: set[Callable[[str], None]] = field(default_factory=set)  # cancels a request in flight, with the reason

    def __post_init__(self) -> None:
        if self.counters not in self.recorder.all:
            self.recorder.all.append(self.counters)

    @staticmethod
    def now_s() -> float:
        """Clock for request timings; an event loop's own time may be rounded to milliseconds."""
        return time.perf_counter()

    def end_all(self) -> None:
        """Cancel all requests in flight; each gets an error."""
        self.hand_back.set()
        for end in tuple(self.at_work):
            end("stopping")

    def backend(self, name: str) -> Backend | None:
        """The backend with a name."""
        return next((backend for backend in self.backends if backend.name == name), None)
