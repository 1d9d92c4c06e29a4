"""Where an asset takes its rows from: a file, an asset upstream, or a function."""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import dagster as dg

from dagster_tokenmill.paths import plain
from tokenmill.errors import UsageError
from tokenmill.recipes import read_rows

Upstream: TypeAlias = str | Sequence[str] | dg.AssetKey | dg.AssetsDefinition | dg.AssetSpec
"""An asset by its name, its key or its definition."""
Source: TypeAlias = Path | Upstream | Callable[..., Any]
"""A `Path` is a file, with {partition} in it where there are any; a text is an asset, whose value is a path or rows; a
function of the context and of the values of `ins` gives a path or rows."""
Take: TypeAlias = Callable[[dg.AssetExecutionContext, Mapping[str, Any]], Any]
"""What a source comes to in a step: a path, or rows."""


def taking(source: Source, called: str, ins: Mapping[str, dg.AssetIn] | None) -> tuple[dict[str, dg.AssetIn], Take]:
    """The inputs that an asset has with a source, and how it takes the source's value; `called`: its input's name."""
    own = dict(ins or {})
    if isinstance(source, Path):
        return own, lambda context, _: _for_partition(source, context)
    if isinstance(source, dg.AssetsDefinition) or not callable(source):
        return {**own, called: dg.AssetIn(key_of(source))}, lambda _, values: values[called]
    return own, lambda context, values: source(context, **values)


def key_of(asset: Upstream) -> dg.AssetKey:
    """The key of an asset that is named in any of the ways that Dagster knows."""
    return asset.key if isinstance(asset, dg.AssetsDefinition | dg.AssetSpec) else dg.AssetKey.from_coercible(asset)


def rows_of(value: Any) -> Iterable[Any]:
    """The rows of what an asset upstream gave: a path to a table, or rows themselves."""
    return read_rows(Path(value)) if isinstance(value, str | Path) else value


def file_of(value: Any, folder: Path, called: str) -> Path:
    """What an asset upstream gave as a file: its own, or a new one with its rows."""
    if isinstance(value, str | Path):
        return Path(value)
    path = folder / f"{called}.jsonl"
    with path.open("w", encoding="utf-8") as file:
        for row in value:
            try:
                file.write(json.dumps(row, ensure_ascii=False) + "\n")
            except TypeError as error:
                said = f"a row of {called} cannot be written as JSON: {error}"
                raise UsageError(said, hint="give plain values") from None
    return path


def _for_partition(path: Path, context: dg.AssetExecutionContext) -> Path:
    return Path(str(path).format(partition=plain(context.partition_key))) if context.has_partition_key else path
