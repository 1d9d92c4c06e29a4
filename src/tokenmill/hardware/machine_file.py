"""Reads and writes machine files: one `Machine` as TOML that people can edit.

Writing is generic over the dataclasses, so new fields of `Machine` need no change here. A written file reads back as
the same value; comments are for people only. Independent of the catalogue and of this machine.
"""

import dataclasses
import json
import math
import re
import textwrap
from collections.abc import Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import Any, get_type_hints

from tokenmill.decode import dataclasses_in, read_toml
from tokenmill.errors import ConfigError, UsageError
from tokenmill.hardware.machine import Machine
from tokenmill.storage.atomic import replace_file
from tokenmill.units import format_bytes

WIDTH = 100
HEADER = """\
# The facts of one machine. Plan for it with: --machine FILE
#
# All lines can be edited. Sizes are bytes, or text such as "755 GiB"; bandwidths are decimal GB/s.
# A line like `# mts = unknown` is a fact that was not found: remove the # and fill it in, or leave it.
# Unknown keys are errors, so that typing mistakes are noticed.
"""
# fields for which None is a known value
ABSENT = {
    "container": "none",
    "virtual": "none",
    "cgroup_memory_bytes": "no limit",
    "cgroup_cpus": "no limit",
    "memlock_bytes": "no limit",
}
# fields in which 0 is impossible and would cause divisions by zero
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
_COMPARE = "compare it with a file written by tokenmill probe -o FILE"
_INDEX = re.compile(r"\[[0-9]+\]")


def read(path: Path) -> Machine:
    """Read one machine. Raises `ConfigError` with the file and the key of the first error."""
    try:
        machine = read_toml(Machine, path)
    except ConfigError as error:
        unreadable = isinstance(error.__cause__, OSError)
        hint = "give a machine file that can be read" if unreadable else _COMPARE
        raise ConfigError(error.message, hint=error.hint or hint) from error
    for key, complaint in chain(_impossible_numbers("", machine), _broken_references(machine)):
        raise ConfigError(f"{path}: {key}: {complaint}", hint=_COMPARE)
    return machine


def write(machine: Machine, path: Path) -> None:
    """Write one machine, replacing `path` atomically. Raises `UsageError` if that fails."""
    # TOML is Unicode: invalid bytes in names of devices and mounts become question marks
    text = to_toml(machine).encode("utf-8", "replace")
    try:
        if path.exists() and not path.is_file():  # /dev/stdout or a pipe cannot be replaced
            path.write_bytes(text)
            return
        replace_file(path.resolve(), text)
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror}", hint="use a folder that you can write to") from error


def to_toml(machine: Machine) -> str:
    """The text of a machine file, with comments."""
    comments = {path: [text] for path, text in _explanations(Machine, "")}
    for note in machine.notes:
        comments.setdefault(note.about, []).append(note.text)
    return "\n".join([HEADER, *_table(machine, "", comments)]).rstrip("\n") + "\n"


def _explanations(kind: type, path: str) -> Iterator[tuple[str, str]]:
    """Yield the path of each table, without indices, and the first line of its dataclass's docstring."""
    for name, hint in get_type_hints(kind).items():
        inner = next(dataclasses_in(hint), None)
        if inner is not None:
            yield _join(path, name), (inner.__doc__ or "").partition("\n")[0]
            yield from _explanations(inner, _join(path, name))


def _table(value: Any, path: str, comments: dict[str, list[str]]) -> Iterator[str]:
    """Yield the lines of one dataclass: its plain values, then its tables, as TOML requires.

    `path` is its path in notes (`gpus[0].pcie`). Removes every comment that it writes from `comments`.
    """
    hints = get_type_hints(type(value))
    tables = []
    for field in dataclasses.fields(value):
        item = getattr(value, field.name)
        inner = _join(path, field.name)
        kind = next(dataclasses_in(hints[field.name]), None)
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
    """Yield the lines of a dataclass or of a tuple of them; of a comment if the item is empty."""
    several = isinstance(item, tuple)
    header = f"[[{_INDEX.sub('', path)}]]" if several else f"[{_INDEX.sub('', path)}]"
    if not item:
        keys = ", ".join(field.name for field in dataclasses.fields(kind))
        yield f"# {header}"
        yield from _wrapped(f"not present or unknown; possible keys: {keys}")
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
    """Remove and yield the comments on `path`; those on all GPUs (`gpus.pcie`) appear at the first one."""
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
        # JSON's escapes are valid in TOML, which also requires one for DEL
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, Mapping):
        # keys are numbers of threads, which TOML accepts without quotes
        pairs = ", ".join(f"{key} = {_inline(item)}" for key, item in value.items())
        return f"{{ {pairs} }}" if pairs else "{}"
    return f"[{', '.join(map(_inline, value))}]" if isinstance(value, tuple) else repr(value)


def _wrapped(text: str) -> list[str]:
    printable = "".join(letter if letter.isprintable() else " " for letter in text)
    return textwrap.wrap(printable, WIDTH, initial_indent="# ", subsequent_indent="#   ")


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _impossible_numbers(path: str, value: Any) -> Iterator[tuple[str, str]]:
    """Yield (key, complaint) for impossible numbers."""
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
            yield path, f"{value} is impossible; remove the line if the value is unknown"
        elif value == 0 and (name in NEVER_ZERO or name.endswith("gb_s")):
            yield path, "0 is impossible; remove the line if the value is unknown"


def _broken_references(machine: Machine) -> Iterator[tuple[str, str]]:
    """Yield (key, complaint) for references to missing parts and for duplicate indices."""
    gpus = [gpu.index for gpu in machine.gpus]
    nodes = [node.index for node in machine.numa]
    for what, indices in (("gpus", gpus), ("numa", nodes)):
        if len(set(indices)) < len(indices):
            yield what, "two entries have the same index"
    for number, link in enumerate(machine.nvlinks):
        missing = [index for index in link.gpus if index not in gpus]
        if missing:
            yield f"nvlinks[{number}].gpus", f"there is no GPU with index {missing[0]}"
