"""Relayed requests: what the server receives, what the client receives, and which headers are removed."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from support.faulty_server import (
    ANSWER,
    CHAT,
    DONE,
    LIMIT_S,
    SORRY,
    USAGE_EVENT,
    WHOLE_STREAM,
    FaultyServer,
    engines_at,
    faulty,
)
from support.gateway import Served, config_in, served


@contextmanager
def before(server: FaultyServer, folder: Path, **settings: Any) -> Iterator[tuple[Served, httpx.Client]]:
    with (
        served(engines_at(server, **settings), config_in(folder)) as gateway,
        httpx.Client(
            base_url=gateway.url, timeout=LIMIT_S, trust_env=False, headers={"Authorization": "Bearer the-clients-own"}
        ) as client,
    ):
        yield gateway, client


@pytest.fixture
def server() -> Iterator[FaultyServer]:
    with faulty() as one:
        yield one


def test_an_answer_is_the_servers_byte_for_byte(server: FaultyServer, tmp_path: Path) -> None:
    with before(server, tmp_path) as (gateway, client):
        answer = client.post("/v1/chat/completions", json=CHAT, headers={"X-Request-Id": "mine"})
    assert (answer.status_code, answer.content) == (200, ANSWER)
    headers = answer.headers
    assert (headers["x-tokenmill-engine"], headers["x-request-id"], headers["x-odd"]) == ("first", "mine", "yes")
    assert headers["x-tokenmill-cached-tokens"] == "4"
    assert "set-cookie" not in headers
    line = next(line for line in gateway.lines if line.get("route") == "/v1/chat/completions")
    assert (line["backend"], line["prompt_tokens"], line["completion_tokens"]) == ("first", 11, 3)
    assert gateway.state.counters.answers == 1


def test_what_the_server_is_sent(server: FaultyServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("THEIR_KEY", "for-the-server")
    text = b'{"messages": [{"role":"user","content":"count"}],   "model": "alias", "max_tokens": 5}'
    with before(server, tmp_path, key_env="THEIR_KEY") as (_, client):
        client.post("/v1/chat/completions", content=text, headers={"Content-Type": "application/json", "Cookie": "c=d"})
    head, body = server.asked[0]
    assert body == text.replace(b'"alias"', b'"m"')
    assert "Authorization: Bearer for-the-server" in head
    assert "the-clients-own" not in head
    assert "c=d" not in head


def test_a_stream_is_the_servers(server: FaultyServer, tmp_path: Path) -> None:
    """Its usage, which only we asked for, is taken out; one that asked for it gets it."""
    with before(server, tmp_path) as (gateway, client):
        plain = client.post("/v1/chat/completions", json=CHAT | {"stream": True})
        asked = client.post(
            "/v1/chat/completions", json=CHAT | {"stream": True, "stream_options": {"include_usage": True}}
        )
    assert plain.content == WHOLE_STREAM + DONE
    assert asked.content == WHOLE_STREAM + USAGE_EVENT + DONE
    assert plain.headers["content-type"] == "text/event-stream"
    lines = [line for line in gateway.lines if line.get("route") == "/v1/chat/completions"]
    assert [(line["prompt_tokens"], line["cached_tokens"]) for line in lines] == [(11, 4), (11, 4)]
    assert all("first_token_ms" in line for line in lines)


def test_connections_are_kept(server: FaultyServer, tmp_path: Path) -> None:
    with before(server, tmp_path) as (_, client):
        client.post("/v1/chat/completions", json=CHAT)
        before_ = server.connections
        for _n in range(5):
            assert client.post("/v1/chat/completions", json=CHAT).status_code == 200
        assert server.connections == before_


def test_a_connection_that_was_closed_is_no_fault(server: FaultyServer, tmp_path: Path) -> None:
    with before(server, tmp_path) as (gateway, client):
        assert client.post("/v1/chat/completions", json=CHAT).status_code == 200
        server.keeps = False  # closes after the next answer, without having said so
        for _n in range(3):
            assert client.post("/v1/chat/completions", json=CHAT).status_code == 200
        assert gateway.state.backends[0].state == "ready"


@pytest.mark.parametrize(
    ("behaves", "status", "code", "check"),
    [
        ("refuses", 400, "odd", lambda answer: answer.json()["error"]["message"] == "own words"),
        ("too long", 400, "context_length_exceeded", lambda answer: answer.json()["error"]["source"] == "request"),
        ("busy", 429, "upstream_busy", lambda answer: answer.headers["retry-after"] == "7"),
        ("401", 502, "engine_error", lambda answer: "key" in answer.json()["error"]["message"]),
        ("404", 502, "engine_error", lambda answer: "it does not work" in answer.json()["error"]["message"]),
        ("502", 502, "engine_error", lambda answer: "it does not work" in answer.json()["error"]["message"]),
        ("half", 503, "engine_died", lambda answer: answer.headers["retry-after"] == "1"),
    ],
)
def test_faults_have_a_status_of_their_own(
    server: FaultyServer, tmp_path: Path, behaves: str, status: int, code: str, check: Callable[[httpx.Response], bool]
) -> None:
    server.behaves = behaves
    with before(server, tmp_path) as (_, client):
        answer = client.post("/v1/chat/completions", json=CHAT)
    assert (answer.status_code, answer.json()["error"]["code"]) == (status, code)
    assert check(answer)


def test_half_a_stream_ends_honestly(server: FaultyServer, tmp_path: Path) -> None:
    server.behaves = "half"
    with before(server, tmp_path) as (gateway, client):
        answer = client.post("/v1/chat/completions", json=CHAT | {"stream": True})
    assert answer.status_code == 200
    events = answer.content.strip().split(b"\n\n")
    assert b"[DONE]" not in answer.content
    assert json.loads(events[-1].removeprefix(b"data: "))["error"]["code"] == "engine_died"
    assert [json.loads(one[6:])["choices"][0]["delta"].get("content") for one in events[:-1]] == [None, "one", " two"]
    assert next(line for line in gateway.lines if line.get("route") == "/v1/chat/completions")["error"] == "engine_died"


def test_an_error_of_the_server_in_a_stream_is_passed_on(server: FaultyServer, tmp_path: Path) -> None:
    server.behaves = "sorry"
    options = {"stream": True, "stream_options": {"include_usage": False}}
    with before(server, tmp_path) as (gateway, client):
        answer = client.post("/v1/chat/completions", json=CHAT | options)
    assert SORRY in answer.content
    line = next(line for line in gateway.lines if line.get("route") == "/v1/chat/completions")
    assert line["error"] == "engine_error"


def test_a_client_that_leaves_is_known_to_the_server(server: FaultyServer, tmp_path: Path) -> None:
    server.behaves = "endless"
    with before(server, tmp_path) as (gateway, client):
        with client.stream("POST", "/v1/chat/completions", json=CHAT | {"stream": True}) as answer:
            parts = answer.iter_raw()
            next(parts)
            assert gateway.running() == 1
        assert server.left.wait(LIMIT_S)
        assert gateway.running() == 0
