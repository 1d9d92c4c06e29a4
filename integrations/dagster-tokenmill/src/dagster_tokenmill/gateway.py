"""HTTP to a tokenmill gateway: files, batches, what it says of itself. Knows nothing of Dagster.

The gateway may be restarted at any moment, and loading a model takes as long as it takes: a request that nobody
answered is sent again with growing pauses, until there is no patience left. Before anything was ever answered there is
less of it, because then the address is probably wrong.
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
from dagster_tokenmill.errors import GatewayAway, Refused

PASSING = frozenset((408, 429, 502, 503, 504))
"""Statuses that say: not now."""
FIRST_PAUSE_S = 0.2
LONGEST_PAUSE_S = 15.0
PAGE = 100  # batches asked for at once; the gateway's most
_PIECE_BYTES = 1 << 20

T = TypeVar("T")
Tell = Callable[[str], None]
Pause = Callable[[float], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class EngineSeen:
    """An engine before which the gateway stands."""

    name: str
    state: str  # ready, failed, ...
    kind: str
    model: str
    model_id: str
    build: str
    context: int | None
    lanes: int


@dataclass(frozen=True, slots=True)
class Address:
    """Where a gateway is and how long to wait for it."""

    url: str  # without /v1
    key: str | None = None
    timeout_s: float = 60.0  # of one request without any sign
    patience_s: float = 7200.0
    first_patience_s: float = 60.0  # before the first answer


class Gateway:
    """An open connection; an asynchronous context."""

    def __init__(self, address: Address, *, tell: Tell = lambda _: None, pause: Pause = asyncio.sleep) -> None:
        self.address = address
        self._tell = tell
        self._pause = pause
        headers = {"authorization": f"Bearer {address.key}"} if address.key else {}
        timeout = httpx.Timeout(address.timeout_s, connect=min(10.0, address.timeout_s))
        self._http = httpx.AsyncClient(base_url=address.url, headers=headers, timeout=timeout)
        self._answered = False

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._http.aclose()

    # Batches.

    async def batch(self, name: str) -> Batch:
        """One as it is now."""
        return batch_of(await self._json("GET", f"/v1/batches/{name}"))

    async def batches(
        self, *, metadata: Mapping[str, str] | None = None, until: Callable[[Batch], bool] = lambda _: False
    ) -> list[Batch]:
        """Those whose metadata holds this, the newest first, up to the first that `until` holds for, without it."""
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
        """Have a file worked on. Sent once: where no answer comes it may be there or not (`GatewayAway`)."""
        body: dict[str, Any] = {
            "input_file_id": file,
            "endpoint": endpoint,
            "completion_window": window,
            "metadata": dict(metadata),
            "priority": priority,
        }
        return batch_of((await self._once("POST", "/v1/batches", json=body)).json())

    async def cancel(self, name: str) -> None:
        """Cancel one: what is answered stays. One that has ended meanwhile is left as it is."""
        try:
            await self._json("POST", f"/v1/batches/{name}/cancel")
        except Refused as error:
            if error.status != httpx.codes.CONFLICT:
                raise

    # Files.

    async def upload(self, file: BinaryIO, name: str) -> str:
        """Hand in a file of jobs; its id. Sent once, as `create`."""
        file.seek(0)
        answer = await self._once(
            "POST", "/v1/files", files={"file": (name, file, "application/jsonl")}, data={"purpose": "batch"}
        )
        return str(answer.json()["id"])

    async def download(self, file: str, into: Path) -> None:
        """The bytes of a file, whole; Refused with 404 where it is gone."""

        async def fetch() -> None:
            async with self._http.stream("GET", f"/v1/files/{file}/content") as answer:
                if answer.is_error:
                    await answer.aread()
                    raise_for(answer)
                with into.open("wb") as out:
                    async for piece in answer.aiter_bytes(_PIECE_BYTES):
                        out.write(piece)

        await self.patiently(lambda: self._mapped(fetch()))

    # What it says of itself.

    async def engines(self) -> tuple[EngineSeen, ...]:
        """The engines behind it, as it lists them."""
        status = await self._json("GET", "/api/status")
        return tuple(
            EngineSeen(
                one["name"],
                one["state"],
                one["kind"],
                one["model"],
                one.get("model_id") or one["model"],  # an older gateway does not tell it
                one["build"],
                one["context"],
                one["lanes"]["total"],
            )
            for one in status["engines"]
        )

    async def called(self, engine: EngineSeen) -> str:
        """What clients call the model of an engine; what it calls itself where they have no name for it."""
        models = (await self._json("GET", "/v1/models"))["data"]
        return next((str(one["id"]) for one in models if engine.name in one.get("engines", ())), engine.model)

    async def serving(self, model: str | None) -> tuple[EngineSeen, ...]:
        """The engines that answer for a model, the first first; None: for whatever is asked for."""
        engines = await self.engines()
        if model is None:
            return engines
        names: Sequence[str] = (await self._json("GET", f"/v1/models/{model}"))["engines"]
        return tuple(one for name in names for one in engines if one.name == name)

    # How it is asked.

    async def _json(self, method: str, path: str, **how: Any) -> Any:
        """Something that may be asked twice."""
        return (await self.patiently(lambda: self._once(method, path, **how))).json()

    async def patiently(self, ask: Callable[[], Awaitable[T]]) -> T:
        """What an asking comes to, asked again while the gateway is away."""
        began_s = time.monotonic()
        pause_s = FIRST_PAUSE_S
        while True:
            try:
                return await ask()
            except GatewayAway as error:
                patience_s = self.address.patience_s if self._answered else self.address.first_patience_s
                if time.monotonic() - began_s + pause_s > min(patience_s, self.address.patience_s):
                    raise
                if pause_s == FIRST_PAUSE_S:
                    self._tell(f"{error.message}; trying again")
            await self._pause(pause_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    async def _once(self, method: str, path: str, **how: Any) -> httpx.Response:
        return await self._mapped(self._asked(method, path, **how))

    async def _asked(self, method: str, path: str, **how: Any) -> httpx.Response:
        answer = await self._http.request(method, path, **how)
        raise_for(answer)
        return answer

    async def _mapped(self, asked: Awaitable[T]) -> T:
        """An asking with the errors of the way in our words."""
        try:
            came = await asked
        except httpx.TransportError as error:
            said = str(error) or type(error).__name__
            raise GatewayAway(
                f"the gateway at {self.address.url} does not answer: {said}",
                hint="is `tokenmill serve` running there? TokenmillResource.base_url says where",
            ) from error
        self._answered = True
        return came


def raise_for(answer: httpx.Response) -> None:
    """An answer that is no success, as an error."""
    if not answer.is_error:
        return
    try:
        error = answer.json()["error"]
        said = str(error["message"])
    except (ValueError, KeyError, TypeError):
        said = answer.reason_phrase
    where = f"{answer.request.method} {answer.request.url.path}"
    if answer.status_code in PASSING:
        raise GatewayAway(f"the gateway cannot now ({answer.status_code}): {said}")
    keyless = answer.status_code in (httpx.codes.UNAUTHORIZED, httpx.codes.FORBIDDEN)
    hint = "TokenmillResource.api_key has to be a key of `tokenmill keys add`" if keyless else None
    raise Refused(f"{where} was refused ({answer.status_code}): {said}", status=answer.status_code, hint=hint)
