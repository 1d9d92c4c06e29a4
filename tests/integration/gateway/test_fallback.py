"""A chain of servers: which one answers when the first fails, and when the first is used again."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import httpx
import pytest

from support.faulty_server import CHAT, DONE, LIMIT_S, WHOLE_STREAM, FaultyServer, engines_at, faulty
from support.gateway import Served, config_in, served
from support.jobs_store import Clock
from tokenmill.config import EngineEntry, RouteEntry
from tokenmill.errors import EngineError
from tokenmill.gateway.backends import managed
from tokenmill.gateway.backends.health_check import PollPace
from tokenmill.gateway.backends.managed import ManagedBackend

PACE, HASTY = PollPace(timeout_s=LIMIT_S), PollPace(timeout_s=0.2)


class Chain:
    """A gateway before two servers."""

    def __init__(self, gateway: Served, client: httpx.Client, first: FaultyServer, second: FaultyServer) -> None:
        self.gateway, self.client, self.first, self.second = gateway, client, first, second
        self.guards = [cast(ManagedBackend, backend) for backend in gateway.state.backends]
        for guard in self.guards:
            guard._clock = Clock()  # one that is left alone for seconds is left alone for the whole test

    def ask(self, **more: Any) -> httpx.Response:
        return self.client.post("/v1/chat/completions", json=CHAT | more)

    def engine(self, **more: Any) -> str:
        answer = self.ask(**more)
        assert answer.status_code == 200, answer.text
        return str(answer.headers["x-tokenmill-engine"])

    def check(self, pace: PollPace = PACE) -> str:
        """Look at the first now, as is done every few seconds; its state."""
        self.gateway.call(self.guards[0].check(pace))
        return self.guards[0].state

    def lines(self) -> list[dict[str, Any]]:
        self.gateway.running()  # a turn of its loop later: a line is written after the last byte
        return [line for line in self.gateway.lines if line.get("route") == "/v1/chat/completions"]


@pytest.fixture(autouse=True)
def _looked_at_by_the_test_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    async def nobody(*_: Any) -> None:
        pass

    monkeypatch.setattr(managed, "keep_checking", nobody)


@pytest.fixture
def chain(tmp_path: Path) -> Iterator[Chain]:
    with two(tmp_path) as both:
        yield both


@contextmanager
def two(folder: Path) -> Iterator[Chain]:
    with (
        faulty() as first,
        faulty() as second,
        served(engines_at(first, second), config_in(folder)) as gateway,
        httpx.Client(base_url=gateway.url, timeout=LIMIT_S, trust_env=False) as client,
    ):
        yield Chain(gateway, client, first, second)


@pytest.mark.parametrize("behaves", ["500", "502", "503", "404", "401", "busy", "half"])
def test_the_next_answers_before_the_first_token(chain: Chain, behaves: str) -> None:
    chain.first.behaves = behaves
    assert chain.engine() == "second"
    assert chain.lines()[0]["backend"] == "second"
    missed = [line for line in chain.gateway.lines if line.get("event") == "not_answered"]
    assert [line["backend"] for line in missed] == ["first"]
    assert len(chain.first.asked) == 1


@pytest.mark.parametrize("behaves", ["502", "busy", "role"])
def test_streams_as_well(chain: Chain, behaves: str) -> None:
    """A server that has only told its role has not answered yet."""
    chain.first.behaves = behaves
    answer = chain.ask(stream=True)
    assert answer.headers["x-tokenmill-engine"] == "second"
    assert answer.content == WHOLE_STREAM + DONE


def test_a_started_stream_is_not_continued_by_another_backend(chain: Chain) -> None:
    chain.first.behaves = "half"
    answer = chain.ask(stream=True)
    assert answer.headers["x-tokenmill-engine"] == "first"
    assert b'"engine_died"' in answer.content
    assert not chain.second.asked


def test_an_invalid_request_is_not_tried_elsewhere(chain: Chain) -> None:
    chain.first.behaves = "refuses"
    assert chain.ask().status_code == 400
    assert not chain.second.asked
    assert chain.guards[0].state == "ready"


def test_one_that_fails_is_left_alone(chain: Chain) -> None:
    chain.first.behaves = "502"
    for _ in range(5):
        assert chain.engine() == "second"
    assert len(chain.first.asked) == 3  # then its breaker opened
    assert chain.check() == "open"  # its health page is well, which proves nothing
    assert chain.client.get("/health").json()["engines"] == {"first": "open", "second": "ready"}


def test_one_that_went_away_is_taken_back(chain: Chain) -> None:
    assert chain.engine() == "first"
    chain.first.end()
    assert chain.engine() == "second"
    assert chain.guards[0].state == "open"
    assert chain.engine() == "second"
    chain.check()
    assert chain.check() == "down"
    chain.first.begin()
    assert chain.check() == "ready"
    assert chain.engine() == "first"


def test_both_away(chain: Chain) -> None:
    chain.first.end()
    chain.second.end()
    answer = chain.ask()
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "engine_died")
    assert answer.headers["retry-after"] == "1"
    chain.first.begin()
    chain.second.begin()
    assert chain.engine() == "first"  # where none looks well, all are tried


def test_one_that_is_silent_gives_up_what_waits(chain: Chain) -> None:
    """Its health page is as silent: after the third look, requests that wait for its first byte go to the next."""
    chain.first.behaves = "silent"
    answers: list[str] = []
    asking = threading.Thread(target=lambda: answers.append(chain.engine()))
    asking.start()
    assert chain.first.came.wait(LIMIT_S)
    assert [chain.check(HASTY) for _ in range(3)] == ["ready", "ready", "down"]
    asking.join(LIMIT_S)
    assert answers == ["second"]


def test_routes_of_the_configuration_are_followed(tmp_path: Path) -> None:
    """A name that only a route has, and its own order."""
    config = replace(
        config_in(tmp_path),
        engines=(EngineEntry("first", url="http://a"), EngineEntry("second", url="http://b")),
        routes=(RouteEntry(("second", "first"), model="other"), RouteEntry(("second",), lane="batch")),
    )
    with (
        faulty() as first,
        faulty() as second,
        served(engines_at(first, second), config) as gateway,
        httpx.Client(base_url=gateway.url, timeout=LIMIT_S, trust_env=False) as client,
    ):
        both = Chain(gateway, client, first, second)
        assert both.engine() == "first"
        assert both.engine(model="other") == "second"
        assert both.engine(service_tier="flex") == "second"
        reasons = [line["why"] for line in both.lines()]
        assert reasons == ["no route matches", "route 1: model other", "route 2: lane batch"]
        unknown = both.ask(model="nobody-has-it")
        assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "model_not_found")
        assert "other" in [model["id"] for model in client.get("/v1/models").json()["data"]]


def test_one_that_is_away_at_the_start_joins_later(tmp_path: Path) -> None:
    with faulty() as first, faulty() as second:
        first.end()
        with (
            served(engines_at(first, second), config_in(tmp_path)) as gateway,
            httpx.Client(base_url=gateway.url, timeout=LIMIT_S, trust_env=False) as client,
        ):
            both = Chain(gateway, client, first, second)
            assert both.guards[0].state == "down"
            assert both.engine() == "second"
            assert both.check() == "down"
            first.begin()
            assert both.check() == "ready"
            assert both.engine() == "first"


def test_all_away_at_the_start(tmp_path: Path) -> None:
    with faulty() as first, faulty() as second:
        first.end()
        second.end()
        with (
            pytest.raises(EngineError, match="nothing answers"),
            served(engines_at(first, second), config_in(tmp_path)),
        ):
            pass
