"""The gateway as a Dagster resource."""

import asyncio
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

import dagster as dg
import httpx
from pydantic import Field

from dagster_tokenmill.errors import GatewayError
from dagster_tokenmill.gateway import Address, Gateway
from dagster_tokenmill.runner import MAX_METADATA_CHARACTERS, BatchOptions, GatewayRunner, RunBatch
from tokenmill.errors import TokenmillError, UsageError
from tokenmill.recipes import Answered, Budget, End, Line, Origin, Spent

Context: TypeAlias = dg.AssetExecutionContext | dg.OpExecutionContext
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class BatchResult:
    """The result of `TokenmillResource.run_batch`."""

    answers: tuple[Answered, ...]
    end: End
    total: int
    spent: Spent
    batches: tuple[RunBatch, ...]
    origin: Origin


class TokenmillResource(dg.ConfigurableResource[Any]):
    """A gateway started by `tokenmill serve`, accessed over HTTP."""

    base_url: str = Field(default="http://127.0.0.1:8181", description="URL of the gateway, with or without /v1.")
    api_key: str | None = Field(
        default=None, description="API key made by `tokenmill keys add`, if the gateway requires one; use an EnvVar."
    )
    model: str | None = Field(
        default=None, description="Model for lines that name none; default: the model that the gateway serves."
    )
    page_url: str | None = Field(
        default=None, description="URL of the gateway's dashboard for links; default: base_url."
    )
    window: str = Field(default="24h", description="Time after which a batch expires: 90m, 24h, 7d.")
    priority: int | None = Field(default=None, description="Priority of the batches; higher runs first.")
    poll_s: float = Field(default=5.0, gt=0, description="Seconds between two polls of a batch.")
    timeout_s: float = Field(default=60.0, gt=0, description="Timeout of one HTTP request in seconds.")
    patience_s: float = Field(
        default=7200.0, ge=0, description="Seconds to wait for a gateway that stops responding during a run."
    )
    first_patience_s: float = Field(
        default=60.0, ge=0, description="Seconds to wait for the gateway's first response in a run."
    )
    cost_per_hour: float | None = Field(
        default=None, ge=0, description="Cost of the gateway's machine per hour; None: no cost is reported."
    )
    currency: str = Field(default="USD", description="Currency of cost_per_hour.")
    cancel_on_termination: bool = Field(default=False, description="Cancel the batch when its run is terminated.")
    retry_failed: bool = Field(
        default=True, description="When an asset is materialised again, retry the failed lines of its batch."
    )

    @property
    def address(self) -> Address:
        """The gateway's address and timeouts."""
        url = self.base_url.rstrip("/").removesuffix("/v1").rstrip("/")
        return Address(url, self.api_key or None, self.timeout_s, self.patience_s, self.first_patience_s)

    @property
    def page(self) -> str:
        """URL of the dashboard."""
        return self.page_url or f"{self.address.url}/"

    def batch_url(self, batch: str) -> str:
        """URL of a batch."""
        return f"{self.address.url}/v1/batches/{batch}"

    def client(self) -> httpx.Client:
        """An HTTP client with the gateway's URL and key; the caller closes it."""
        headers = {"authorization": f"Bearer {self.api_key}"} if self.api_key else {}
        return httpx.Client(base_url=self.address.url, headers=headers, timeout=self.timeout_s)

    def slots(self, model: str | None = None) -> int:
        """Total number of slots of the engines that serve a model; default: the resource's model."""

        async def ask() -> int:
            async with Gateway(self.address) as gateway:
                return sum(engine.slots for engine in await gateway.engines_for(model or self.model))

        return run_blocking(ask())

    def size_pool(self, instance: dg.DagsterInstance, pool: str = "tokenmill", *, slots_each: int = 1) -> int:
        """Set the limit of a pool to the gateway's slots divided by `slots_each`, at least 1; return the limit."""
        limit = max(1, self.slots() // slots_each)
        instance.event_log_storage.set_concurrency_slots(pool, limit)
        return limit

    def runner(
        self,
        context: Context | None,
        *,
        scope: tuple[str, ...] | None = None,
        max_tokens_total: int | None = None,
        max_hours: float | None = None,
        **changes: Any,
    ) -> GatewayRunner:
        """A runner for recipes: `async with resource.runner(context) as runner`.

        Batches belong to the context's asset and partition, or to `scope`; a run with the same scope and lines
        re-attaches to them. When the budget is used up, the batch is cancelled; the next run reuses its answers and has
        the whole budget again. `changes`: fields of `BatchOptions`.
        """
        given: dict[str, Any] = {
            "model": self.model,
            "scope": _scope(context) if scope is None else scope,
            "labels": _labels(context),
            "window": self.window,
            "priority": self.priority,
            "poll_s": self.poll_s,
            "budget": Budget(max_tokens_total, None if max_hours is None else max_hours * 3600),
            "cancel_on_termination": self.cancel_on_termination,
            "retry_failed": self.retry_failed,
        }
        tell: Callable[[str], None] = context.log.info if context is not None else (lambda _: None)
        return GatewayRunner(self.address, BatchOptions(**{**given, **changes}), tell=tell)

    def run_batch(
        self, context: Context | None, lines: Iterable[Line], *, stage: str = "batch", **options: Any
    ) -> BatchResult:
        """Run lines as a batch and wait for it, for assets and ops of your own; `options`: those of `runner`."""

        async def work() -> BatchResult:
            async with self.runner(context, **options) as runner:
                done = await runner.run(stage, lines)
                answers = tuple(done.answers())
                return BatchResult(answers, done.end, done.total, runner.spent, tuple(runner.batches), runner.origin)

        return run_blocking(work())


def run_blocking(work: Coroutine[Any, Any, T]) -> T:
    """The result of a coroutine; raises `dagster.Failure` without a traceback for a TokenmillError."""
    try:
        return asyncio.run(work)
    except TokenmillError as error:
        raise failure(error) from None


def failure(error: TokenmillError) -> dg.Failure:
    """An error as a Dagster failure with its code and hint; allows retries unless the error is permanent."""
    metadata = {"code": error.code, **({"hint": error.hint} if error.hint else {})}
    permanent = isinstance(error, UsageError) or (isinstance(error, GatewayError) and not error.retryable)
    return dg.Failure(error.message, metadata=metadata, allow_retries=not permanent)


def partition_of(context: Context) -> str | None:
    """The partition of a step; None: not partitioned."""
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
    return {name: value[:MAX_METADATA_CHARACTERS] for name, value in labels.items()}


def _name(context: Context) -> str:
    """The name of the assets, or of the op."""
    if not isinstance(context, dg.AssetExecutionContext):
        return context.op.name
    return ",".join(sorted(key.to_user_string() for key in context.selected_asset_keys))
