"""Verifies an export with `datasets`: equal rows, equal values, one type per column.

Uses no network; the library's cache goes to a temporary folder.
"""

import math
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

from tokenmill.errors import TokenmillError, UsageError
from tokenmill.recipes.export import ExportRequest, columns_of, rows_of

_FLOAT32_BITS = 24


@dataclass(frozen=True, slots=True)
class Checked:
    """What the `datasets` library loaded."""

    rows: int
    features: Mapping[str, str]  # column -> type, as text
    version: str


def check(source: Path, target: Path, wanted: ExportRequest) -> Checked:
    """Load an export with `datasets` and compare it with its source; raises TokenmillError on a difference."""
    with _library() as datasets, tempfile.TemporaryDirectory(prefix="tokenmill-check-") as cache:
        kind = "parquet" if wanted.format == "parquet" else "json"
        try:
            found = datasets.load_dataset(kind, data_files=str(target), split="train", cache_dir=cache)
        except (datasets.exceptions.DatasetsError, ValueError, OSError) as error:
            raise TokenmillError(f"datasets cannot load {target}: {_first_line(error)}", hint=_HINT) from error
        columns = columns_of(source, wanted)
        if list(found.column_names) != list(columns):
            raise _differs(target, f"its columns are {', '.join(found.column_names)}, not {', '.join(columns)}")
        for name, kind in columns.items():
            expected = _feature(datasets, name, kind)
            is_now = found.features[name]
            if expected != is_now:
                raise _differs(target, f"{name} is read as {is_now}, not as {expected}")
        for number, (ours, theirs) in enumerate(zip_longest(rows_of(source, wanted), found), 1):
            if ours is None or theirs is None:
                raise _differs(target, f"it has {found.num_rows} rows, {'fewer' if ours else 'more'} than the source")
            for name in columns:
                if not _same(ours.get(name), theirs[name]):
                    raise _differs(target, f"{name} in row {number} has another value")
        return Checked(found.num_rows, {name: str(kind) for name, kind in found.features.items()}, datasets.__version__)


_HINT = "export it again; if the error remains, please report it"


def _feature(datasets: Any, name: str, kind: str) -> Any:
    """A column's feature type in `datasets`."""
    text = datasets.Value("string")
    if kind == "messages":
        return datasets.List({"role": text, "content": text})
    if name == "conversations":
        return datasets.List({"from": text, "value": text})
    if name == "history":
        return datasets.List(datasets.List(text))
    if kind.startswith("list<"):
        return datasets.List(_feature(datasets, name, kind[5:-1]))
    return datasets.Value(kind)


def _differs(target: Path, what: str) -> TokenmillError:
    return TokenmillError(f"{target} differs from its source: {what}", hint=_HINT)


def _same(ours: Any, theirs: Any) -> bool:
    """Whether two values are equal; numbers are compared as float32."""
    if isinstance(ours, list) and isinstance(theirs, list):
        return len(ours) == len(theirs) and all(map(_same, ours, theirs))
    if isinstance(ours, Mapping) and isinstance(theirs, Mapping):
        return all(_same(ours.get(key), theirs.get(key)) for key in {*ours, *theirs})
    if isinstance(ours, float) and isinstance(theirs, float):
        return math.isclose(ours, theirs, rel_tol=2.0 ** (1 - _FLOAT32_BITS), abs_tol=1e-30)
    return bool(ours == theirs)


@contextmanager
def _library() -> Iterator[Any]:
    try:
        import datasets  # noqa: PLC0415  optional dependency
        from huggingface_hub import constants  # noqa: PLC0415
    except ImportError:
        raise UsageError(
            "--check needs the `datasets` library, which is not installed",
            hint="pip install datasets, or remove --check",
        ) from None
    if not hasattr(datasets, "List"):
        raise UsageError(
            f"--check needs datasets 4 or newer (found {datasets.__version__})", hint="pip install -U datasets"
        )
    shown = datasets.utils.logging.is_progress_bar_enabled()
    datasets.disable_progress_bars()
    # Not in the environment, which would affect other users of the hub in this process.
    places: tuple[Any, ...] = (constants, datasets.config)
    before = [place.HF_HUB_OFFLINE for place in places]
    for place in places:
        place.HF_HUB_OFFLINE = True
    try:
        yield datasets
    finally:
        for place, value in zip(places, before, strict=True):
            place.HF_HUB_OFFLINE = value
        if shown:
            datasets.enable_progress_bars()


def _first_line(error: BaseException) -> str:
    cause = error.__cause__ or error
    return (str(cause).strip() or type(cause).__name__).splitlines()[0]
