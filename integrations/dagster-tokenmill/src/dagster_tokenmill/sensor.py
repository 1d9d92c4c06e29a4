"""A sensor for batches that end at the gateway, whichever client submitted them.

The cursor holds the newest batch seen and the batches that were unfinished then. A tick requests newer batches and the
unfinished ones, so its cost does not grow with the gateway's history, and no batch is reported twice.
"""

import asyncio
import json
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

import dagster as dg

from dagster_tokenmill.batch import FINAL, Batch
from dagster_tokenmill.errors import GatewayRefused, GatewayUnavailable
from dagster_tokenmill.gateway import Gateway
from dagster_tokenmill.resource import TokenmillResource
from dagster_tokenmill.source import Upstream, key_of

_NOT_FOUND = 404
PATIENCE_S = 10.0  # of one tick


@dataclass(frozen=True, slots=True)
class Cursor:
    """The sensor's cursor."""

    newest: str | None = None  # newest batch seen; None: no batch
    newest_s: int = 0  # its creation time
    unfinished: tuple[str, ...] = ()

    def text(self) -> str:
        """The cursor as Dagster stores it."""
        return json.dumps([self.newest, self.newest_s, list(self.unfinished)])


def parse_cursor(text: str) -> Cursor:
    """Parse the output of `Cursor.text`."""
    newest, newest_s, unfinished = json.loads(text)
    return Cursor(newest, newest_s, tuple(unfinished))


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
    """A run of `target`, or a materialisation of `asset`, for every batch that ends with one of `statuses`.

    `target`: a job or assets, as for `dagster.sensor`; `request` makes the RunRequest for a batch. `asset`: an external
    asset, materialised by the clients that submit the batches. `metadata`: only batches with all of these values.
    Batches that ended before the first tick are reported only with `from_the_start`. `options`: those of
    `dagster.sensor`.
    """
    if (target is None) == (asset is None):
        raise dg.DagsterInvalidDefinitionError(f"the sensor {name} needs a target or an asset, not both")
    unknown = sorted(set(statuses) - FINAL)
    if unknown:
        raise dg.DagsterInvalidDefinitionError(
            f"the sensor {name}: {unknown[0]!r} is not a final status; use {', '.join(sorted(FINAL))}"
        )
    given = dict(options) if target is None else {"target": target, **options}

    def tick(context: dg.SensorEvaluationContext) -> dg.SensorResult | dg.SkipReason:
        resource: TokenmillResource = getattr(context.resources, resource_key)
        before = parse_cursor(context.cursor) if context.cursor else None
        address = replace(resource.address, patience_s=PATIENCE_S, timeout_s=min(resource.timeout_s, PATIENCE_S))
        try:
            batches, after = asyncio.run(_finished(Gateway(address), before or Cursor(), metadata))
        except GatewayUnavailable as error:
            return dg.SkipReason(error.message)
        skip = before is None and not from_the_start
        ended = [] if skip else [batch for batch in batches if batch.status in statuses]
        if asset is not None:
            return dg.SensorResult(
                asset_events=[_event(asset, batch, resource) for batch in ended], cursor=after.text()
            )
        return dg.SensorResult([(request or run_for)(batch) for batch in ended], cursor=after.text())

    sensor: Callable[[Callable[..., Any]], dg.SensorDefinition] = dg.sensor(
        name=name, required_resource_keys={resource_key}, minimum_interval_seconds=minimum_interval_seconds, **given
    )
    return sensor(tick)


def run_for(batch: Batch) -> dg.RunRequest:
    """The default RunRequest; its run key allows one run per batch and status."""
    tags = {"tokenmill/batch": batch.id, "tokenmill/status": batch.status}
    return dg.RunRequest(run_key=f"{batch.id}:{batch.status}", tags=tags)


async def _finished(gateway: Gateway, known: Cursor, metadata: Mapping[str, str] | None) -> tuple[list[Batch], Cursor]:
    """Batches that ended since the last tick, oldest first, and the new cursor."""
    async with gateway:
        new = await gateway.batches(
            metadata=metadata, until=lambda batch: batch.id == known.newest or batch.created_s < known.newest_s
        )
        current = [batch for name in known.unfinished if (batch := await _batch(gateway, name)) is not None]
    current += reversed(new)
    newest, newest_s = (new[0].id, new[0].created_s) if new else (known.newest, known.newest_s)
    after = Cursor(newest, newest_s, tuple(batch.id for batch in current if not batch.final))
    return [batch for batch in current if batch.final], after


async def _batch(gateway: Gateway, name: str) -> Batch | None:
    """The batch; None if the gateway no longer has it."""
    try:
        return await gateway.batch(name)
    except GatewayRefused as error:
        if error.status != _NOT_FOUND:
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
