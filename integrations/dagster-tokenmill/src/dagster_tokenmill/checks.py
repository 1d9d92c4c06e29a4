"""Asset checks of a written table: how many rows, how many the same, how many valid. They read the file, not the batch.

The file is the one that the materialisation names: of the partition that the run is for, else of the newest.
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
_SHOWN = 5  # rows that are named
Row: TypeAlias = Mapping[str, Any]
Valid: TypeAlias = Callable[[Row], bool | str | None] | Mapping[str, Mapping[str, Any]]
"""A function that says whether a row is valid, or in words why not (None: it is); or JSON schemas by column."""


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
    """The checks of a table that was asked for, as many as there are conditions.

    `rows`: the fewest and the most, None: no limit. `duplicates_at_most`: the share of rows that repeat one before in
    `duplicate_columns`, word for word, or with `near` (0 to 1) in nearly the same words. `invalid_at_most`: the share
    of rows that `valid` may find wrong.
    """
    key = key_of(asset)
    wanted: list[tuple[str, str, Callable[[Iterator[Row]], dg.AssetCheckResult]]] = []
    if rows is not None:
        wanted.append(("row_count", "It has as many rows as expected.", lambda read: counted(read, *rows)))
    if duplicates_at_most is not None:
        most = duplicates_at_most
        columns = tuple(duplicate_columns)
        wanted.append(("duplicates", "Few rows repeat another.", lambda read: repeated(read, columns, most, near)))
    if valid is not None:
        judge = valid if callable(valid) else _by_schema(valid)
        wanted.append(("validity", "Rows are what they should be.", lambda read: judged(read, judge, invalid_at_most)))
    return [_check(key, name, about, look, severity, blocking=blocking) for name, about, look in wanted]


def _check(
    key: dg.AssetKey,
    name: str,
    about: str,
    look: Callable[[Iterator[Row]], dg.AssetCheckResult],
    severity: dg.AssetCheckSeverity,
    *,
    blocking: bool,
) -> dg.AssetChecksDefinition:
    def check(context: dg.AssetCheckExecutionContext) -> dg.AssetCheckResult:
        path = written_file(context.instance, key, context.run.tags.get(_PARTITION_TAG))
        if path is None:
            return dg.AssetCheckResult(passed=False, severity=severity, description="there is no table yet")
        try:
            found = look(read_rows(path))
        except (TokenmillError, KeyError) as error:
            said = error.message if isinstance(error, TokenmillError) else f"the table has no column {error}"
            return dg.AssetCheckResult(passed=False, severity=severity, description=said)
        metadata = {**found.metadata, PATH: dg.MetadataValue.path(str(path))}
        return found._replace(severity=severity, metadata=metadata)

    decorate: Callable[[Callable[..., Any]], dg.AssetChecksDefinition] = dg.asset_check(
        asset=key, name=name, description=about, blocking=blocking
    )
    return decorate(check)


def written_file(instance: dg.DagsterInstance, asset: dg.AssetKey, partition: str | None) -> Path | None:
    """The file of the newest materialisation, of one partition where it is named; None: there is none."""
    asked = dg.AssetRecordsFilter(asset_key=asset, asset_partitions=None if partition is None else [partition])
    for record in instance.fetch_materializations(asked, limit=1).records:
        value = record.asset_materialization.metadata.get(PATH) if record.asset_materialization else None
        if value is not None:
            return Path(str(value.value))
    return None


# What is looked at; pure.


def counted(rows: Iterator[Row], least: int | None, most: int | None) -> dg.AssetCheckResult:
    """Whether there are as many as there should be."""
    count = sum(1 for _ in rows)
    passed = (least is None or count >= least) and (most is None or count <= most)
    bounds = f"{'any' if least is None else f'{least:,}'} to {'any' if most is None else f'{most:,}'}"
    return dg.AssetCheckResult(
        passed=passed, description=f"{count:,} rows, {bounds} expected", metadata={"rows": count}
    )


def repeated(rows: Iterator[Row], columns: Sequence[str], most: float, near: float | None) -> dg.AssetCheckResult:
    """Whether few enough repeat one before."""
    index = None if near is None else NearDuplicates(near)
    seen: dict[str, int] = {}
    pairs: list[str] = []
    count = repeats = 0
    for count, row in enumerate(rows, 1):
        text = "\n".join(" ".join(str(row[column]).split()).casefold() for column in columns)
        like = seen.get(text)
        if like is None and index is not None:
            found = index.like(text)
            like = int(found.name) if found is not None else None
        if like is not None:
            repeats += 1
            pairs.append(f"row {count} is row {like} again")
            continue
        seen[text] = count
        if index is not None:
            index.add(str(count), text)
    return _share(repeats, count, most, "repeat another", pairs)


def judged(rows: Iterator[Row], judge: Callable[[Row], bool | str | None], most: float) -> dg.AssetCheckResult:
    """Whether few enough are wrong."""
    faults: list[str] = []
    count = 0
    for count, row in enumerate(rows, 1):
        said = judge(row)
        if said is False or isinstance(said, str):
            faults.append(f"row {count}{f': {said}' if said else ''}")
    return _share(len(faults), count, most, "are not valid", faults)


def _share(part: int, whole: int, most: float, what: str, named: Sequence[str]) -> dg.AssetCheckResult:
    share = part / whole if whole else 0.0
    return dg.AssetCheckResult(
        passed=share <= most,
        description=f"{part:,} of {whole:,} rows {what} ({share:.1%}); {most:.1%} are allowed",
        metadata={"rows": whole, "share": share, "found": dg.MetadataValue.json(list(named[:_SHOWN]))},
    )


def _by_schema(schemas: Mapping[str, Mapping[str, Any]]) -> Callable[[Row], str | None]:
    def judge(row: Row) -> str | None:
        for column, schema in schemas.items():
            value = row[column]
            if isinstance(value, str) and schema.get("type") not in ("string", None):
                try:
                    value = json.loads(value)
                except ValueError:
                    return f"{column} is no JSON"
            fault = schema_error(schema, value, where=column)
            if fault is not None:
                return fault
        return None

    return judge
