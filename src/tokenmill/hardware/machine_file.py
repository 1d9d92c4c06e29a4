"""Machine files: one `Machine` as TOML that a person can read, edit and hand back.

Writing is generic over the dataclasses, so a new field of `Machine` needs nothing here. What is written
reads back as the same value; comments carry what a reader needs and no data. Knows nothing of the
catalogue and does not look at this machine.
"""

import dataclasses
import json
import math
import re
import textwrap
from collections.abc import Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import Any, get_args, get_type_hints

from tokenmill.decode import read_toml
from tokenmill.errors import ConfigError, UsageError
from tokenmill.hardware.machine import Machine
from tokenmill.storage.atomic import replace_file
from tokenmill.units import format_bytes

WIDTH = 100
HEADER = """\
# What one machine is. Plan for it with: --machine FILE
#
# Every line may be edited. Sizes are bytes, or text such as "755 GiB"; bandwidths are decimal GB/s.
# A line like `# mts = unknown` is a fact that was not found: remove the # and fill it in, or leave it.
# A key that tokenmill does not know is an error, so that a slip of the pen is never ignored.
"""
# For these None is an answer, not a gap.
ABSENT = {
    "container": "none",
    "virtual": "none",
    "cgroup_memory_bytes": "no limit",
    "cgroup_cpus": "no limit",
    "memlock_bytes": "no limit",
}
# Zero of these would be a machine that cannot exist, and a division by zero for whoever plans with it.
NEVER_ZERO = frozenset(
    {
        "sockets",
        "cores",
        "threads_per_core",
        "channels",
        "mts",
        "generation",
        "width",
        "max_generation",
        "max_width",
        "threads",
    }
)
_COMPARE = "tokenmill probe -o FILE writes a correct one to compare with"
_INDEX = re.compile(r"\[[0-9]+\]")


def read(path: Path) -> Machine:
    """Read one machine; ConfigError names the file, the key and what would be right."""
    try:
        machine = read_toml(Machine, path)
    except ConfigError as error:
        unreadable = isinstance(error.__cause__, OSError)
        way_out = "name a machine file that can be read" if unreadable else _COMPARE
        raise ConfigError(error.message, hint=error.hint or way_out) from error
    for key, complaint in chain(_impossible_numbers("", machine), _broken_references(machine)):
        raise ConfigError(f"{path}: {key}: {complaint}", hint=_COMPARE)
    return machine


def write(machine: Machine, path: Path) -> None:
    """Write one machine, replacing `path` atomically."""
    # A name that is not Unicode (a device, a mount) cannot be TOML; its odd bytes become question marks.
    text = to_toml(machine).encode("utf-8", "replace")
    try:
        if path.exists() and not path.is_file():  # /dev/stdout, a pipe: nothing to replace
            path.write_bytes(text)
            return
        replace_file(path.resolve(), text)
    except OSError as error:
        raise UsageError(
            f"cannot write {path}: {error.strerror}", hint="name a file in a folder you may write to"
        ) from error


def to_toml(machine: Machine) -> str:
    """The whole file, comments included."""
    comments = {path: [text] for path, text in _explanations(Machine, "")}
    for note in machine.notes:
        comments.setdefault(note.about, []).append(note.text)
    return "\n".join([HEADER, *_table(machine, "", comments)]).rstrip("\n") + "\n"


def _explanations(kind: type, path: str) -> Iterator[tuple[str, str]]:
    """What each table is for, by its path without indices."""
    for name, hint in get_type_hints(kind).items():
        inner = _dataclass_in(hint)
        if inner is not None:
            yield _join(path, name), (inner.__doc__ or "").partition("\n")[0]
            yield from _explanations(inner, _join(path, name))


def _table(value: Any, path: str, comments: dict[str, list[str]]) -> Iterator[str]:
    """The lines of one dataclass: its plain values, then its tables, as TOML demands.

    `path` is what notes call it (`gpus[0].pcie`). Takes each comment out of `comments` as it is told.
    """
    hints = get_type_hints(type(value))
    tables = []
    for field in dataclasses.fields(value):
        item = getattr(value, field.name)
        inner = _join(path, field.name)
        kind = _dataclass_in(hints[field.name])
        if kind is not None:
            tables.append((item, inner, kind))
            continue
        yield from _taken(comments, inner)
        yield _line(field.name, item)
    for item, inner, kind in tables:
        yield ""
        yield from _taken(comments, inner)
        yield from _tables(item, inner, kind, comments)


def _tables(item: Any, path: str, kind: type, comments: dict[str, list[str]]) -> Iterator[str]:
    """A dataclass, a tuple of them, or the want of either."""
    several = isinstance(item, tuple)
    header = f"[[{_INDEX.sub('', path)}]]" if several else f"[{_INDEX.sub('', path)}]"
    if not item:
        keys = ", ".join(field.name for field in dataclasses.fields(kind))
        yield f"# {header}"
        yield from _wrapped(f"none known; its keys would be: {keys}")
    elif several:
        for index, element in enumerate(item):
            yield from [""] * (index > 0)
            yield from _taken(comments, f"{path}[{index}]")
            yield header
            yield from _table(element, f"{path}[{index}]", comments)
    else:
        yield header
        yield from _table(item, path, comments)


def _taken(comments: dict[str, list[str]], path: str) -> Iterator[str]:
    """Take out what is to be said about `path`; of `gpus.pcie`, which is every card's, with the first card."""
    texts = comments.pop(_INDEX.sub("", path), []) + comments.pop(path, [])
    return chain.from_iterable(map(_wrapped, texts))


def _line(name: str, value: Any) -> str:
    if value is None:
        return f"# {name} = {ABSENT.get(name, 'unknown')}"
    line = f"{name} = {_inline(value)}"
    if name.endswith("_bytes"):
        return f"{line}  # {format_bytes(value)}"
    if len(line) > WIDTH and isinstance(value, tuple) and all(isinstance(item, int) for item in value):
        numbers = textwrap.fill(", ".join(map(str, value)), WIDTH, initial_indent="  ", subsequent_indent="  ")
        return f"{name} = [\n{numbers},\n]"
    return line


def _inline(value: Any) -> str:
    if isinstance(value, str):
        # JSON's escapes are TOML's, but for DEL, which TOML wants escaped too.
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, Mapping):
        # Keys are numbers of threads, which TOML takes bare.
        pairs = ", ".join(f"{key} = {_inline(item)}" for key, item in value.items())
        return f"{{ {pairs} }}" if pairs else "{}"
    return f"[{', '.join(map(_inline, value))}]" if isinstance(value, tuple) else repr(value)


def _wrapped(text: str) -> list[str]:
    printable = "".join(letter if letter.isprintable() else " " for letter in text)
    return textwrap.wrap(printable, WIDTH, initial_indent="# ", subsequent_indent="#   ")


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _dataclass_in(hint: Any) -> type | None:
    """The dataclass inside `X`, `X | None` or `tuple[X, ...]`."""
    if isinstance(hint, type) and dataclasses.is_dataclass(hint):
        return hint
    return next((kind for kind in map(_dataclass_in, get_args(hint)) if kind is not None), None)


def _impossible_numbers(path: str, value: Any) -> Iterator[tuple[str, str]]:
    """Yield (key, complaint) for numbers that no machine has."""
    name = path.rpartition(".")[2]
    if dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            yield from _impossible_numbers(_join(path, field.name), getattr(value, field.name))
    elif isinstance(value, tuple):
        for index, item in enumerate(value):
            yield from _impossible_numbers(f"{path}[{index}]", item)
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _impossible_numbers(f"{path}.{key}", item)
    elif isinstance(value, int | float):
        if value < 0 or not math.isfinite(value):
            yield path, f"{value} cannot be; leave the line out if it is not known"
        elif value == 0 and (name in NEVER_ZERO or name.endswith("gb_s")):
            yield path, "0 cannot be; leave the line out if it is not known"


def _broken_references(machine: Machine) -> Iterator[tuple[str, str]]:
    """Yield (key, complaint) where one part names another that is not there, or two share a number."""
    gpus = [gpu.index for gpu in machine.gpus]
    nodes = [node.index for node in machine.numa]
    for what, indices in (("gpus", gpus), ("numa", nodes)):
        if len(set(indices)) < len(indices):
            yield what, "two entries have the same index"
    for number, link in enumerate(machine.nvlinks):
        missing = [index for index in link.gpus if index not in gpus]
        if missing:
            yield f"nvlinks[{number}].gpus", f"there is no GPU with index {missing[0]}"
