"""The gateway as a resource of Dagster."""

import asyncio
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

import dagster as dg
import httpx
from pydantic import Field

from dagster_tokenmill.errors import GatewayError
from dagster_tokenmill.gateway import Address, Gateway
from dagster_tokenmill.mill import LONGEST_VALUE, GatewayMill, Terms, Worked
from tokenmill.errors import TokenmillError, UsageError
from tokenmill.recipes import Answered, Budget, End, Line, Origin, Spent

Context: TypeAlias = dg.AssetExecutionContext | dg.OpExecutionContext
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class BatchResult:
    """What `TokenmillResource.run_batch` comes to."""

    answers: tuple[Answered, ...]
    end: End
    total: int
    spent: Spent
    worked: tuple[Worked, ...]
    origin: Origin


class TokenmillResource(dg.ConfigurableResource[Any]):
    """A `tokenmill serve` somewhere, by HTTP."""

    base_url: str = Field(
        default="http://127.0.0.1:8181", description="Where the gateway answers; with or without /v1."
    )
    api_key: str | None = Field(
        default=None, description="Of `tokenmill keys add`, where the gateway wants one: an EnvVar."
    )
    model: str | None = Field(
        default=None, description="For lines that name no model; left out: what the gateway serves."
    )
    page_url: str | None = Field(default=None, description="The gateway's page as people reach it; left out: base_url.")
    window: str = Field(default="24h", description="By when a batch has to be done: 90m, 24h, 7d.")
    priority: int | None = Field(default=None, description="Of batches among each other; higher goes first.")
    poll_s: float = Field(default=5.0, gt=0, description="Seconds between two looks at a batch.")
    timeout_s: float = Field(default=60.0, gt=0, description="Seconds that one request may go without a sign.")
    patience_s: float = Field(default=7200.0, ge=0, description="Seconds that a gateway may be away in the middle.")
    first_patience_s: float = Field(
        default=60.0, ge=0, description="Seconds that it may be away before it ever answered."
    )
    cost_per_hour: float | None = Field(
        default=None, ge=0, description="Of the machine behind it; None: no cost is told."
    )
    currency: str = Field(default="USD", description="Of cost_per_hour.")
    cancel_on_termination: bool = Field(default=False, description="Cancel the batch when its run is terminated.")
    retry_failed: bool = Field(default=True, description="Give failed lines of a batch that had ended another try.")

    @property
    def address(self) -> Address:
        """Where the gateway is."""
        url = self.base_url.rstrip("/").removesuffix("/v1").rstrip("/")
        return Address(url, self.api_key or None, self.timeout_s, self.patience_s, self.first_patience_s)

    @property
    def page(self) -> str:
        """The gateway's page."""
        return self.page_url or f"{self.address.url}/"

    def batch_url(self, batch: str) -> str:
        """What the gateway says of a batch."""
        return f"{self.address.url}/v1/batches/{batch}"

    def client(self) -> httpx.Client:
        """A plain client of the gateway, with its key; close it."""
        headers = {"authorization": f"Bearer {self.api_key}"} if self.api_key else {}
        return httpx.Client(base_url=self.address.url, headers=headers, timeout=self.timeout_s)

    def gateway(self, tell: Callable[[str], None] = lambda _: None) -> Gateway:
        """The gateway, to be asked with patience."""
        return Gateway(self.address, tell=tell)

    def lanes(self, model: str | None = None) -> int:
        """How many sequences the engines of a model work on at once, all together; default: the resource's model."""

        async def ask() -> int:
            async with self.gateway() as gateway:
                return sum(engine.lanes for engine in await gateway.serving(model or self.model))

        return told(ask())

    def size_pool(self, instance: dg.DagsterInstance, pool: str = "tokenmill", *, lanes_each: int = 1) -> int:
        """Set the limit of a pool from the gateway's lanes; it. `lanes_each`: lanes that one batch is meant to fill."""
        limit = max(1, self.lanes() // lanes_each)
        instance.event_log_storage.set_concurrency_slots(pool, limit)
        return limit

    def mill(
        self,
        context: Context | None,
        *,
        scope: tuple[str, ...] | None = None,
        max_tokens_total: int | None = None,
        max_hours: float | None = None,
        **changes: Any,
    ) -> GatewayMill:
        """What recipes run on: `async with resource.mill(context) as mill`.

        Batches belong to the asset and partition of the context, or to `scope`; a run that belongs there, too, and has
        the same lines is attached to them. A budget cancels the batch when it is used up; answers that came stay, cost
        nothing in the next run, and that one has the whole budget again. `changes`: fields of `Terms`.
        """
        labels = _labels(context)
        given: dict[str, Any] = {
            "model": self.model,
            "scope": _scope(context) if scope is None else scope,
            "labels": labels,
            "window": self.window,
            "priority": self.priority,
            "poll_s": self.poll_s,
            "budget": Budget(max_tokens_total, None if max_hours is None else max_hours * 3600),
            "cancel_on_termination": self.cancel_on_termination,
            "retry_failed": self.retry_failed,
        }
        tell = context.log.info if context is not None else (lambda _: None)
        return GatewayMill(self.address, Terms(**{**given, **changes}), tell=tell)

    def run_batch(
        self, context: Context | None, lines: Iterable[Line], *, stage: str = "batch", **how: Any
    ) -> BatchResult:
        """Have lines answered and wait for it, for assets and ops of one's own; `how` as in `mill`."""

        async def work() -> BatchResult:
            async with self.mill(context, **how) as mill:
                ran = await mill.run(stage, lines)
                answers = tuple(ran.answers())
                return BatchResult(answers, ran.end, ran.total, mill.spent, tuple(mill.worked), mill.origin)

        return told(work())


def told(work: Coroutine[Any, Any, T]) -> T:
    """Something asynchronous, to its end; what we know to go wrong fails the step in words, not in a trace."""
    try:
        return asyncio.run(work)
    except TokenmillError as error:
        raise failure(error) from None


def failure(error: TokenmillError) -> dg.Failure:
    """As Dagster shows it; retried where that can help."""
    hint = {"hint": error.hint} if error.hint else {}
    hopeless = isinstance(error, UsageError) or (isinstance(error, GatewayError) and not error.may_pass)
    return dg.Failure(error.message, metadata=hint, allow_retries=not hopeless)


def partition_of(context: Context) -> str | None:
    """The one partition of a step; None: it has none."""
    return context.partition_key if context.has_partition_key else None


def _scope(context: Context | None) -> tuple[str, ...]:
    if context is None:
        return ()
    partition = partition_of(context)
    return (_name(context), *(() if partition is None else (partition,)))


def _labels(context: Context | None) -> dict[str, str]:
    if context is None:
        return {"source": "dagster"}
    labels = {"source": "dagster", "dagster_asset": _name(context), "dagster_run": context.run.run_id}
    partition = partition_of(context)
    if partition is not None:
        labels["dagster_partition"] = partition
    return {name: value[:LONGEST_VALUE] for name, value in labels.items()}


def _name(context: Context) -> str:
    """The asset, or the op where there is none."""
    if not isinstance(context, dg.AssetExecutionContext):
        return context.op.name
    return ",".join(sorted(key.to_user_string() for key in context.selected_asset_keys))
