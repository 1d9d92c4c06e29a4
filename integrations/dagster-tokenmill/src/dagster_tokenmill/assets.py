"""Assets whose rows are the answers of a batch. Each partition is a batch; a restarted run re-attaches to it.

The asset writes its table atomically. Its value, which Dagster's IO manager stores, is the path of the table; a
downstream asset that loads the value gets the path.
"""

from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import dagster as dg

from dagster_tokenmill.facts import facts_of, file_facts
from dagster_tokenmill.paths import check_template, path_for
from dagster_tokenmill.resource import TokenmillResource, partition_of, run_blocking
from dagster_tokenmill.runner import GatewayRunner
from dagster_tokenmill.source import Source, reader_of, rows_of
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
"""Default columns of a batch's table, with their types."""


@dataclass(frozen=True, slots=True)
class AssetOutput:
    """The result of an asset's function."""

    rows: int
    end: End
    metadata: Mapping[str, dg.MetadataValue | str | int | float | None]  # more metadata; None is left out


Work: TypeAlias = Callable[[dg.AssetExecutionContext, GatewayRunner, Path, Mapping[str, Any]], Awaitable[AssetOutput]]
"""Writes an asset's file; gets the context, an open runner, the file's path and the values of upstream assets."""


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
    """An asset with one batch per partition.

    `lines`: the jobs, from a function of the context and the values of `ins`, an upstream asset or a file (see
    `Source`). A job is a line of OpenAI's batch format, or a prompt that is sent as a chat with the keys of `body`
    (max_tokens, temperature, seed, ...). Every run must make the same lines, because they are the batch's key.
    `rows`: makes a row of an answer; None skips it. `columns`: the columns of the rows and their types.
    `path`: the file to write (.parquet, .jsonl, .jsonl.gz, .jsonl.zst), with {partition} and {asset}.
    `max_tokens_total`, `max_hours`: limits of one run. When one is reached, the batch is cancelled and its answers are
    written.
    `options`: those of `recipe_asset`.
    """
    make = row_of if rows is None else rows
    options["ins"], read = reader_of(lines, "lines", options.get("ins"))

    def jobs(context: dg.AssetExecutionContext, values: Mapping[str, Any]) -> Iterator[Line]:
        for number, line in enumerate(rows_of(read(context, values)), 1):
            if isinstance(line, str):
                yield chat_line(str(number), [{"role": "user", "content": line}], **(body or {}))
            else:
                yield line

    async def work(
        context: dg.AssetExecutionContext, runner: GatewayRunner, file: Path, values: Mapping[str, Any]
    ) -> AssetOutput:
        stage = await runner.run("batch", jobs(context, values))
        made = (row for row in map(make, stage.answers()) if row is not None)
        return AssetOutput(write_rows(file, made, columns, metadata=provenance(runner)), stage.end, {})

    return recipe_asset(name, work, path=path, max_tokens_total=max_tokens_total, max_hours=max_hours, **options)


def recipe_asset(
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
    """An asset written by an asynchronous function, which may run several batches (see `Work`).

    `pool`: the Dagster pool that limits concurrent batches. `options`: those of `dagster.asset`.
    """
    check_template(path, partitioned=partitions_def is not None)

    def compute(context: dg.AssetExecutionContext, **values: Any) -> Any:
        resource: TokenmillResource = getattr(context.resources, resource_key)
        if partitions_def is not None and not context.has_partition_key:
            raise dg.Failure(
                f"{name}: a run must have exactly one partition, because each partition is a batch",
                allow_retries=False,
            )
        partition = partition_of(context)
        file = path_for(path, asset=context.asset_key.to_user_string(), partition=partition)

        async def run() -> dg.MaterializeResult[str]:
            async with resource.runner(context, max_tokens_total=max_tokens_total, max_hours=max_hours) as runner:
                output: AssetOutput = await work(context, runner, file, values)
                return dg.MaterializeResult(metadata=_metadata(resource, runner, output, file), value=str(file))

        return run_blocking(run())

    asset: Callable[[Callable[..., Any]], dg.AssetsDefinition] = dg.asset(
        name=name,
        required_resource_keys={resource_key},
        pool=pool,
        partitions_def=partitions_def,
        ins=ins or {},
        kinds={"tokenmill"},
        **options,
    )
    return asset(compute)


def _metadata(resource: TokenmillResource, runner: GatewayRunner, output: AssetOutput, file: Path) -> dict[str, Any]:
    facts = facts_of(
        runner.batches,
        runner.origin,
        end=output.end,
        page=resource.page,
        batch_url=resource.batch_url,
        cost_per_hour=resource.cost_per_hour,
        currency=resource.currency,
    )
    return {
        **file_facts(file, output.rows),
        **facts,
        **{key: value for key, value in output.metadata.items() if value is not None},
    }


def row_of(answer: Answered) -> dict[str, Any]:
    """The default row of an answer or a failed line, with `COLUMNS`."""
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


def provenance(runner: GatewayRunner) -> dict[str, str]:
    """Model, engine, build and batches, as metadata of the file."""
    origin = runner.origin
    batches = ",".join(one.batch.id for one in runner.batches)
    return {"model": origin.model, "engine": origin.engine, "build": origin.build, "batches": batches}
