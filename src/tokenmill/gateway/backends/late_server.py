"""A server that was unreachable when the gateway started; it is used once it responds.

Until `reconnect` or a request reaches it, its liveness is "unreachable" and requests raise `EngineDied`.
"""

from collections.abc import Awaitable, Callable

from tokenmill.engine.engine import Capabilities, Counters, Engine, EngineStatus, HttpApi, Identity, Liveness
from tokenmill.engine.forward import ForwardingEngine
from tokenmill.engine.server.request import capabilities_of
from tokenmill.errors import EngineDied, TokenmillError

Attach = Callable[[], Awaitable[Engine]]


class LateServer(ForwardingEngine):
    """A server that is connected once it is reachable."""

    def __init__(self, attach: Attach, *, model: str, address: str, error: TokenmillError) -> None:
        """`model`: its name until the server reports its own; `error`: why the first attempt failed."""
        self._attach = attach
        self._error = error
        self._api = HttpApi("url", model)
        self._identity = Identity("url", model, f"away:{address}:{model}", "not reached yet", None, None, address)
        self._server: Engine | None = None

    @property
    def inner(self) -> Engine | None:
        """The connected server; None before."""
        return self._server

    @property
    def identity(self) -> Identity:
        """Identity of the server; a placeholder until it is connected."""
        return self._server.identity if self._server is not None else self._identity

    @property
    def capabilities(self) -> Capabilities:
        """Capabilities of the server; those common to all servers until it is connected."""
        if self._server is not None:
            return self._server.capabilities
        return capabilities_of(self._api, reports_cached=False)

    @property
    def liveness(self) -> Liveness:
        """Liveness of the server; "unreachable" until it is connected."""
        return self._server.liveness if self._server is not None else "unreachable"

    @property
    def last_error(self) -> TokenmillError | None:
        """Error of the last attempt to connect."""
        return self._server.last_error if self._server is not None else self._error

    async def reconnect(self) -> bool:
        """Try to connect; returns whether the server is connected."""
        if self._server is None:
            try:
                self._server = await self._attach()
            except TokenmillError as error:
                self._error = error
        return self._server is not None

    async def status(self) -> EngineStatus:
        """State and counters."""
        if self._server is not None:
            return await self._server.status()
        return EngineStatus("failed", self._identity, Counters(), self._error.message)

    async def close(self) -> None:
        """Disconnect from the server."""
        if self._server is not None:
            await self._server.close()

    async def _ready(self, timeout_s: float | None) -> Engine:
        await self.reconnect()
        return self._running()

    def _running(self) -> Engine:
        if self._server is None:
            raise EngineDied(self._error.message, hint=self._error.hint, from_outside=True)
        return self._server
