"""Paths of asset files: templates with {partition} and {asset}."""

import string
from pathlib import Path
from urllib.parse import quote

from tokenmill.errors import UsageError
from tokenmill.recipes import file_suffix

_SAFE = "=,@+ "
"""Characters kept in file names, in addition to letters, digits and _.-~"""


def check_template(template: str, *, partitioned: bool) -> None:
    """Raise UsageError for a template that cannot name the files of an asset."""
    try:
        names = {name for _, name, _, _ in string.Formatter().parse(template) if name is not None}
    except ValueError as error:
        hint = "use a path such as data/{partition}.parquet"
        raise UsageError(f"invalid path {template!r}: {error}", hint=hint) from None
    unknown = sorted(names - {"partition", "asset"})
    if unknown:
        raise UsageError(
            f"unknown placeholder {{{unknown[0]}}} in the path {template!r}", hint="use {partition} or {asset}"
        )
    if partitioned and "partition" not in names:
        raise UsageError(
            f"the path {template!r} is the same for all partitions", hint="add {partition}, so that each has its file"
        )
    if not partitioned and "partition" in names:
        raise UsageError(
            f"the path {template!r} has {{partition}}, but the asset is not partitioned", hint="set partitions_def"
        )
    file_suffix(Path(template))


def path_for(template: str, *, asset: str, partition: str | None) -> Path:
    """The absolute path of a partition's file; creates its folder."""
    path = _filled(template, asset, partition)
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


def folder_for(template: str, *, asset: str, partition: str | None) -> Path:
    """The absolute path of a partition's folder; creates it."""
    path = _filled(template, asset, partition)
    path.mkdir(parents=True, exist_ok=True)
    return path


def _filled(template: str, asset: str, partition: str | None) -> Path:
    return Path(template.format(asset=plain(asset), partition=plain(partition or ""))).absolute()


def plain(name: str) -> str:
    """A name quoted for use as a file name; different names give different results."""
    quoted = quote(name, safe=_SAFE)
    return quoted.replace(".", "%2E") if name.strip(".") == "" else quoted
