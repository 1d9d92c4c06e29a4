"""Server URLs and API keys. Keys are read only from environment variables and never printed."""

import os
import socket
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

import httpx

from tokenmill.engine.process.ports import is_loopback
from tokenmill.errors import ConfigError, UsageError

_CONNECT_S = 10.0
_KEEPALIVE = [
    # detects a lost peer within a minute, even while an answer takes longer
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 30),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 10),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3),
]


def base_url(given: str) -> str:
    """Normalize a server URL: `http://host:port/v1/` becomes `http://host:port`. UsageError if it is invalid."""
    parts = urlsplit(given)
    try:
        port = parts.port
    except ValueError as error:
        raise UsageError(f"{redacted(given)}: {error}") from error
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise UsageError(f"{redacted(given)} is not a server URL", hint="use http://host:port or https://host")
    if parts.username is not None or parts.password is not None:
        raise UsageError(
            f"{redacted(given)} contains a user name or password, which would appear in logs",
            hint="put the API key in an environment variable and set engine.api_key_env to its name",
        )
    if parts.query or parts.fragment:
        raise UsageError(
            f"{redacted(given)}: query and fragment are not allowed", hint="use http://host:port or https://host"
        )
    host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    path = parts.path.rstrip("/").removesuffix("/v1").rstrip("/")
    return f"{parts.scheme}://{host}" + (f":{port}" if port is not None else "") + path


def redacted(given: str) -> str:
    """The URL without user name, password and query, for messages."""
    user, at, rest = given.partition("://")[2].partition("/")[0].rpartition("@")
    shown = given.replace(f"{user}{at}{rest}", f"...@{rest}", 1) if at else given
    return shown.partition("?")[0]


def key_from(variable: str | None) -> str | None:
    """Read the API key from an environment variable; ConfigError if the variable is not set."""
    if variable is None:
        return None
    key = os.environ.get(variable)
    if not key:
        raise ConfigError(f"engine.api_key_env names {variable}, which is not set", hint=f"export {variable}=...")
    return key


def client_for(url: str, key: str | None = None) -> httpx.AsyncClient:
    """Create an HTTP client without a read timeout. Proxies from the environment are ignored for loopback."""
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
