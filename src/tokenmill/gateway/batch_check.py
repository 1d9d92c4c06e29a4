"""Whether an uploaded file can be a batch: every line a request of its own for one endpoint and one model.

As OpenAI has it: lines that are not requests refuse the whole file, each with its number and reason; a body that no
engine would take is the affair of its own line, and ends in the file of errors.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any

from tokenmill.errors import RequestRefused, UsageError
from tokenmill.gateway.batch_records import BadLine
from tokenmill.jobs import read
from tokenmill.jobs.json_text import shown
from tokenmill.jobs.line import custom_id_of, parse

MOST_TOLD = 100  # wrong lines that are named
_PACKED = {b"\x1f\x8b": "gzip", b"\x28\xb5": "zstd", b"PA": "Parquet"}


@dataclass(frozen=True, slots=True)
class Checked:
    """What a file is."""

    model: str | None = None  # that its lines ask for; None: they do not say
    lines: int = 0
    errors: tuple[BadLine, ...] = ()  # none: it can be worked on


@dataclass(slots=True)
class _Sight:
    """What the lines before have shown."""

    endpoint: str
    model: str | None = None
    lines: int = 0
    ids: dict[str, int] = field(default_factory=dict)


def check_file(path: Path, endpoint: str, *, go_on: Callable[[], bool] = lambda: True) -> Checked:
    """Read a whole file; `go_on` is asked from time to time, and ends it where it says no."""
    sight = _Sight(endpoint)
    try:
        errors = tuple(islice(_errors(path, sight, go_on), MOST_TOLD))
    except UsageError as error:
        errors = (BadLine("invalid_file", error.message.replace(str(path), "the file")),)
    if not errors and not sight.lines:
        errors = (BadLine("empty_file", "the file holds no requests"),)
    return Checked(sight.model, sight.lines, errors)


def _errors(path: Path, sight: _Sight, go_on: Callable[[], bool]) -> Iterator[BadLine]:
    with path.open("rb") as file:
        start = file.read(2)
    if start in _PACKED:
        raise UsageError(f"the file is {_PACKED[start]}: lines of JSON are needed, as they are")
    with read.open_source(path) as source:
        for chunk in source.chunks():
            if not go_on():
                return
            for item in (chunk,) if isinstance(chunk, read.BadLine) else read.split(chunk):
                if isinstance(item, read.BadLine):
                    yield BadLine("invalid_json_line", item.reason, item.number)
                elif (bad := check_line(item[1], item[0], sight)) is not None:
                    yield bad


def check_line(text: str, number: int, sight: _Sight) -> BadLine | None:
    """One line in the light of those before, which it joins; None: it is a request."""
    sight.lines += 1
    try:
        line = parse(text)
    except ValueError as error:
        return BadLine("invalid_json_line", str(error), number)
    bad = _wrong_name(line, number, sight) or _wrong_request(line, number, sight)
    # what a line says may hold half of a surrogate pair, which cannot be sent
    return bad and replace(bad, message=bad.message.encode(errors="replace").decode())


def _wrong_name(line: Mapping[str, Any], number: int, sight: _Sight) -> BadLine | None:
    if line.get("custom_id") is None:
        return BadLine("missing_required_parameter", "custom_id is missing", number, "custom_id")
    try:
        name = custom_id_of(line, number)
    except RequestRefused as error:
        return BadLine("invalid_value", error.message, number, "custom_id")
    first = sight.ids.setdefault(name, number)
    if first != number:
        said = f"custom_id {name[:60]!r} is on line {first} and again on line {number}"
        return BadLine("duplicate_custom_id", said, number, "custom_id")
    return None


def _wrong_request(line: Mapping[str, Any], number: int, sight: _Sight) -> BadLine | None:
    for key in ("method", "url", "body"):
        if line.get(key) is None:
            return BadLine("missing_required_parameter", f"{key} is missing", number, key)
    if line["method"] != "POST":
        return BadLine("invalid_method", f'method must be "POST", not {shown(line["method"])}', number, "method")
    if line["url"] != sight.endpoint:
        said = f"url is {shown(line['url'])}, and the batch is for {sight.endpoint}"
        return BadLine("mismatched_endpoint", said, number, "url")
    body = line["body"]
    if not isinstance(body, dict):
        return BadLine("invalid_value", f"body must be an object, not {shown(body)}", number, "body")
    return _wrong_model(body.get("model"), number, sight)


def _wrong_model(model: Any, number: int, sight: _Sight) -> BadLine | None:
    if not isinstance(model, str | None):
        return BadLine("invalid_value", f"model must be a text, not {shown(model)}", number, "body.model")
    if sight.lines == 1:
        sight.model = model
    elif model != sight.model:
        said = f"model is {shown(model)}, and {shown(sight.model)} on the first line: a batch is for one"
        return BadLine("mismatched_model", said, number, "body.model")
    return None
