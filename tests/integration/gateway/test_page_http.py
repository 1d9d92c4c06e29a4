"""The dashboard's routes without a browser: access, the event stream, and the polls that it causes."""

import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from support import patient
from support.fake_engine import KILLED, FakeEngine
from support.gateway import Served, config_in, fake_engines, served
from support.gateway_clients import faked, open_gate, until
from tokenmill.engine.engine import Engine
from tokenmill.engine.restart import RestartingEngine
from tokenmill.gateway.http import keys
from tokenmill.gateway.monitoring import monitor
from tokenmill.gateway.monitoring.recorder import PrefixMiss


@contextmanager
def stream(gateway: Served, **headers: str) -> Iterator[Iterator[tuple[str, Any]]]:
    with patient.stream("GET", f"{gateway.url}/api/events", headers=headers) as answer:
        assert answer.status_code == 200
        yield events(answer)


def events(answer: httpx.Response) -> Iterator[tuple[str, Any]]:
    name = ""
    for line in answer.iter_lines():
        if line.startswith("event: "):
            name = line[7:]
        elif line.startswith("data: "):
            yield name, json.loads(line[6:])


def test_only_the_page_itself_is_open_where_keys_are(tmp_path: Path) -> None:
    key = keys.add(tmp_path, "me")
    with faked(tmp_path) as (gateway, _), patient.client(base_url=gateway.url) as client:
        page = client.get("/")
        assert page.status_code == 200
        assert b'content="wanted"' in page.content
        assert client.get("/page/app.js").status_code == 200
        for path in ("/api/status", "/api/events", "/metrics", "/page/nothing.js"):
            assert client.get(path).status_code == 401, path
        mine = {"authorization": f"Bearer {key}"}
        assert client.get("/api/status", headers=mine).status_code == 200
        assert client.get("/metrics", headers=mine).status_code == 200
        assert client.get("/page/nothing.js", headers=mine).status_code == 404
        assert client.get("/page/..%2fapi.py", headers=mine).status_code == 404


def test_every_file_of_the_page_is_strict_and_comes_from_here(tmp_path: Path) -> None:
    with faked(tmp_path) as (gateway, _), patient.client(base_url=gateway.url) as client:
        page = client.get("/")
        assert b'content="none"' in page.content
        policy = dict(part.strip().split(" ", 1) for part in page.headers["content-security-policy"].split(";"))
        assert policy["default-src"] == "'none'"
        assert {policy[name] for name in ("script-src", "style-src", "connect-src", "img-src")} == {"'self'"}
        assert policy["frame-ancestors"] == policy["base-uri"] == "'none'"
        again = client.get("/", headers={"if-none-match": page.headers["etag"]})
        assert again.status_code == 304
        for name in ("app.js", "api.js", "batches.js", "chat.js", "engines.js", "page.css", "icon.svg"):
            file = client.get(f"/page/{name}")
            assert file.headers["x-content-type-options"] == "nosniff"
            for word in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "https://"):
                assert word not in file.text, (name, word)


def test_events_come_at_once_and_end_with_the_gateway(tmp_path: Path) -> None:
    with faked(tmp_path) as (gateway, _), stream(gateway) as coming:
        assert next(coming)[0] == "history"
        name, status = next(coming)
        assert name == "status"
        assert status["status"] == "ok"
        assert status["engines"][0]["name"] == "fake"
        assert next(coming) == ("prefixes", [])  # this engine does not tell
        later = next(coming)
        assert later[0] == "status"
        assert later[1]["now_s"] > status["now_s"]
        gateway.tell_to_stop()
        assert list(coming)[-1] == ("stopping", {})


def test_engines_are_only_asked_while_somebody_looks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    told = FakeEngine.status

    async def counted(self: FakeEngine) -> Any:
        asked.append(1)
        return await told(self)

    monkeypatch.setattr(FakeEngine, "status", counted)
    with faked(tmp_path) as (gateway, _):
        assert not asked
        with stream(gateway) as coming:
            for _ in range(3):
                next(coming)
        assert asked
        parts = [one for one in gateway.state.recorder.all if isinstance(one, monitor.Monitor)]
        until(lambda: parts[0].clients == 0)


def test_no_more_pages_than_a_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(monitor, "MAX_CLIENTS", 3)
    with faked(tmp_path) as (gateway, _), ExitStack() as stack:
        kept = [stack.enter_context(stream(gateway)) for _ in range(3)]  # one that is dropped is closed
        assert {next(coming)[0] for coming in kept} == {"history"}
        with patient.stream("GET", f"{gateway.url}/api/events") as refused:
            assert refused.status_code == 429
            assert refused.headers["retry-after"]
            assert json.loads(refused.read())["error"]["code"] == "too_many_pages"
        stack.close()
        parts = [one for one in gateway.state.recorder.all if isinstance(one, monitor.Monitor)]
        until(lambda: parts[0].clients == 0)
        with stream(gateway) as coming:
            assert next(coming)[0] == "history"


def test_a_death_is_reported_before_the_next_poll(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(monitor, "POLL_S", 3600.0)  # only what wakes it can be seen in time
    lives: list[FakeEngine] = []

    async def start() -> Engine:
        await lives[0].gate_open.wait()  # until its death was seen
        lives.append(FakeEngine())
        return lives[-1]

    def make() -> list[tuple[str, Any]]:
        lives.append(FakeEngine())
        return [("fake", RestartingEngine(lives[0], start, delay=lambda *_: 0.0))]

    with served(fake_engines(make), config_in(tmp_path)) as gateway, stream(gateway) as coming:
        assert [next(coming)[0] for _ in range(3)] == ["history", "status", "prefixes"]

        async def die() -> None:
            lives[0].die(KILLED)

        gateway.call(die())
        seen = []
        for name, now in _until_back(coming):
            if name == "status":
                seen.append((now["engines"][0]["state"], now))
                open_gate(gateway, lives[0])
        states = [state for state, _ in seen]
        assert states[0] == "restarting"
        assert states[-1] == "ready"
        assert seen[0][1]["status"] == "down"
        assert seen[0][1]["engines"][0]["detail"] == KILLED
        notices = seen[-1][1]["notices"]
        assert [(one["state"], one["words"]) for one in notices] == [("ready", None), ("restarting", KILLED)]


def _until_back(coming: Iterator[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
    for name, data in coming:
        yield name, data
        if name == "status" and len(data["notices"]) == 2:
            return


def test_misses_and_errors_are_shown_with_their_reasons(tmp_path: Path) -> None:
    with faked(tmp_path) as (gateway, _):

        async def tell() -> None:
            gateway.state.recorder.missed(PrefixMiss("fake", 80, 10, "the engine dropped 70 tokens in between"))

        gateway.call(tell())
        wrong = patient.post(f"{gateway.url}/v1/completions", json={"model": "none", "prompt": "a"})
        assert wrong.status_code == 404
        now = patient.get(f"{gateway.url}/api/status").json()
        assert [(miss["words"], miss["cached_tokens"]) for miss in now["misses"]] == [
            ("the engine dropped 70 tokens in between", 10)
        ]
        assert [(one["status"], one["code"]) for one in now["errors"]] == [(404, "model_not_found")]


def test_a_batch_with_cache_misses_reports_the_reason(tmp_path: Path) -> None:
    bodies = [{"model": "fake", "prompt": f"{'what all of them share ' * 60}{number}"} for number in range(4)]
    lines = [
        {"custom_id": str(at), "method": "POST", "url": "/v1/completions", "body": body}
        for at, body in enumerate(bodies)
    ]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    with faked(tmp_path) as (gateway, _):
        client = gateway.client()
        file = client.files.create(file=("jobs.jsonl", text.encode()), purpose="batch")
        batch = client.batches.create(input_file_id=file.id, endpoint="/v1/completions", completion_window="24h")
        until(lambda: client.batches.retrieve(batch.id).status == "completed")
        now = patient.get(f"{gateway.url}/api/status").json()
        assert len(now["misses"]) == 3  # all but the first
        assert all("it reused nothing" in miss["words"] for miss in now["misses"])
        assert now["batches"]["completed"] == 1
        assert 'tokenmill_batches{status="completed"} 1.0' in patient.get(f"{gateway.url}/metrics").text
