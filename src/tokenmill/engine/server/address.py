"""Addresses of servers and the keys to them. A key comes from the environment alone and is never shown."""

import os
import socket
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

import httpx

from tokenmill.engine.process.ports import is_loopback
from tokenmill.errors import ConfigError, UsageError

_CONNECT_S = 10.0
_KEEPALIVE = [
    # a machine that vanished is noticed within a minute, however long an answer may take
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 30),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 10),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3),
]


def base_url(given: str) -> str:
    """The root of a server's interface: `http://host:port/v1/` and the like become `http://host:port`."""
    parts = urlsplit(given)
    try:
        port = parts.port
    except ValueError as error:
        raise UsageError(f"{redacted(given)}: {error}") from error
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise UsageError(f"{redacted(given)} is no address of a server", hint="http://host:port or https://host")
    if parts.username is not None or parts.password is not None:
        raise UsageError(
            f"{redacted(given)} has a name or password in it, which ends up in logs",
            hint="put the key into an environment variable and name it as engine.api_key_env",
        )
    if parts.query or parts.fragment:
        raise UsageError(f"{redacted(given)}: nothing may follow the path", hint="http://host:port or https://host")
    host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    path = parts.path.rstrip("/").removesuffix("/v1").rstrip("/")
    return f"{parts.scheme}://{host}" + (f":{port}" if port is not None else "") + path


def redacted(given: str) -> str:
    """An address without what may be secret in it."""
    head, at, rest = given.partition("://")[2].partition("/")[0].rpartition("@")
    shown = given.replace(f"{head}{at}{rest}", f"...@{rest}", 1) if at else given
    return shown.partition("?")[0]


def key_from(variable: str | None) -> str | None:
    """The key in an environment variable; ConfigError where the variable is named and not set."""
    if variable is None:
        return None
    key = os.environ.get(variable)
    if not key:
        raise ConfigError(f"engine.api_key_env names {variable}, which is not set", hint=f"export {variable}=...")
    return key


def client_for(url: str, key: str | None = None) -> httpx.AsyncClient:
    """A client of a server. Answers may take as long as they take; environment proxies are not for this machine."""
    host = urlsplit(url).hostname or ""
    proxied = not is_loopback(host) and urlsplit(url).scheme in getproxies() and not proxy_bypass(host)
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=16, keepalive_expiry=2.0)
    return httpx.AsyncClient(
        base_url=url,
        timeout=httpx.Timeout(None, connect=_CONNECT_S),
        headers={"Authorization": f"Bearer {key}"} if key else {},
        transport=None if proxied else httpx.AsyncHTTPTransport(limits=limits, socket_options=_KEEPALIVE),
        limits=limits,
        trust_env=proxied,
    )
