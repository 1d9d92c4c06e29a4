"""The OpenAPI document describes exactly the routes, and a bug gets an error response like any other."""

import json
import logging
import re
from pathlib import Path

import pytest
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from support import patient
from support.gateway_clients import faked
from tokenmill.gateway import app
from tokenmill.gateway.http.openapi import RouteGroup


def test_every_route_is_described_and_every_description_is_served(tmp_path: Path) -> None:
    with faked(tmp_path) as (gateway, _):
        document = patient.get(f"{gateway.url}/openapi.json").json()
        described = {(path, method.upper()) for path, item in document["paths"].items() for method in item}
        served = set()
        for part in (*app.core_groups(gateway.state), *app.extra_groups(gateway.state)):
            for route in part.routes:
                if isinstance(route, Route):
                    path = route.path.replace(":path}", "}")
                    served |= {(path, method) for method in (route.methods or set()) - {"HEAD"}}
        missing = served - described
        assert not missing
        assert described - served == {("/openapi.json", "GET")}
        named = {text.rpartition("/")[2] for text in re.findall(r'"\$ref": "([^"]+)"', json.dumps(document))}
        assert named <= set(document["components"]["schemas"])


def test_a_bug_gets_an_error_response_and_is_logged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def broken(_request: Request) -> Response:
        raise ZeroDivisionError

    monkeypatch.setattr(app, "extra_groups", lambda _state: (RouteGroup([Route("/broken", broken)]),))
    with faked(tmp_path) as (gateway, _), caplog.at_level(logging.ERROR):
        answer = patient.get(f"{gateway.url}/broken")
        assert answer.status_code == 500
        assert answer.json()["error"]["code"] == "internal_error"
        assert gateway.lines[-1]["status"] == 500
    assert "ZeroDivisionError" in caplog.text
