"""HTTP client of a tokenmill gateway: files, batches, engines. Independent of Dagster.

Requests that get no response are repeated with growing pauses, up to `patience_s`, because a gateway may be restarted
and loading a model takes minutes. Before the first response only `first_patience_s` applies: the address may be wrong.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Self, TypeVar

import httpx

from dagster_tokenmill.batch import Batch, batch_of
from dagster_tokenmill.errors import GatewayRefused, GatewayUnavailable

RETRYABLE = frozenset((408, 429, 502, 503, 504))
"""HTTP statuses that may pass."""
FIRST_PAUSE_S = 0.2
MAX_PAUSE_S = 15.0
PAGE = 100  # batches per request, the gateway's maximum
_CHUNK_BYTES = 1 << 20

T = TypeVar("T")
Tell = Callable[[str], None]
Pause = Callable[[float], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class GatewayEngine:
    """An engine behind the gateway."""

    name: str
    state: str  # ready, failed, ...
    kind: str
    model: str
    model_id: str
    build: str
    context: int | None
    slots: int


@dataclass(frozen=True, slots=True)
class Address:
    """The gateway's URL and API key, and how long to wait for responses."""

    url: str  # without /v1
    key: str | None = None
    timeout_s: float = 60.0  # of one request
    patience_s: float = 7200.0
    first_patience_s: float = 60.0  # before the first response


class Gateway:
    """A connection to the gateway; use it as an asynchronous context manager."""

    def __init__(self, address: Address, *, tell: Tell = lambda _: None, pause: Pause = asyncio.sleep) -> None:
        self.address = address
        self._tell = tell
        self._pause = pause
        headers = {"authorization": f"Bearer {address.key}"} if address.key else {}
        timeout = httpx.Timeout(address.timeout_s, connect=min(10.0, address.timeout_s))
        self._http = httpx.AsyncClient(base_url=address.url, headers=headers, timeout=timeout)
        self._responded = False

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._http.aclose()

    async def batch(self, name: str) -> Batch:
        """The current state of a batch."""
        return batch_of(await self._json("GET", f"/v1/batches/{name}"))

    async def batches(
        self, *, metadata: Mapping[str, str] | None = None, until: Callable[[Batch], bool] = lambda _: False
    ) -> list[Batch]:
        """Batches with this metadata, newest first, up to the first one for which `until` is true (excluded)."""
        found: list[Batch] = []
        query = {"limit": str(PAGE), **{f"metadata[{key}]": value for key, value in (metadata or {}).items()}}
        while True:
            page = await self._json("GET", "/v1/batches", params=query)
            for batch in map(batch_of, page["data"]):
                if until(batch):
                    return found
                found.append(batch)
            if not page["has_more"]:
                return found
            query["after"] = page["last_id"]

    async def create(
        self, file: str, *, endpoint: str, window: str, metadata: Mapping[str, str], priority: int | None
    ) -> Batch:
        """Create a batch. Sent once: after GatewayUnavailable it may or may not exist."""
        body: dict[str, Any] = {
            "input_file_id": file,
            "endpoint": endpoint,
            "completion_window": window,
            "metadata": dict(metadata),
            "priority": priority,
        }
        return batch_of((await self._once("POST", "/v1/batches", json=body)).json())

    async def cancel(self, name: str) -> None:
        """Cancel a batch and keep its answers; does nothing if it has ended."""
        try:
            await self._json("POST", f"/v1/batches/{name}/cancel")
        except GatewayRefused as error:
            if error.status != httpx.codes.CONFLICT:
                raise

    async def upload(self, file: BinaryIO, name: str) -> str:
        """Upload a job file and return its id. Sent once, like `create`."""
        file.seek(0)
        response = await self._once(
            "POST", "/v1/files", files={"file": (name, file, "application/jsonl")}, data={"purpose": "batch"}
        )
        return str(response.json()["id"])

    async def download(self, file: str, into: Path) -> None:
        """Download a file; raises GatewayRefused with status 404 if it no longer exists."""

        async def fetch() -> None:
            async with self._http.stream("GET", f"/v1/files/{file}/content") as response:
                if response.is_error:
                    await response.aread()
                    raise_for(response)
                with into.open("wb") as out:
                    async for chunk in response.aiter_bytes(_CHUNK_BYTES):
                        out.write(chunk)

        await self.retrying(lambda: self._mapped(fetch()))

    async def engines(self) -> tuple[GatewayEngine, ...]:
        """The engines behind the gateway."""
        status = await self._json("GET", "/api/status")
        return tuple(
            GatewayEngine(
                one["name"],
                one["state"],
                one["kind"],
                one["model"],
                one.get("model_id") or one["model"],  # older gateways have no model_id
                one["build"],
                one["context"],
                one["lanes"]["total"],
            )
            for one in status["engines"]
        )

    async def model_name(self, engine: GatewayEngine) -> str:
        """The name by which clients select an engine's model; the engine's own name for it if clients have no name."""
        models = (await self._json("GET", "/v1/models"))["data"]
        return next((str(one["id"]) for one in models if engine.name in one.get("engines", ())), engine.model)

    async def engines_for(self, model: str | None) -> tuple[GatewayEngine, ...]:
        """The engines of a model in the gateway's order; None: all engines."""
        engines = await self.engines()
        if model is None:
            return engines
        names: Sequence[str] = (await self._json("GET", f"/v1/models/{model}"))["engines"]
        return tuple(one for name in names for one in engines if one.name == name)

    async def _json(self, method: str, path: str, **request: Any) -> Any:
        """The JSON response to an idempotent request, which is repeated if necessary."""
        return (await self.retrying(lambda: self._once(method, path, **request))).json()

    async def retrying(self, call: Callable[[], Awaitable[T]]) -> T:
        """The result of `call`, repeated while the gateway is unavailable, up to the patience."""
        began_s = time.monotonic()
        pause_s = FIRST_PAUSE_S
        while True:
            try:
                return await call()
            except GatewayUnavailable as error:
                patience_s = self.address.patience_s if self._responded else self.address.first_patience_s
                if time.monotonic() - began_s + pause_s > min(patience_s, self.address.patience_s):
                    raise
                if pause_s == FIRST_PAUSE_S:
                    self._tell(f"{error.message}; retrying")
            await self._pause(pause_s)
            pause_s = min(2 * pause_s, MAX_PAUSE_S)

    async def _once(self, method: str, path: str, **request: Any) -> httpx.Response:
        return await self._mapped(self._send(method, path, **request))

    async def _send(self, method: str, path: str, **request: Any) -> httpx.Response:
        response = await self._http.request(method, path, **request)
        raise_for(response)
        return response

    async def _mapped(self, request: Awaitable[T]) -> T:
        """The result of a request; raises GatewayUnavailable for transport errors."""
        try:
            result = await request
        except httpx.TransportError as error:
            raise GatewayUnavailable(
                f"the gateway at {self.address.url} does not answer: {str(error) or type(error).__name__}",
                hint="start `tokenmill serve` there, or correct TokenmillResource.base_url",
            ) from error
        self._responded = True
        return result


def raise_for(response: httpx.Response) -> None:
    """Raise GatewayUnavailable or GatewayRefused for a response with an error status."""
    if not response.is_error:
        return
    try:
        message = str(response.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        message = response.reason_phrase
    request = f"{response.request.method} {response.request.url.path}"
    if response.status_code in RETRYABLE:
        raise GatewayUnavailable(f"{request} failed ({response.status_code}): {message}")
    unauthorized = response.status_code in (httpx.codes.UNAUTHORIZED, httpx.codes.FORBIDDEN)
    hint = "set TokenmillResource.api_key to a key made by `tokenmill keys add`" if unauthorized else None
    raise GatewayRefused(
        f"{request} was refused ({response.status_code}): {message}", status=response.status_code, hint=hint
    )
