"""Access: keys, hosts, origins, limits, queues and priorities."""

import json
import ssl
from pathlib import Path

import httpx
import openai
import pytest

from support import patient
from support.fake_engine import FakeEngine, Seen
from support.gateway import config_in, fake_engines, served
from support.gateway_clients import (
    LIMIT_S,
    ask,
    at_work,
    connected,
    faked,
    in_background,
    open_gate,
    post_bytes,
    until,
)
from tokenmill.errors import ConfigError
from tokenmill.gateway.http import keys
from tokenmill.gateway.http.keys import KeyLimits

TLS = Path(__file__).parents[2] / "data" / "tls"


def test_from_the_first_key_on_everybody_needs_one(tmp_path: Path) -> None:
    with faked(tmp_path) as (gateway, _):
        assert ask(gateway, "a").status_code == 200
        secret = keys.add(tmp_path, "ann")
        until(lambda: ask(gateway, "a").status_code == 401)
        refused = ask(gateway, "a", headers={"authorization": "Bearer tm-wrong"})
        assert refused.json()["error"]["code"] == "invalid_api_key"
        assert refused.headers["www-authenticate"] == "Bearer"
        assert gateway.client(secret).completions.create(model="fake", prompt="a").choices[0].text
        until(lambda: gateway.lines[-1].get("key") == "ann")  # its line follows the answer
        assert patient.get(f"{gateway.url}/v1/models", headers={"x-api-key": secret}).status_code == 200
        assert patient.get(f"{gateway.url}/health").status_code == 200  # needs none
        with pytest.raises(openai.AuthenticationError):
            gateway.client("none").models.list()
        keys.revoke(tmp_path, "ann")  # nobody is let in afterwards, see test_tenants.py
        until(lambda: ask(gateway, "a", headers={"authorization": f"Bearer {secret}"}).status_code == 401)
        assert ask(gateway, "a").status_code == 401
        assert secret not in str(gateway.lines)


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"host": "localhost"}, 200),
        ({"host": "127.0.0.1:99"}, 200),
        ({"host": "[::1]:99"}, 200),
        ({"host": "me.localhost"}, 200),
        ({"host": "evil.example"}, 403),
        ({"host": "localhost.evil.example"}, 403),
        ({"host": ""}, 403),
        ({"host": "mill.example"}, 200),
        ({"host": "localhost:1", "origin": "http://localhost:1"}, 200),
        ({"host": "localhost:1", "origin": "http://localhost:2"}, 403),
        ({"host": "localhost", "origin": "http://evil.example"}, 403),
        ({"host": "localhost", "origin": "null"}, 403),
        ({"host": "localhost", "origin": "https://chat.example"}, 200),
    ],
)
def test_hosts_and_origins(tmp_path: Path, headers: dict[str, str], status: int) -> None:
    with faked(tmp_path, allowed_hosts=("mill.example",), allowed_origins=("https://chat.example",)) as (gateway, _):
        answer = patient.get(f"{gateway.url}/v1/models", headers=headers)
        assert answer.status_code == status
        allowed = answer.headers.get("access-control-allow-origin")
        assert allowed == ("https://chat.example" if headers.get("origin") == "https://chat.example" else None)


def test_a_page_may_ask_first(tmp_path: Path) -> None:
    keys.add(tmp_path, "ann")
    with faked(tmp_path, allowed_origins=("https://chat.example",)) as (gateway, _):
        asked = {"origin": "https://chat.example", "access-control-request-method": "POST"}
        answer = patient.request("OPTIONS", f"{gateway.url}/v1/chat/completions", headers=asked)
        assert answer.status_code == 204
        assert "POST" in answer.headers["access-control-allow-methods"]
        other = patient.request("OPTIONS", f"{gateway.url}/v1/models", headers={"origin": "http://evil.example"})
        assert other.status_code == 403


def test_limits_of_a_key(tmp_path: Path) -> None:
    busy = keys.add(tmp_path, "busy", KeyLimits(requests_at_once=1))
    often = keys.add(tmp_path, "often", KeyLimits(requests_per_minute=2))
    much = keys.add(tmp_path, "much", KeyLimits(tokens_per_minute=5))
    with faked(tmp_path) as (gateway, engine):

        def by(key: str, text: str = "abcdefgh") -> httpx.Response:
            return ask(gateway, text, headers={"authorization": f"Bearer {key}"})

        thread, first = in_background(lambda: by(busy, "gated"))
        at_work(gateway, engine, 1)
        assert by(busy).json()["error"]["code"] == "concurrency_limit_exceeded"
        open_gate(gateway, engine)
        thread.join(LIMIT_S)
        assert first[0].status_code == 200
        assert by(busy).status_code == 200
        assert [by(often).status_code for _ in range(3)] == [200, 200, 429]
        assert by(much).status_code == 200
        refused = by(much)
        assert refused.json()["error"]["type"] == "rate_limit_error"
        assert 60 <= int(refused.headers["retry-after"]) <= 120  # 12 tokens of 5 a minute: 7 in debt


def test_a_full_queue_is_refused(tmp_path: Path) -> None:
    with faked(tmp_path, in_order=True, slots=1, queue=1) as (gateway, engine):
        first = in_background(lambda: ask(gateway, "gated 1"))
        at_work(gateway, engine, 1)
        second = in_background(lambda: ask(gateway, "gated 2"))
        gate = gateway.state.backends[0].gate
        until(lambda: gate.waiting("interactive") == 1)
        refused = ask(gateway, "a")
        assert refused.status_code == 429
        assert refused.json()["error"]["code"] == "queue_full"
        assert int(refused.headers["retry-after"]) >= 1
        open_gate(gateway, engine)
        for thread, box in (first, second):
            thread.join(LIMIT_S)
            assert box[0].status_code == 200
        assert engine.seen.most_at_once == 1
        assert gateway.state.counters.refusals["queue"] == 1


def test_interactive_before_batch(tmp_path: Path) -> None:
    with faked(tmp_path, in_order=True, slots=1) as (gateway, engine):
        gate = gateway.state.backends[0].gate
        work = [in_background(lambda: ask(gateway, "gated first"))]
        at_work(gateway, engine, 1)
        work.append(in_background(lambda: ask(gateway, "patient", service_tier="flex")))
        until(lambda: gate.waiting("batch") == 1)
        work.append(in_background(lambda: ask(gateway, "urgent")))
        until(lambda: gate.waiting("interactive") == 1)
        open_gate(gateway, engine)
        for thread, _ in work:
            thread.join(LIMIT_S)
        assert engine.seen.streams == ["gated first", "urgent", "patient"]


def test_a_client_that_leaves_the_queue_frees_its_place(tmp_path: Path) -> None:
    with faked(tmp_path, in_order=True, slots=1) as (gateway, engine):
        gate = gateway.state.backends[0].gate
        first = in_background(lambda: ask(gateway, "gated first"))
        at_work(gateway, engine, 1)
        impatient = connected(gateway, post_bytes(b'{"prompt": "impatient"}'))
        until(lambda: gate.waiting("interactive") == 1)
        impatient.close()
        until(lambda: gate.waiting("interactive") == 0)
        open_gate(gateway, engine)
        first[0].join(LIMIT_S)
        assert ask(gateway, "next").status_code == 200
        assert engine.seen.streams == ["gated first", "next"]


def test_another_engine_is_tried_before_the_first_token_only(tmp_path: Path) -> None:
    def make() -> list[tuple[str, FakeEngine]]:
        seen = Seen()
        return [("first", FakeEngine(seen)), ("second", FakeEngine(seen))]

    with served(fake_engines(make), config_in(tmp_path)) as gateway:
        answer = ask(gateway, "broken 1 time")
        assert answer.headers["x-tokenmill-engine"] == "second"
        asked = {"prompt": "poison", "stream": True}
        with patient.stream("POST", f"{gateway.url}/v1/completions", json=asked) as stream:
            events = stream.read().decode().split("\n\n")
        assert stream.headers["x-tokenmill-engine"] == "first"
        assert json.loads(events[-2].removeprefix("data: "))["error"]["code"] == "engine_died"
        assert "data: [DONE]" not in events
        assert gateway.lines[-1]["error"] == "engine_died"
        assert ask(gateway, "a").headers["x-tokenmill-engine"] == "second"


def test_on_another_address_a_key_is_always_needed(tmp_path: Path) -> None:
    secret = keys.add(tmp_path, "ann")
    with faked(tmp_path, host="0.0.0.0") as (gateway, _):
        url = f"http://127.0.0.1:{gateway.port}/v1/models"
        headers = {"host": "mill.example", "authorization": f"Bearer {secret}"}
        assert patient.get(url, headers=headers).status_code == 200
        assert patient.get(url).status_code == 401
        keys.revoke(tmp_path, "ann")
        until(lambda: patient.get(url, headers=headers).status_code == 401)


def test_https(tmp_path: Path) -> None:
    cert = TLS / "cert.pem"
    with faked(tmp_path, tls_cert=str(cert), tls_key=str(TLS / "key.pem")) as (gateway, _):
        assert gateway.url.startswith("https://127.0.0.1:")
        trusted = ssl.create_default_context(cafile=str(cert))
        assert patient.get(f"{gateway.url}/health", verify=trusted).json()["status"] == "ok"


@pytest.mark.parametrize(
    ("cert", "key", "said"), [("none.pem", "key.pem", "cannot be read"), ("key.pem", "key.pem", "cannot be used")]
)
def test_certificates_that_are_none(tmp_path: Path, cert: str, key: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said), faked(tmp_path, tls_cert=str(TLS / cert), tls_key=str(TLS / key)):
        pass
