"""Scrapes read by Prometheus' own parser; the Grafana dashboard uses only metrics that exist."""

import asyncio
import json
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from support.fake_engine import FakeEngine
from support.gateway import config_in
from tokenmill.config import EngineConfig
from tokenmill.engine.engine import Timings, Usage
from tokenmill.engine.reconcile.reconcile import ReconciledItem, Reconciliation
from tokenmill.gateway.monitoring.metrics import Metrics
from tokenmill.gateway.monitoring.monitor import Monitor
from tokenmill.gateway.monitoring.recorder import FinishedRequest, PrefixMiss, RequestRecord
from tokenmill.gateway.serving import EngineSpec, state_for

DASHBOARD = Path(__file__).resolve().parents[3] / "docs" / "grafana" / "tokenmill.json"
Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]
HELD = Reconciliation(
    (
        ReconciledItem("gpu0", "weights", 1000, 900, "engine"),
        ReconciledItem("host", "kv", 50, None, "engine"),
    )
)


def scraped(folder: Path, tell: Callable[[Metrics], None] = lambda _: None) -> str:
    async def go() -> str:
        engine = FakeEngine()
        ups: Any = {"here": SimpleNamespace(held=HELD, warmth=None)}
        state = state_for(config_in(folder), [(EngineSpec("here", ("fake",), EngineConfig()), engine)], ups)
        metrics = Metrics(Monitor(state))
        tell(metrics)
        return (await metrics.text()).decode()

    return asyncio.run(go())


def samples(text: str) -> Samples:
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_names_follow_the_rules(tmp_path: Path) -> None:
    families = [one for one in text_string_to_metric_families(scraped(tmp_path)) if not one.name.startswith("process_")]
    assert len(families) > 25
    for family in families:
        assert re.fullmatch(r"tokenmill_[a-z]+(_[a-z]+)*", family.name), family.name
        assert family.documentation.endswith("."), family.name
        if family.type == "histogram":
            assert family.name.endswith("_seconds"), family.name
        if family.type == "counter":
            assert all(sample.name.endswith("_total") for sample in family.samples), family.name
        assert not any(sample.name.endswith("_created") for sample in family.samples)


def test_the_grafana_dashboard_uses_existing_metrics(tmp_path: Path) -> None:
    text = scraped(tmp_path)
    there = set(re.findall(r"^# TYPE (\S+)", text, re.MULTILINE))
    there |= {f"{name}_{part}" for name in there for part in ("bucket", "sum", "count")}
    document = json.loads(DASHBOARD.read_text(encoding="utf-8"))
    asked = set(re.findall(r"tokenmill_[a-z_]+", json.dumps([panel["targets"] for panel in document["panels"]])))
    variables = json.dumps(document["templating"])
    asked |= set(re.findall(r"tokenmill_[a-z_]+", variables))
    assert asked
    assert asked <= there
    ids = [panel["id"] for panel in document["panels"]]
    assert len(ids) == len(set(ids))


def test_the_grafana_panels_do_not_overlap() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in json.loads(DASHBOARD.read_text(encoding="utf-8"))["panels"]:
        at = panel["gridPos"]
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert not cells & taken, panel["title"]
        assert at["x"] + at["w"] <= 24
        taken |= cells


def test_recorded_events_are_counted(tmp_path: Path) -> None:
    usage = Usage(100, 11, 60)

    def tell(metrics: Metrics) -> None:
        metrics.request(
            RequestRecord("a", "POST", "/v1/chat/completions", 200, 0.4, "here", "interactive", usage=usage)
        )
        metrics.request(RequestRecord("b", "POST", "/v1/chat/completions", 429, 0.001, error="queue_full"))
        metrics.request(RequestRecord("c", "GET", "/api/events", 200, 3600.0))
        metrics.first_token(0.3, "here", "interactive")
        metrics.finished(FinishedRequest(usage, Timings(), "here", "interactive", 1.3, 0.3))
        metrics.finished(FinishedRequest(Usage(5, 1, None), Timings(), "here", "batch", 0.2, 0.1))  # no second token
        metrics.refused("queue")
        metrics.missed(PrefixMiss("here", 90, 30, "evicted"))

    found = samples(scraped(tmp_path, tell))
    chat, batch = (("backend", "here"), ("lane", "interactive")), (("backend", "here"), ("lane", "batch"))
    assert found["tokenmill_prompt_tokens_total", chat] == 100
    assert found["tokenmill_prompt_tokens_reused_total", chat] == 60
    assert found["tokenmill_generated_tokens_total", chat] == 11
    assert found["tokenmill_prompt_tokens_reused_total", batch] == 0
    assert found["tokenmill_time_to_first_token_seconds_sum", chat] == 0.3
    assert found["tokenmill_time_per_token_seconds_sum", chat] == pytest.approx(0.1)
    assert found["tokenmill_time_per_token_seconds_count", batch] == 0
    assert found["tokenmill_errors_total", (("code", "queue_full"),)] == 1
    assert found["tokenmill_refusals_total", (("kind", "queue"),)] == 1
    assert found["tokenmill_missed_tokens_total", (("backend", "here"),)] == 60
    route = (("method", "GET"), ("route", "/api/events"), ("status", "200"))
    assert found["tokenmill_requests_total", route] == 1
    assert ("tokenmill_request_duration_seconds_count", (("route", "/api/events"),)) not in found


def test_what_engines_tell_and_what_they_do_not(tmp_path: Path) -> None:
    found = samples(scraped(tmp_path))
    here = (("backend", "here"),)
    assert found["tokenmill_engine_up", here] == 1
    assert found["tokenmill_lanes", here] == 4
    assert found["tokenmill_batches", (("status", "in_progress"),)] == 0
    weights = (("backend", "here"), ("item", "weights"), ("source", "engine"), ("tier", "gpu0"))
    cache = (("backend", "here"), ("item", "kv"), ("source", "engine"), ("tier", "host"))
    assert found["tokenmill_engine_memory_predicted_bytes", weights] == 1000
    assert found["tokenmill_engine_memory_measured_bytes", weights] == 900
    assert found["tokenmill_engine_memory_predicted_bytes", cache] == 50
    assert ("tokenmill_engine_memory_measured_bytes", cache) not in found, "unknown is not 0"
    assert ("tokenmill_engine_kv_cells", here) not in found
