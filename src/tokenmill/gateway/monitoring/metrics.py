"""/metrics: gateway and engine metrics in Prometheus' text format.

Requests are counted when they end; engines are polled at each scrape. Label values come from the configuration and the
code, never from clients.
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
from tokenmill.gateway.monitoring.recorder import FinishedRequest, PrefixMiss, PriorityClass, RequestRecord
from tokenmill.version import __version__

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
MAX_AGE_S = 0.9  # a poll that is more recent is reused
_FIRST_S = (0.01, 0.025, 0.05, 0.1, 0.2, 0.35, 0.5, 0.75, 1, 1.5, 2.5, 5, 10, 20, 40, 80, 160, 320)
_EACH_S = (0.001, 0.0025, 0.005, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1, 2.5, 5)
_WHOLE_S = (0.005, 0.025, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1800)
_ENDLESS = frozenset(("/api/events",))  # the duration of an event stream is meaningless
_ENGINE_COUNTERS = (
    (
        "prompt_tokens_computed",
        "tokenmill_engine_prompt_tokens_computed",
        "Prompt tokens that the engine computed, batches included.",
    ),
    (
        "prompt_tokens_reused",
        "tokenmill_engine_prompt_tokens_reused",
        "Prompt tokens that the engine reused from its cache, batches included.",
    ),
    ("generated_tokens", "tokenmill_engine_generated_tokens", "Tokens that the engine generated, batches included."),
    ("steps", "tokenmill_engine_steps", "Steps (token batches) that the engine computed."),
    ("busy_s", "tokenmill_engine_busy_seconds", "Wall time during which the engine was computing."),
    ("evicted_tokens", "tokenmill_engine_evicted_tokens", "Tokens evicted from the KV cache."),
    ("preemptions", "tokenmill_engine_preemptions", "Sequences that were preempted and resumed later."),
    ("restarts", "tokenmill_engine_restarts", "Restarts of the engine process."),
)


class Metrics:
    """Prometheus counters; a `Recorder`. Has its own registry, so that gateways in one process do not share metrics."""

    def __init__(self, monitor: Monitor) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]  # they double the number of series
        self.registry = CollectorRegistry(auto_describe=True)
        self._monitor = monitor
        by = ("backend", "lane")
        self._requests = Counter(
            "tokenmill_requests", "Finished HTTP requests.", ("route", "method", "status"), registry=self.registry
        )
        self._duration = Histogram(
            "tokenmill_request_duration_seconds",
            "Time from a request's headers to the end of its response.",
            ("route",),
            buckets=_WHOLE_S,
            registry=self.registry,
        )
        self._prompt_tokens = Counter(
            "tokenmill_prompt_tokens", "Prompt tokens of answered requests.", by, registry=self.registry
        )
        self._reused_tokens = Counter(
            "tokenmill_prompt_tokens_reused",
            "Prompt tokens of answered requests that were reused from the cache.",
            by,
            registry=self.registry,
        )
        self._generated_tokens = Counter(
            "tokenmill_generated_tokens", "Generated tokens of answered requests.", by, registry=self.registry
        )
        self._answers = Counter("tokenmill_answers", "Completed answers.", by, registry=self.registry)
        self._first_token = Histogram(
            "tokenmill_time_to_first_token_seconds",
            "Time from a request's headers to its first token.",
            by,
            buckets=_FIRST_S,
            registry=self.registry,
        )
        self._per_token = Histogram(
            "tokenmill_time_per_token_seconds",
            "Mean time between the tokens of an answer.",
            by,
            buckets=_EACH_S,
            registry=self.registry,
        )
        self._errors = Counter(
            "tokenmill_errors",
            "Failed requests by error code.",
            ("code",),
            registry=self.registry,
        )
        self._refusals = Counter(
            "tokenmill_refusals",
            "Refused requests and connections by reason.",
            ("kind",),
            registry=self.registry,
        )
        self._missed = Counter(
            "tokenmill_missed_tokens",
            "Prompt tokens of batches that were recomputed although they should have been cached.",
            ("backend",),
            registry=self.registry,
        )
        priorities: tuple[PriorityClass, ...] = ("interactive", "batch")
        for monitored in monitor.backends:
            self._missed.labels(monitored.backend.name)
            for priority in priorities:
                for family in (
                    self._prompt_tokens,
                    self._reused_tokens,
                    self._generated_tokens,
                    self._answers,
                    self._first_token,
                    self._per_token,
                ):
                    family.labels(monitored.backend.name, priority)
        self.registry.register(_Engines(monitor))
        ProcessCollector(registry=self.registry)

    async def text(self) -> bytes:
        """The response to a scrape."""
        await self._monitor.poll(details=False, max_age_s=MAX_AGE_S)
        return generate_latest(self.registry)

    def request(self, record: RequestRecord) -> None:
        """Count a request that was answered, refused or abandoned."""
        self._requests.labels(record.route, record.method, str(record.status)).inc()
        if record.route not in _ENDLESS:
            self._duration.labels(record.route).observe(record.seconds)
        if record.error is not None:
            self._errors.labels(record.error).inc()

    def first_token(self, seconds: float, backend: str, priority: PriorityClass) -> None:
        """Record the time to the first token."""
        self._first_token.labels(backend, priority).observe(seconds)

    def finished(self, done: FinishedRequest) -> None:
        """Count a complete answer."""
        by = (done.backend, done.priority)
        self._answers.labels(*by).inc()
        self._prompt_tokens.labels(*by).inc(done.usage.prompt_tokens)
        self._reused_tokens.labels(*by).inc(done.usage.cached_tokens or 0)
        self._generated_tokens.labels(*by).inc(done.usage.completion_tokens)
        each_s = token_s(done)
        if each_s is not None:
            self._per_token.labels(*by).observe(each_s)

    def missed(self, miss: PrefixMiss) -> None:
        """Count a batch prompt whose prefix was recomputed."""
        self._missed.labels(miss.backend).inc(miss.expected_tokens - miss.cached_tokens)

    def refused(self, kind: str) -> None:
        """Count a refusal."""
        self._refusals.labels(kind).inc()


class _Engines(Collector):
    """Metrics from the last poll."""

    def __init__(self, monitor: Monitor) -> None:
        self._monitor = monitor

    def describe(self) -> list[Metric]:
        """Empty, so that registering does not poll."""
        return []

    def collect(self) -> Iterator[Metric]:
        """Metrics of all engines; values that an engine does not report are left out."""
        monitor = self._monitor
        yield InfoMetricFamily("tokenmill_build", "Version of tokenmill.", {"version": __version__})
        up = GaugeMetricFamily("tokenmill_engine_up", "1 if the engine is ready, else 0.", labels=("backend",))
        for monitored in monitor.backends:
            up.add_metric((monitored.backend.name,), float(monitored.state == "ready"))
        yield up
        for name, metric, words in _ENGINE_COUNTERS:
            family = CounterMetricFamily(metric, words, labels=("backend",))
            for backend, value in self._counted(name):
                family.add_metric((backend,), value)
            yield family
        yield from self._slots()
        yield from self._memory()
        batches = GaugeMetricFamily("tokenmill_batches", "Batches submitted by HTTP, by status.", labels=("status",))
        for status, count in (monitor.batches or {}).items():
            batches.add_metric((status,), count)
        yield batches
        yield GaugeMetricFamily("tokenmill_pages_open", "Open dashboard pages.", monitor.clients)

    def _counted(self, name: str) -> Iterator[tuple[str, float]]:
        for monitored in self._monitor.backends:
            value = getattr(_counters(monitored), name)
            if value is not None:
                yield monitored.backend.name, float(value)

    def _slots(self) -> Iterator[Metric]:
        total = GaugeMetricFamily("tokenmill_lanes", "Slots of the engine.", labels=("backend",))
        busy = GaugeMetricFamily("tokenmill_lanes_busy", "Busy slots of the engine.", labels=("backend",))
        inside = GaugeMetricFamily(
            "tokenmill_requests_inside", "Requests admitted to the engine.", labels=("backend", "lane")
        )
        queue = GaugeMetricFamily(
            "tokenmill_requests_waiting", "Requests queued at the gateway.", labels=("backend", "lane")
        )
        waiting = GaugeMetricFamily(
            "tokenmill_engine_sequences_waiting", "Sequences queued inside the engine.", labels=("backend",)
        )
        used = GaugeMetricFamily("tokenmill_engine_kv_cells_used", "KV cells in use.", labels=("backend",))
        cells = GaugeMetricFamily("tokenmill_engine_kv_cells", "KV cells of the engine.", labels=("backend",))
        priorities: tuple[PriorityClass, ...] = ("interactive", "batch")
        for monitored in self._monitor.backends:
            name = (monitored.backend.name,)
            gate = monitored.backend.gate
            counters = _counters(monitored)
            if gate.slots is not None:
                total.add_metric(name, gate.slots)
            busy.add_metric(name, gate.running if counters.running is None else counters.running)
            for priority in priorities:
                inside.add_metric((*name, priority), gate.inside[priority])
                queue.add_metric((*name, priority), gate.waiting(priority))
            for family, value in (
                (waiting, counters.waiting),
                (used, counters.cells_used),
                (cells, counters.cells_total),
            ):
                if value is not None:
                    family.add_metric(name, value)
        yield from (total, busy, inside, queue, waiting, used, cells)

    def _memory(self) -> Iterator[Metric]:
        by = ("backend", "tier", "item", "source")
        predicted = GaugeMetricFamily(
            "tokenmill_engine_memory_predicted_bytes", "Memory predicted by the plan.", labels=by
        )
        measured = GaugeMetricFamily(
            "tokenmill_engine_memory_measured_bytes", "Memory measured after the load.", labels=by
        )
        for name, ready in self._monitor.state.ready_engines.items():
            for row in ready.held.rows:
                labels = (name, row.tier, row.item, row.source)
                predicted.add_metric(labels, row.predicted_bytes)
                if row.measured_bytes is not None:
                    measured.add_metric(labels, row.measured_bytes)
        yield from (predicted, measured)
        capacity = GaugeMetricFamily("tokenmill_memory_capacity_bytes", "Capacity of a memory.", labels=("tier",))
        free = GaugeMetricFamily("tokenmill_memory_free_bytes", "Free bytes of a memory.", labels=("tier",))
        for tier, size in self._monitor.memories.items():
            for family, value in ((capacity, size.capacity_bytes), (free, size.free_bytes)):
                if value is not None:
                    family.add_metric((tier,), value)
        yield from (capacity, free)


def _counters(monitored: BackendMonitor) -> Counters:
    return monitored.status.counters if monitored.status is not None else Counters()
