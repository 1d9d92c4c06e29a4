"""Assets whose rows are a batch's answers. A partition is a batch; a run that comes again waits for what is there.

The table is written by the asset itself, whole or not at all; what Dagster's IO manager keeps is its path, so that an
asset downstream gets a path where it asks for a value.
"""

from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import dagster as dg

from dagster_tokenmill.facts import facts_of, written
from dagster_tokenmill.mill import GatewayMill
from dagster_tokenmill.paths import check_template, path_for
from dagster_tokenmill.resource import TokenmillResource, partition_of, told
from dagster_tokenmill.source import Source, rows_of, taking
from tokenmill.recipes import Answered, End, Line, chat_line, text_of, write_rows

POOL = "tokenmill"
COLUMNS: Mapping[str, str] = {
    "custom_id": "string",
    "text": "string",
    "finish_reason": "string",
    "prompt_tokens": "int64",
    "completion_tokens": "int64",
    "error_code": "string",
    "error_message": "string",
}
"""Of a batch's table where nothing else is said."""


@dataclass(frozen=True, slots=True)
class Made:
    """What a recipe has written."""

    rows: int
    end: End
    more: Mapping[str, dg.MetadataValue | str | int | float | None]  # its own figures


Work: TypeAlias = Callable[[dg.AssetExecutionContext, GatewayMill, Path, Mapping[str, Any]], Awaitable[Made]]
"""From the context, an open mill, the file to write and the values of assets upstream to what was made."""


def batch_asset(
    name: str,
    *,
    path: str,
    lines: Source,
    rows: Callable[[Answered], Mapping[str, Any] | None] | None = None,
    columns: Mapping[str, str] = COLUMNS,
    body: Mapping[str, Any] | None = None,
    max_tokens_total: int | None = None,
    max_hours: float | None = None,
    **options: Any,
) -> dg.AssetsDefinition:
    """An asset that is one batch for each partition.

    `lines` makes the jobs: a function of the context and of the values of `ins`, an asset whose value they are, or a
    file (see `Source`). A line is one of OpenAI's batch format or a mere prompt, which becomes a chat with `body`
    (max_tokens, temperature, seed, ...). It has to make the same lines whenever it is asked: they are how a run finds
    its batch again.
    `rows` makes a row of an answer, None: no row; `columns` names what is in a row and its types.
    `path` is the file to write (.parquet, .jsonl, .jsonl.gz, .jsonl.zst) with {partition} and {asset} in it.
    `max_tokens_total`, `max_hours`: what one run may use; then the batch is cancelled, and what is answered is written.
    `options`: as `mill_asset`.
    """
    make = row_of if rows is None else rows
    options["ins"], take = taking(lines, "lines", options.get("ins"))

    def jobs(context: dg.AssetExecutionContext, values: Mapping[str, Any]) -> Iterator[Line]:
        for number, line in enumerate(rows_of(take(context, values)), 1):
            yield line if not isinstance(line, str) else chat_line(str(number), [_asking(line)], **(body or {}))

    async def work(context: dg.AssetExecutionContext, mill: GatewayMill, file: Path, values: Mapping[str, Any]) -> Made:
        ran = await mill.run("batch", jobs(context, values))
        made = (row for row in map(make, ran.answers()) if row is not None)
        return Made(write_rows(file, made, columns, metadata=provenance(mill)), ran.end, {})

    return mill_asset(name, work, path=path, max_tokens_total=max_tokens_total, max_hours=max_hours, **options)


def mill_asset(
    name: str,
    work: Work,
    *,
    path: str,
    resource_key: str = "tokenmill",
    pool: str | None = POOL,
    partitions_def: "dg.PartitionsDefinition[Any] | None" = None,
    max_tokens_total: int | None = None,
    max_hours: float | None = None,
    ins: Mapping[str, dg.AssetIn] | None = None,
    **options: Any,
) -> dg.AssetsDefinition:
    """An asset made by an asynchronous function of the context, an open mill, the file to write and values upstream.

    `pool`: Dagster's, which bounds how many batches are handed in at once. `options`: as `dagster.asset`.
    """
    check_template(path, partitioned=partitions_def is not None)

    def milled(context: dg.AssetExecutionContext, **values: Any) -> Any:
        resource: TokenmillResource = getattr(context.resources, resource_key)
        if partitions_def is not None and not context.has_partition_key:
            raise dg.Failure(f"{name} takes one partition a run: each is a batch of its own", allow_retries=False)
        partition = partition_of(context)
        file = path_for(path, asset=context.asset_key.to_user_string(), partition=partition)

        async def run() -> dg.MaterializeResult[str]:
            async with resource.mill(context, max_tokens_total=max_tokens_total, max_hours=max_hours) as mill:
                made: Made = await work(context, mill, file, values)
                return dg.MaterializeResult(metadata=_metadata(resource, mill, made, file), value=str(file))

        return told(run())

    asset: Callable[[Callable[..., Any]], dg.AssetsDefinition] = dg.asset(
        name=name,
        required_resource_keys={resource_key},
        pool=pool,
        partitions_def=partitions_def,
        ins=ins or {},
        kinds={"tokenmill"},
        **options,
    )
    return asset(milled)


def _metadata(resource: TokenmillResource, mill: GatewayMill, made: Made, file: Path) -> dict[str, Any]:
    facts = facts_of(
        mill.worked,
        mill.origin,
        end=made.end,
        page=resource.page,
        batch_url=resource.batch_url,
        cost_per_hour=resource.cost_per_hour,
        currency=resource.currency,
    )
    return {
        **written(file, made.rows),
        **facts,
        **{key: value for key, value in made.more.items() if value is not None},
    }


def row_of(answer: Answered) -> dict[str, Any]:
    """What the answer to a line comes to in a table, whatever it was."""
    body: Mapping[str, Any] = answer.body or {}
    choices = body.get("choices") or [{}]
    usage = body.get("usage") or {}
    text = text_of(answer)
    return {
        "custom_id": answer.custom_id,
        "text": choices[0].get("text") if text is None else text,
        "finish_reason": choices[0].get("finish_reason"),
        "prompt_tokens": usage.get("prompt_tokens"),
        "completion_tokens": usage.get("completion_tokens"),
        "error_code": answer.code,
        "error_message": answer.message,
    }


def _asking(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def provenance(mill: GatewayMill) -> dict[str, str]:
    """Who has answered, for the file itself."""
    origin = mill.origin
    batches = ",".join(one.batch.id for one in mill.worked)
    return {"model": origin.model, "engine": origin.engine, "build": origin.build, "batches": batches}
