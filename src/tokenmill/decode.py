"""Converts parsed TOML or JSON to frozen dataclasses, and validation errors to ConfigErrors.

Unknown keys are rejected with a suggestion. Pydantic's errors are mapped here, so that no caller sees them.
"""

import dataclasses
import difflib
import tomllib
import types
import typing
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Annotated, Any, TypeVar, cast

from pydantic import BeforeValidator, TypeAdapter, ValidationError

from tokenmill.errors import ConfigError
from tokenmill.units import parse_bytes

T = TypeVar("T")


def _bytes_from_text(value: object) -> object:
    if isinstance(value, bool) or (isinstance(value, int) and value < 0):
        raise ValueError(f'{str(value).lower()} is not a size; use a number of bytes or a string such as "24 GiB"')
    return parse_bytes(value) if isinstance(value, str) else value


Bytes = Annotated[int, BeforeValidator(_bytes_from_text)]
"""A number of bytes, or a string such as `24 GiB` in files."""


def read_toml(cls: type[T], path: Path) -> T:
    """Read one dataclass from a TOML file."""
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not valid TOML: {error}", hint="fix the line it names") from error
    return decode(cls, data, where=str(path))


def decode(cls: type[T], data: Mapping[str, Any], *, where: str) -> T:
    """Build `cls` from nested tables; ConfigError names the key, the file and the accepted values."""
    for key, known in _unknown_keys(cls, data, ""):
        near = difflib.get_close_matches(key.rpartition(".")[2], known, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"known keys here: {', '.join(sorted(known))}"
        raise ConfigError(f"{where}: unknown key {key!r}", hint=hint)
    try:
        return cast(T, _adapter(cast(Any, cls)).validate_python(data))
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        key = ".".join(str(part) for part in first["loc"] if not str(part).startswith(("function-", "tuple[")))
        message = first["msg"].removeprefix("Value error, ")
        raise ConfigError(f"{where}: {key or 'the file'}: {message[0].lower()}{message[1:]}") from error


@cache
def _adapter(cls: Any) -> TypeAdapter[Any]:
    return TypeAdapter(cls)  # building one takes milliseconds


def _unknown_keys(cls: Any, data: object, prefix: str) -> Iterator[tuple[str, list[str]]]:
    """Yield (dotted key, known keys) for every key without a field."""
    if isinstance(data, list):
        for index, item in enumerate(data):
            yield from _unknown_keys(cls, item, f"{prefix.removesuffix('.')}[{index}].")
        return
    if not (isinstance(data, Mapping) and dataclasses.is_dataclass(cls)):
        return
    hints = typing.get_type_hints(cls)
    known = [field.name for field in dataclasses.fields(cls)]
    for key, value in data.items():
        if key not in known:
            yield f"{prefix}{key}", known
        else:
            for inner in dataclasses_in(hints[key]):
                yield from _unknown_keys(inner, value, f"{prefix}{key}.")


def dataclasses_in(hint: Any) -> Iterator[Any]:
    """The dataclass inside `X`, `X | None` or `tuple[X, ...]`; nothing for mappings and scalars."""
    if dataclasses.is_dataclass(hint):
        yield hint
    elif typing.get_origin(hint) in (types.UnionType, typing.Union, tuple):
        for argument in typing.get_args(hint):
            yield from dataclasses_in(argument)
