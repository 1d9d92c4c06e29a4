"""Routing over HTTP by prompt length, priority and key."""

from dataclasses import replace
from pathlib import Path

from support.fake_engine import FakeEngine
from support.gateway import config_in, fake_engines, served
from support.gateway_clients import ask
from tokenmill.config import EngineEntry, RouteEntry
from tokenmill.gateway.http import keys

ROUTES = (
    RouteEntry(("kept",), key="nightly"),
    RouteEntry(("large",), min_prompt_tokens=20),
    RouteEntry(("small", "large"), lane="interactive"),
    RouteEntry(("large", "small"), lane="batch"),
)


def test_routes(tmp_path: Path) -> None:
    names = ("small", "large", "kept")
    config = replace(
        config_in(tmp_path), engines=tuple(EngineEntry(name, model="fake") for name in names), routes=ROUTES
    )
    ann, nightly = ({"authorization": f"Bearer {keys.add(tmp_path, name)}"} for name in ("ann", "nightly"))
    with served(fake_engines(lambda: [(name, FakeEngine()) for name in names]), config) as gateway:
        long = "word " * 60

        def who(text: str, headers: dict[str, str]) -> str:
            answer = ask(gateway, text, headers=headers)
            assert answer.status_code == 200, answer.text
            return str(answer.headers["x-tokenmill-engine"])

        assert who("a", ann) == "small"
        assert who(long, ann) == "large"
        assert who("a", ann | {"x-tokenmill-lane": "batch"}) == "large"
        assert who(long, nightly) == who("a", nightly) == "kept"
        assert [line["backend"] for line in gateway.lines if "backend" in line] == [
            "small",
            "large",
            "large",
            "kept",
            "kept",
        ]
