"""Where an asset's file is: a path with {partition} and {asset} in it. Pure but for the folders it makes."""

import string
from pathlib import Path
from urllib.parse import quote

from tokenmill.errors import UsageError
from tokenmill.recipes import file_suffix

_SAFE = "=,@+ "
"""Characters that stay as they are, beside letters, digits and _.-~"""


def check_template(template: str, *, partitioned: bool) -> None:
    """Refuse at definition what could not be written at night."""
    try:
        names = {name for _, name, _, _ in string.Formatter().parse(template) if name is not None}
    except ValueError as error:
        hint = "for example data/{partition}.parquet"
        raise UsageError(f"the path {template!r} cannot be read: {error}", hint=hint) from None
    unknown = sorted(names - {"partition", "asset"})
    if unknown:
        raise UsageError(f"the path {template!r} has {{{unknown[0]}}}", hint="{partition} and {asset} are known")
    if partitioned and "partition" not in names:
        raise UsageError(
            f"the path {template!r} is the same for all partitions", hint="put {partition} into it: one file for each"
        )
    if not partitioned and "partition" in names:
        raise UsageError(f"the path {template!r} has {{partition}}, and the asset has none", hint="give partitions_def")
    file_suffix(Path(template))


def path_for(template: str, *, asset: str, partition: str | None) -> Path:
    """The absolute path of one partition's file, its folder made."""
    path = Path(template.format(asset=plain(asset), partition=plain(partition or ""))).absolute()
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


def folder_for(template: str, *, asset: str, partition: str | None) -> Path:
    """The same for a folder."""
    path = Path(template.format(asset=plain(asset), partition=plain(partition or ""))).absolute()
    path.mkdir(parents=True, exist_ok=True)
    return path


def plain(name: str) -> str:
    """A name as part of a file's name: never a folder, another one for every other name."""
    quoted = quote(name, safe=_SAFE)
    return quoted.replace(".", "%2E") if name.strip(".") == "" else quoted
