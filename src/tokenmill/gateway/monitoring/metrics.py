"""/metrics: gateway and engine metrics in Prometheus' text format, following its naming rules.

Requests are counted as they end; engines are polled at each scrape. Labels come from the configuration and the code,
never from clients.
"""

from collections.abc import Iterator

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Histogram,
    ProcessCollector,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily, Metric
from prometheus_client.registry import Collector

from tokenmill.engine.engine import Counters
from tokenmill.gateway.monitoring.backend_monitor import BackendMonitor
from tokenmill.gateway.monitoring.monitor import Monitor, token_s
from tokenmill.gateway.monitoring.recorder import FinishedRequest, Missed, PriorityClass, Seen
from tokenmill.version import __version__

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
YOUNG_S = 0.9  # a more recent poll serves two scrapes
_FIRST_S = (0.01, 0.025, 0.05, 0.1, 0.2, 0.35, 0.5, 0.75, 1, 1.5, 2.5, 5, 10, 20, 40, 80, 160, 320)
_EACH_S = (0.001, 0.0025, 0.005, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1, 2.5, 5)
_WHOLE_S = (0.005, 0.025, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1800)
_ENDLESS = frozenset(("/api/events",))  # the duration of an event stream says nothing about the gateway
_ENGINE_COUNTERS = (
    (
        "prompt_tokens_computed",
        "tokenmill_engine_prompt_tokens_computed",
        "Prompt tokens that the engine computed, batches included.",
    ),
    (
        "prompt_tokens_reused",
        "tokenmill_engine_prompt_tokens_reused",
        "Prompt tokens that the engine had computed before, batches included.",
    ),
    ("generated_tokens", "tokenmill_engine_generated_tokens", "Tokens that the engine generated, batches included."),
    ("steps", "tokenmill_engine_steps", "Batches of tokens that the engine computed."),
    ("busy_s", "tokenmill_engine_busy_seconds", "Wall time in which the engine had work."),
    ("evicted_tokens", "tokenmill_engine_evicted_tokens", "Tokens dropped from the KV cells to make room."),
    ("preemptions", "tokenmill_engine_preemptions", "Sequences that had to give way and were continued later."),
    ("restarts", "tokenmill_engine_restarts", "Times the engine was started again after it died."),
)


class Metrics:
    """Prometheus counters; a `Recorder`. Uses its own registry, so that several gateways in a process do not mix."""

    def __init__(self, watch: Monitor) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]  # a series more for each counter that nobody reads
        self.registry = CollectorRegistry(auto_describe=True)
        self._watch = watch
        by = ("backend", "lane")
        self._requests = Counter(
            "tokenmill_requests", "HTTP requests, at their end.", ("route", "method", "status"), registry=self.registry
        )
        self._whole = Histogram(
            "tokenmill_request_duration_seconds",
            "From a request's headers to its answer's end.",
            ("route",),
            buckets=_WHOLE_S,
            registry=self.registry,
        )
        self._prompt = Counter(
            "tokenmill_prompt_tokens", "Prompt tokens of answered requests.", by, registry=self.registry
        )
        self._reused = Counter(
            "tokenmill_prompt_tokens_reused", "Of those, not computed again.", by, registry=self.registry
        )
        self._generated = Counter("tokenmill_generated_tokens", "Tokens of answers.", by, registry=self.registry)
        self._answers = Counter("tokenmill_answers", "Answers that were completed.", by, registry=self.registry)
        self._first = Histogram(
            "tokenmill_time_to_first_token_seconds",
            "From a request's headers to its first token.",
            by,
            buckets=_FIRST_S,
            registry=self.registry,
        )
        self._each = Histogram(
            "tokenmill_time_per_token_seconds",
            "From one token of an answer to the next.",
            by,
            buckets=_EACH_S,
            registry=self.registry,
        )
        self._errors = Counter(
            "tokenmill_errors",
            "Requests that were not answered, by the error's code.",
            ("code",),
            registry=self.registry,
        )
        self._refusals = Counter(
            "tokenmill_refusals",
            "Requests and connections that were turned away, by what for.",
            ("kind",),
            registry=self.registry,
        )
        self._missed = Counter(
            "tokenmill_missed_tokens",
            "Prompt tokens of batches that were computed again.",
            ("backend",),
            registry=self.registry,
        )
        lanes: tuple[PriorityClass, ...] = ("interactive", "batch")
        for eye in watch.eyes:
            self._missed.labels(eye.backend.name)
            for lane in lanes:
                for family in (self._prompt, self._reused, self._generated, self._answers, self._first, self._each):
                    family.labels(eye.backend.name, lane)
        self.registry.register(_Engines(watch))
        ProcessCollector(registry=self.registry)

    async def text(self) -> bytes:
        """The response to a scrape."""
        await self._watch.look(closely=False, younger_s=YOUNG_S)
        return generate_latest(self.registry)

    def request(self, seen: Seen) -> None:
        """Count a request that was answered, refused or abandoned."""
        self._requests.labels(seen.route, seen.method, str(seen.status)).inc()
        if seen.route not in _ENDLESS:
            self._whole.labels(seen.route).observe(seen.seconds)
        if seen.error is not None:
            self._errors.labels(seen.error).inc()

    def first_token(self, seconds: float, backend: str, lane: PriorityClass) -> None:
        """Record the time to the first token."""
        self._first.labels(backend, lane).observe(seconds)

    def finished(self, done: FinishedRequest) -> None:
        """Count a complete answer."""
        by = (done.backend, done.lane)
        self._answers.labels(*by).inc()
        self._prompt.labels(*by).inc(done.usage.prompt_tokens)
        self._reused.labels(*by).inc(done.usage.cached_tokens or 0)
        self._generated.labels(*by).inc(done.usage.completion_tokens)
        each_s = token_s(done)
        if each_s is not None:
            self._each.labels(*by).observe(each_s)

    def missed(self, miss: Missed) -> None:
        """Count a batch prompt whose prefix was recomputed."""
        self._missed.labels(miss.backend).inc(miss.expected_tokens - miss.cached_tokens)

    def refused(self, kind: str) -> None:
        """Count a refusal."""
        self._refusals.labels(kind).inc()


class _Engines(Collector):
    """Metrics of the last poll."""

    def __init__(self, watch: Monitor) -> None:
        self._watch = watch

    def describe(self) -> list[Metric]:
        """Metric names alone need no poll."""
        return []

    def collect(self) -> Iterator[Metric]:
        """Metric families of all engines; values that an engine does not report are missing."""
        watch = self._watch
        yield InfoMetricFamily("tokenmill_build", "This tokenmill.", {"version": __version__})
        up = GaugeMetricFamily("tokenmill_engine_up", "1 where the engine can answer, else 0.", labels=("backend",))
        for eye in watch.eyes:
            up.add_metric((eye.backend.name,), float(eye.state == "ready"))
        yield up
        for name, metric, words in _ENGINE_COUNTERS:
            family = CounterMetricFamily(metric, words, labels=("backend",))
            for backend, value in self._counted(name):
                family.add_metric((backend,), value)
            yield family
        yield from self._lanes()
        yield from self._memory()
        batches = GaugeMetricFamily("tokenmill_batches", "Batches handed in by HTTP, by status.", labels=("status",))
        for status, count in (watch.batches or {}).items():
            batches.add_metric((status,), count)
        yield batches
        yield GaugeMetricFamily("tokenmill_pages_open", "Pages that look at this gateway.", watch.clients)

    def _counted(self, name: str) -> Iterator[tuple[str, float]]:
        for eye in self._watch.eyes:
            value = getattr(_counters(eye), name)
            if value is not None:
                yield eye.backend.name, float(value)

    def _lanes(self) -> Iterator[Metric]:
        total = GaugeMetricFamily("tokenmill_lanes", "Sequences that an engine works on at once.", labels=("backend",))
        busy = GaugeMetricFamily("tokenmill_lanes_busy", "Sequences that it works on now.", labels=("backend",))
        inside = GaugeMetricFamily(
            "tokenmill_requests_inside", "Requests that were let in to an engine.", labels=("backend", "lane")
        )
        queue = GaugeMetricFamily(
            "tokenmill_requests_waiting", "Requests that wait at the gateway.", labels=("backend", "lane")
        )
        waiting = GaugeMetricFamily(
            "tokenmill_engine_sequences_waiting", "Sequences that wait inside the engine.", labels=("backend",)
        )
        used = GaugeMetricFamily("tokenmill_engine_kv_cells_used", "KV cells that hold a token.", labels=("backend",))
        cells = GaugeMetricFamily("tokenmill_engine_kv_cells", "KV cells there are.", labels=("backend",))
        lanes: tuple[PriorityClass, ...] = ("interactive", "batch")
        for eye in self._watch.eyes:
            name = (eye.backend.name,)
            gate = eye.backend.gate
            seen = _counters(eye)
            if gate.lanes is not None:
                total.add_metric(name, gate.lanes)
            busy.add_metric(name, gate.running if seen.running is None else seen.running)
            for lane in lanes:
                inside.add_metric((*name, lane), gate.inside[lane])
                queue.add_metric((*name, lane), gate.waiting(lane))
            for family, value in ((waiting, seen.waiting), (used, seen.cells_used), (cells, seen.cells_total)):
                if value is not None:
                    family.add_metric(name, value)
        yield from (total, busy, inside, queue, waiting, used, cells)

    def _memory(self) -> Iterator[Metric]:
        by = ("backend", "tier", "item", "source")
        predicted = GaugeMetricFamily("tokenmill_engine_memory_predicted_bytes", "What the plan said.", labels=by)
        measured = GaugeMetricFamily(
            "tokenmill_engine_memory_measured_bytes", "What was found after the load.", labels=by
        )
        for name, up in self._watch.state.ups.items():
            for row in up.held.rows:
                labels = (name, row.tier, row.item, row.source)
                predicted.add_metric(labels, row.predicted_bytes)
                if row.measured_bytes is not None:
                    measured.add_metric(labels, row.measured_bytes)
        yield from (predicted, measured)
        capacity = GaugeMetricFamily("tokenmill_memory_capacity_bytes", "How large a memory is.", labels=("tier",))
        free = GaugeMetricFamily("tokenmill_memory_free_bytes", "What nobody uses of it.", labels=("tier",))
        for tier, room in self._watch.rooms.items():
            for family, value in ((capacity, room.capacity_bytes), (free, room.free_bytes)):
                if value is not None:
                    family.add_metric((tier,), value)
        yield from (capacity, free)


def _counters(eye: BackendMonitor) -> Counters:
    return eye.status.counters if eye.status is not None else Counters()
