"""HTTP for tests with long timeouts; certificates are read once."""

import ssl
from contextlib import AbstractContextManager
from typing import Any

import httpx

LIMIT_S = 120.0
TRUSTED = ssl.create_default_context()


def get(url: str, **how: Any) -> httpx.Response:
    return request("GET", url, **how)


def post(url: str, **how: Any) -> httpx.Response:
    return request("POST", url, **how)


def request(method: str, url: str, **how: Any) -> httpx.Response:
    return httpx.request(method, url, **{"timeout": LIMIT_S, "verify": TRUSTED, **how})


def stream(method: str, url: str, **how: Any) -> AbstractContextManager[httpx.Response]:
    return httpx.stream(method, url, **{"timeout": LIMIT_S, "verify": TRUSTED, **how})


def client(**how: Any) -> httpx.Client:
    return httpx.Client(**{"timeout": LIMIT_S, "verify": TRUSTED, **how})
