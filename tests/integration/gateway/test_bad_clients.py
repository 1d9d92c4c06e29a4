"""Clients that disconnect, stall, flood or send invalid requests get a proper error and do not affect others."""

import json
import socket
from collections.abc import Iterator

import pytest

from support import patient
from support.fake_engine import FakeEngine
from support.gateway import Served
from support.gateway_clients import ask, at_work, connected, faked, post_bytes, rest_of, until
from tokenmill.gateway.http import listening

ENDLESS = 1_000_000  # tokens
Both = tuple[Served, FakeEngine]


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Both]:
    with faked(tmp_path_factory.mktemp("state"), max_body_bytes=200_000) as made:
        yield made


@pytest.mark.parametrize(
    ("content", "headers", "status", "code"),
    [
        (b"{", {}, 400, "invalid_json"),
        (b"", {}, 400, "invalid_json"),
        (b"[1]", {}, 400, "invalid_json"),
        (b"\xff\xfe", {}, 400, "invalid_json"),
        (b'{"prompt": NaN}', {}, 400, "invalid_json"),
        (b'{"prompt": "\\ud800"}', {}, 400, "invalid_json"),
        (b'{"a":' * 100 + b"1" + b"}" * 100, {}, 400, "invalid_json"),
        (b"[" * 100_000, {}, 400, "invalid_json"),
        (b'{"prompt": 1}', {}, 400, "invalid_request"),
        (b"{}", {}, 400, "invalid_request"),
        (b'{"prompt": "a", "n": 17}', {}, 400, "invalid_request"),
        (b'{"prompt": "a", "n": true}', {}, 400, "invalid_request"),
        (b'{"prompt": ["a", "b"], "n": 9}', {}, 400, "invalid_request"),
        (b'{"prompt": "a", "best_of": 3}', {}, 400, "invalid_request"),
        (b'{"prompt": "a", "priority": 3}', {}, 400, "invalid_request"),
        (b'{"prompt": "a", "service_tier": "slow"}', {}, 400, "invalid_request"),
        (b'{"prompt": "a", "stream_options": {"include_usage": true}}', {}, 400, "invalid_request"),
        (b'{"prompt": "a", "stream": true, "stream_options": {"x": true}}', {}, 400, "invalid_request"),
        (b'{"prompt": "a", "what": 1}', {}, 400, "unknown_parameter"),
        (b'{"prompt": "a"}', {"x-tokenmill-priority": "fast"}, 400, "invalid_priority"),
        (b'{"prompt": "a"}', {"x-tokenmill-lane": "fast"}, 400, "invalid_lane"),
        (b'{"prompt": "a"}', {"content-type": "text/plain"}, 415, "unsupported_media_type"),
        (b'{"prompt": "a"}', {"content-encoding": "gzip"}, 415, "unsupported_encoding"),
        (b" " * 200_001, {}, 413, "body_too_large"),
        (b'{"prompt": "long"}', {}, 400, "context_length_exceeded"),
        (b'{"prompt": "broken 1 x"}', {}, 502, "engine_error"),
    ],
)
def test_bodies(both: Both, content: bytes, headers: dict[str, str], status: int, code: str) -> None:
    given = {"content-type": "application/json", **headers}
    answer = patient.post(f"{both[0].url}/v1/completions", content=content, headers=given)
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert error["code"] == code
    assert error["message"]
    assert " is must " not in error["message"]
    assert error["source"] == ("request" if status < 500 else "engine")


def test_a_body_that_hides_its_size(both: Both) -> None:
    answer = patient.post(
        f"{both[0].url}/v1/completions", content=iter([b" " * 50_000] * 5), headers={"content-type": "application/json"}
    )
    assert answer.status_code == 413


def test_the_key_that_is_wrong_is_named(both: Both) -> None:
    for given, param in (({"temperature": "hot"}, "temperature"), ({"n": 0}, "n"), ({"tempo": 1}, "tempo")):
        assert ask(both[0], "a", **given).json()["error"]["param"] == param
    messages = {"messages": [{"role": "nobody", "content": "a"}]}
    assert patient.post(f"{both[0].url}/v1/chat/completions", json=messages).json()["error"]["param"] == "messages"


def test_unknown_paths_and_methods(both: Both) -> None:
    assert patient.get(f"{both[0].url}/v1/nothing").json()["error"]["message"] == "/v1/nothing does not exist"
    assert patient.get(f"{both[0].url}/v1/completions").status_code == 405
    assert both[0].lines[-2]["route"] == "other"


@pytest.mark.parametrize("stream", [False, True])
def test_leaving_before_the_first_token_frees_the_slot(both: Both, stream: bool) -> None:
    gateway, engine = both
    data = json.dumps({"prompt": "slow", "stream": stream}).encode()
    connection = connected(gateway, post_bytes(data))
    at_work(gateway, engine, 1)
    connection.close()
    at_work(gateway, engine, 0)
    until(lambda: gateway.lines[-1].get("error") == "client_left")
    assert gateway.lines[-1]["status"] == 499


def test_leaving_in_the_middle_of_a_stream(both: Both, monkeypatch: pytest.MonkeyPatch) -> None:
    gateway, engine = both
    monkeypatch.setattr(engine, "steady_tokens", ENDLESS)
    connection = connected(gateway, post_bytes(json.dumps({"prompt": "steady", "stream": True}).encode()))
    assert connection.recv(100).startswith(b"HTTP/1.1 200 OK")
    connection.close()
    at_work(gateway, engine, 0)
    until(lambda: gateway.lines[-1].get("error") == "client_left")
    assert engine.pieces < ENDLESS


def test_garbage_is_answered(both: Both) -> None:
    answer = rest_of(connected(both[0], b"\x16\x03\x01 not http\r\n\r\n"))
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert b"invalid_http" in answer


def test_headers_without_end(both: Both) -> None:
    connection = connected(both[0], b"GET /health HTTP/1.1\r\n")
    try:
        for number in range(2000):
            connection.sendall(f"x-{number}: {'a' * 100}\r\n".encode())
    except (BrokenPipeError, ConnectionResetError):
        pass
    connection.close()
    until(lambda: both[0].state.counters.refusals["headers"] == 1)


def test_silent_connections_are_closed_and_trickles_too(tmp_path_factory: pytest.TempPathFactory) -> None:
    with faked(tmp_path_factory.mktemp("state"), idle_timeout_s=1.0, read_timeout_s=1.0) as (gateway, _):
        silent, begun = connected(gateway), connected(gateway, b"GET /health HTT")
        used = connected(gateway, b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n")
        assert rest_of(silent) == b""
        assert rest_of(begun) == b""
        assert rest_of(used).startswith(b"HTTP/1.1 200 OK")
        promised = post_bytes(b'{"prompt": "a"}').replace(b"content-length: 15", b"content-length: 400")
        assert rest_of(connected(gateway, promised)).startswith(b"HTTP/1.1 408 ")


def test_connections_past_the_limit_are_refused_politely(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listening, "_MIN_IDLE_S", 3600.0)
    with faked(tmp_path_factory.mktemp("state"), max_connections=20) as (gateway, _):
        client = patient.client()
        assert client.get(f"{gateway.url}/health").status_code == 200
        crowd = [connected(gateway) for _ in range(19)]
        refused = [rest_of(connected(gateway)) for _ in range(50)]
        assert all(answer.startswith(b"HTTP/1.1 503 Service Unavailable\r\nretry-after: 5\r\n") for answer in refused)
        assert json.loads(refused[0].partition(b"\r\n\r\n")[2])["error"]["code"] == "too_many_connections"
        assert client.get(f"{gateway.url}/health").status_code == 200
        for connection in crowd:
            connection.close()
        until(lambda: patient.get(f"{gateway.url}/health").status_code == 200)
        assert gateway.state.counters.refusals["connections"] >= 50
        client.close()


def test_idle_connections_make_room(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listening, "_MIN_IDLE_S", 0.0)
    with faked(tmp_path_factory.mktemp("state"), max_connections=5) as (gateway, _):
        crowd = [connected(gateway) for _ in range(40)]
        assert all(patient.get(f"{gateway.url}/health").status_code == 200 for _ in range(10))
        assert gateway.state.counters.refusals["connections"] == 0
        assert rest_of(crowd[0]) == b""
        for connection in crowd[1:]:
            connection.close()


def test_a_client_that_does_not_read_is_dropped(tmp_path_factory: pytest.TempPathFactory) -> None:
    with faked(tmp_path_factory.mktemp("state"), write_timeout_s=0.3) as (gateway, engine):
        connection = socket.socket()
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect(("127.0.0.1", gateway.port))
        # pieces that are larger than all buffers on the way
        engine.piece_text = "x" * 400_000
        connection.sendall(post_bytes(json.dumps({"prompt": "steady", "stream": True}).encode()))
        until(lambda: bool(gateway.lines) and gateway.lines[-1].get("error") == "slow_client")
        at_work(gateway, engine, 0)
        connection.close()
