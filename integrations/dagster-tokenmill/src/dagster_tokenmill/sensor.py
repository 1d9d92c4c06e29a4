"""A sensor that tells of batches that have ended at the gateway, whoever has handed them in.

Its cursor has the newest batch that was seen and those that were not over then: a tick asks for what is newer, and for
each of these. So a tick costs what is new, however many batches the gateway remembers, and none is told twice.
"""

import asyncio
import json
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

import dagster as dg

from dagster_tokenmill.batch import FINAL, Batch
from dagster_tokenmill.errors import GatewayAway, Refused
from dagster_tokenmill.gateway import Gateway
from dagster_tokenmill.resource import TokenmillResource
from dagster_tokenmill.source import Upstream, key_of

_GONE = 404
PATIENCE_S = 10.0  # of a tick; the next one comes anyway


@dataclass(frozen=True, slots=True)
class Seen:
    """A cursor."""

    newest: str | None = None  # None: there was none
    newest_s: int = 0  # when it was created
    open: tuple[str, ...] = ()  # not over then

    def text(self) -> str:
        """As Dagster keeps it."""
        return json.dumps([self.newest, self.newest_s, list(self.open)])


def seen_in(cursor: str) -> Seen:
    """What `Seen.text` made."""
    newest, newest_s, still_open = json.loads(cursor)
    return Seen(newest, newest_s, tuple(still_open))


def finished_batches_sensor(
    name: str,
    *,
    target: Any = None,
    asset: Upstream | None = None,
    statuses: Collection[str] = ("completed",),
    metadata: Mapping[str, str] | None = None,
    request: Callable[[Batch], dg.RunRequest] | None = None,
    from_the_start: bool = False,
    resource_key: str = "tokenmill",
    minimum_interval_seconds: int = 30,
    **options: Any,
) -> dg.SensorDefinition:
    """A run of `target`, or a materialisation of `asset`, for every batch that comes to one of `statuses`.

    `target`: a job, or assets, as `dagster.sensor` takes it; `request` makes the RunRequest of a batch. `asset`: one
    that is made outside of Dagster, by whoever hands in such batches. `metadata`: only batches that hold all of it.
    What had ended before the first tick is told only with `from_the_start`. `options`: as `dagster.sensor`.
    """
    if (target is None) == (asset is None):
        raise dg.DagsterInvalidDefinitionError(f"the sensor {name} needs either a target or an asset")
    wrong = sorted(set(statuses) - FINAL)
    if wrong:
        raise dg.DagsterInvalidDefinitionError(f"the sensor {name}: no batch ends as {wrong[0]}")
    given = dict(options) if target is None else {"target": target, **options}

    def tick(context: dg.SensorEvaluationContext) -> dg.SensorResult | dg.SkipReason:
        resource: TokenmillResource = getattr(context.resources, resource_key)
        before = seen_in(context.cursor) if context.cursor else None
        hurried = replace(resource.address, patience_s=PATIENCE_S, timeout_s=min(resource.timeout_s, PATIENCE_S))
        try:
            batches, after = asyncio.run(_looked(Gateway(hurried), before or Seen(), metadata))
        except GatewayAway as error:
            return dg.SkipReason(error.message)
        told_before = before is None and not from_the_start
        over = [] if told_before else [batch for batch in batches if batch.status in statuses]
        if asset is not None:
            return dg.SensorResult(asset_events=[_event(asset, batch, resource) for batch in over], cursor=after.text())
        return dg.SensorResult([(request or run_for)(batch) for batch in over], cursor=after.text())

    sensor: Callable[[Callable[..., Any]], dg.SensorDefinition] = dg.sensor(
        name=name, required_resource_keys={resource_key}, minimum_interval_seconds=minimum_interval_seconds, **given
    )
    return sensor(tick)


def run_for(batch: Batch) -> dg.RunRequest:
    """One run for each batch, ever."""
    tags = {"tokenmill/batch": batch.id, "tokenmill/status": batch.status}
    return dg.RunRequest(run_key=f"{batch.id}:{batch.status}", tags=tags)


async def _looked(gateway: Gateway, known: Seen, metadata: Mapping[str, str] | None) -> tuple[list[Batch], Seen]:
    """Batches that are over and were not, the oldest first; and what is seen now."""
    async with gateway:
        new = await gateway.batches(
            metadata=metadata, until=lambda batch: batch.id == known.newest or batch.created_s < known.newest_s
        )
        looked_at = [batch for name in known.open if (batch := await _still_there(gateway, name)) is not None]
    looked_at += reversed(new)
    newest, newest_s = (new[0].id, new[0].created_s) if new else (known.newest, known.newest_s)
    after = Seen(newest, newest_s, tuple(batch.id for batch in looked_at if not batch.final))
    return [batch for batch in looked_at if batch.final], after


async def _still_there(gateway: Gateway, name: str) -> Batch | None:
    try:
        return await gateway.batch(name)
    except Refused as error:
        if error.status != _GONE:
            raise
        return None


def _event(asset: Upstream, batch: Batch, resource: TokenmillResource) -> dg.AssetMaterialization:
    return dg.AssetMaterialization(
        key_of(asset),
        partition=batch.metadata.get("partition"),
        metadata={
            "batch": dg.MetadataValue.url(resource.batch_url(batch.id)),
            "status": batch.status,
            "answers": batch.completed,
            "lines without an answer": batch.failed,
            "prompt tokens": batch.usage.prompt_tokens,
            "cached tokens": batch.usage.cached_tokens,
            "generated tokens": batch.usage.completion_tokens,
            "page": dg.MetadataValue.url(resource.page),
        },
    )
