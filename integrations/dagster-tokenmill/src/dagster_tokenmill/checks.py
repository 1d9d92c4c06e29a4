"""Asset checks of a written table: number of rows, share of duplicates, share of invalid rows.

A check reads the file named in the materialisation's metadata: that of the run's partition, else the newest.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import dagster as dg

from dagster_tokenmill.facts import PATH
from dagster_tokenmill.source import Upstream, key_of
from tokenmill.errors import TokenmillError
from tokenmill.recipes import NearDuplicates, read_rows, schema_error

_PARTITION_TAG = "dagster/partition"
_MAX_EXAMPLES = 5  # rows listed in the metadata
Row: TypeAlias = Mapping[str, Any]
Valid: TypeAlias = Callable[[Row], bool | str | None] | Mapping[str, Mapping[str, Any]]
"""JSON schemas by column, or a function of a row: it returns False or a reason if the row is invalid, else True or
None."""


def checks_for(
    asset: Upstream,
    *,
    rows: tuple[int | None, int | None] | None = None,
    duplicates_at_most: float | None = None,
    duplicate_columns: Sequence[str] = ("text",),
    near: float | None = None,
    valid: Valid | None = None,
    invalid_at_most: float = 0.0,
    severity: dg.AssetCheckSeverity = dg.AssetCheckSeverity.ERROR,
    blocking: bool = False,
) -> list[dg.AssetChecksDefinition]:
    """Asset checks of a table, one for each condition that is given.

    `rows`: minimum and maximum number of rows; None: no limit. `duplicates_at_most`: maximum share of rows whose
    `duplicate_columns` repeat those of an earlier row: word for word, or with a similarity of at least `near` (0 to 1).
    `invalid_at_most`: maximum share of rows that are not `valid`.
    """
    key = key_of(asset)
    wanted: list[tuple[str, str, Callable[[Iterator[Row]], dg.AssetCheckResult]]] = []
    if rows is not None:
        wanted.append(("row_count", "The number of rows is within the limits.", lambda read: counted(read, *rows)))
    if duplicates_at_most is not None:
        max_share = duplicates_at_most
        columns = tuple(duplicate_columns)
        wanted.append(
            (
                "duplicates",
                "The share of duplicate rows is within the limit.",
                lambda read: repeated(read, columns, max_share, near),
            )
        )
    if valid is not None:
        judge = valid if callable(valid) else _by_schema(valid)
        wanted.append(
            (
                "validity",
                "The share of invalid rows is within the limit.",
                lambda read: judged(read, judge, invalid_at_most),
            )
        )
    return [_check(key, name, description, look, severity, blocking=blocking) for name, description, look in wanted]


def _check(
    key: dg.AssetKey,
    name: str,
    description: str,
    look: Callable[[Iterator[Row]], dg.AssetCheckResult],
    severity: dg.AssetCheckSeverity,
    *,
    blocking: bool,
) -> dg.AssetChecksDefinition:
    def check(context: dg.AssetCheckExecutionContext) -> dg.AssetCheckResult:
        path = written_file(context.instance, key, context.run.tags.get(_PARTITION_TAG))
        if path is None:
            return dg.AssetCheckResult(
                passed=False, severity=severity, description="no table has been materialised yet"
            )
        try:
            found = look(read_rows(path))
        except (TokenmillError, KeyError) as error:
            reason = error.message if isinstance(error, TokenmillError) else f"the table has no column {error}"
            return dg.AssetCheckResult(passed=False, severity=severity, description=reason)
        metadata = {**found.metadata, PATH: dg.MetadataValue.path(str(path))}
        return found._replace(severity=severity, metadata=metadata)

    decorate: Callable[[Callable[..., Any]], dg.AssetChecksDefinition] = dg.asset_check(
        asset=key, name=name, description=description, blocking=blocking
    )
    return decorate(check)


def written_file(instance: dg.DagsterInstance, asset: dg.AssetKey, partition: str | None) -> Path | None:
    """The file of an asset's newest materialisation, or of a partition's; None: never materialised."""
    records = dg.AssetRecordsFilter(asset_key=asset, asset_partitions=None if partition is None else [partition])
    for record in instance.fetch_materializations(records, limit=1).records:
        value = record.asset_materialization.metadata.get(PATH) if record.asset_materialization else None
        if value is not None:
            return Path(str(value.value))
    return None


def counted(rows: Iterator[Row], minimum: int | None, maximum: int | None) -> dg.AssetCheckResult:
    """Check the number of rows."""
    count = sum(1 for _ in rows)
    passed = (minimum is None or count >= minimum) and (maximum is None or count <= maximum)
    bounds = f"{'any' if minimum is None else f'{minimum:,}'} to {'any' if maximum is None else f'{maximum:,}'}"
    return dg.AssetCheckResult(
        passed=passed, description=f"{count:,} rows, {bounds} expected", metadata={"rows": count}
    )


def repeated(rows: Iterator[Row], columns: Sequence[str], max_share: float, near: float | None) -> dg.AssetCheckResult:
    """Check the share of rows that repeat an earlier row."""
    index = None if near is None else NearDuplicates(near)
    seen: dict[str, int] = {}
    pairs: list[str] = []
    count = repeats = 0
    for count, row in enumerate(rows, 1):
        text = "\n".join(" ".join(str(row[column]).split()).casefold() for column in columns)
        like = seen.get(text)
        if like is None and index is not None:
            found = index.find(text)
            like = int(found.name) if found is not None else None
        if like is not None:
            repeats += 1
            pairs.append(f"row {count} repeats row {like}")
            continue
        seen[text] = count
        if index is not None:
            index.add(str(count), text)
    return _share(repeats, count, max_share, "repeat an earlier row", pairs)


def judged(rows: Iterator[Row], judge: Callable[[Row], bool | str | None], max_share: float) -> dg.AssetCheckResult:
    """Check the share of invalid rows."""
    faults: list[str] = []
    count = 0
    for count, row in enumerate(rows, 1):
        verdict = judge(row)
        if verdict is False or isinstance(verdict, str):
            faults.append(f"row {count}{f': {verdict}' if verdict else ''}")
    return _share(len(faults), count, max_share, "are invalid", faults)


def _share(part: int, whole: int, maximum: float, what: str, examples: Sequence[str]) -> dg.AssetCheckResult:
    share = part / whole if whole else 0.0
    return dg.AssetCheckResult(
        passed=share <= maximum,
        description=f"{part:,} of {whole:,} rows {what} ({share:.1%}); the limit is {maximum:.1%}",
        metadata={"rows": whole, "share": share, "found": dg.MetadataValue.json(list(examples[:_MAX_EXAMPLES]))},
    )


def _by_schema(schemas: Mapping[str, Mapping[str, Any]]) -> Callable[[Row], str | None]:
    def judge(row: Row) -> str | None:
        for column, schema in schemas.items():
            value = row[column]
            if isinstance(value, str) and schema.get("type") not in ("string", None):
                try:
                    value = json.loads(value)
                except ValueError:
                    return f"{column} is not JSON"
            fault = schema_error(schema, value, where=column)
            if fault is not None:
                return fault
        return None

    return judge
