"""Shutdown of a gateway: requests in flight may end, the others get an error, and nothing is left running."""

import json
from pathlib import Path

import httpx
import pytest

from support import patient
from support.gateway_clients import LIMIT_S, ask, at_work, connected, faked, in_background, post_bytes, rest_of, until

ENDLESS = 1_000_000


def test_what_runs_may_end_and_nothing_new_is_taken(tmp_path: Path) -> None:
    with faked(tmp_path, grace_s=LIMIT_S) as (gateway, engine):
        engine.steady_tokens = 100
        idle = connected(gateway)
        kept = connected(gateway, post_bytes(json.dumps({"prompt": "steady", "stream": True}).encode()))
        at_work(gateway, engine, 1)
        gateway.tell_to_stop()
        until(gateway.state.shutting_down.is_set)
        assert rest_of(idle) == b""
        answer = rest_of(kept)
        assert answer.count(b'"text": " ') == 100
        assert b"data: [DONE]" in answer
        with pytest.raises(httpx.TransportError):
            ask(gateway, "late")


@pytest.mark.parametrize("stream", [True, False])
def test_after_the_grace_period_the_rest_gets_an_error(tmp_path: Path, stream: bool) -> None:
    with faked(tmp_path, grace_s=0.1) as (gateway, engine):
        engine.steady_tokens = ENDLESS
        thread, box = in_background(lambda: ask(gateway, "steady", stream=stream))
        until(lambda: engine.pieces > 3)
        gateway.tell_to_stop()
        thread.join(LIMIT_S)
        answer = box[0]
        if stream:
            assert answer.status_code == 200
            events = answer.text.split("\n\n")
            assert json.loads(events[-2].removeprefix("data: "))["error"]["code"] == "stopping"
            assert "data: [DONE]" not in events
        else:
            assert answer.status_code == 503
            assert answer.headers["retry-after"]
            assert answer.json()["error"]["code"] == "stopping"
        until(lambda: not engine.at_work)


def test_a_request_that_takes_too_long(tmp_path: Path) -> None:
    with faked(tmp_path, request_timeout_s=0.2) as (gateway, engine):
        answer = ask(gateway, "slow")
        assert answer.status_code == 504
        assert answer.json()["error"]["code"] == "timeout"
        assert ask(gateway, "slow", timeout=0.01).json()["error"]["message"].startswith("no answer within 0.01 s")
        until(lambda: not engine.at_work)


def test_health_says_it(tmp_path: Path) -> None:
    with faked(tmp_path) as (gateway, _):
        assert patient.get(f"{gateway.url}/health").json() == {"status": "ok", "engines": {"fake": "ready"}}
        gateway.state.shutting_down.set()
        answer = patient.get(f"{gateway.url}/health")
        assert answer.status_code == 503
        assert answer.json()["status"] == "stopping"
        refused = ask(gateway, "a")
        assert refused.status_code == 503
        assert refused.json()["error"]["code"] == "stopping"
