"""The rows an asset reads: from a file, an upstream asset or a function."""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import dagster as dg

from dagster_tokenmill.paths import plain
from tokenmill.errors import UsageError
from tokenmill.recipes import read_rows

Upstream: TypeAlias = str | Sequence[str] | dg.AssetKey | dg.AssetsDefinition | dg.AssetSpec
"""An asset: its name, key or definition."""
Source: TypeAlias = Path | Upstream | Callable[..., Any]
"""A `Path` is a file, {partition} allowed; an asset's value is a path or rows; a function takes the context and the
values of `ins` and returns a path or rows."""
ReadSource: TypeAlias = Callable[[dg.AssetExecutionContext, Mapping[str, Any]], Any]
"""Returns the value of a source in a step: a path, or rows."""


def reader_of(
    source: Source, name: str, ins: Mapping[str, dg.AssetIn] | None
) -> tuple[dict[str, dg.AssetIn], ReadSource]:
    """The asset's inputs, with an upstream source added as `name`, and the function that reads the source."""
    own = dict(ins or {})
    if isinstance(source, Path):
        return own, lambda context, _: _for_partition(source, context)
    if isinstance(source, dg.AssetsDefinition) or not callable(source):
        return {**own, name: dg.AssetIn(key_of(source))}, lambda _, values: values[name]
    return own, lambda context, values: source(context, **values)


def key_of(asset: Upstream) -> dg.AssetKey:
    """The key of an asset."""
    return asset.key if isinstance(asset, dg.AssetsDefinition | dg.AssetSpec) else dg.AssetKey.from_coercible(asset)


def rows_of(value: Any) -> Iterable[Any]:
    """The rows of a source's value: those of a table at a path, or the value itself."""
    return read_rows(Path(value)) if isinstance(value, str | Path) else value


def file_of(value: Any, folder: Path, name: str) -> Path:
    """A source's value as a file: its path, or a new JSONL file with its rows."""
    if isinstance(value, str | Path):
        return Path(value)
    path = folder / f"{name}.jsonl"
    with path.open("w", encoding="utf-8") as file:
        for number, row in enumerate(value, 1):
            try:
                file.write(json.dumps(row, ensure_ascii=False) + "\n")
            except TypeError as error:
                raise UsageError(
                    f"row {number} of {name} cannot be written as JSON: {error}",
                    hint="use dicts, lists, strings, numbers, booleans and None",
                ) from None
    return path


def _for_partition(path: Path, context: dg.AssetExecutionContext) -> Path:
    return Path(str(path).format(partition=plain(context.partition_key))) if context.has_partition_key else path
