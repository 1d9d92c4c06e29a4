"""Converts a line of a job file, in OpenAI's batch format or as a plain body, to a row of the store.

Pure. Optimized for millions of lines: creates only objects that the store needs.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from pydantic_core import from_json

from tokenmill.errors import RequestRefused
from tokenmill.jobs.ingest.identity import alone, owned, place_values
from tokenmill.jobs.models import INVALID_LINE, JobId, State
from tokenmill.jobs.openai.call import URLS, Call, Endpoint, check, checked, stored_call
from tokenmill.jobs.openai.requests import LINE_KEYS
from tokenmill.storage.json_text import parse, shown
from tokenmill.storage.lines import BadLine, Chunk, split
from tokenmill.units import KIB

MAX_CUSTOM_ID_LENGTH = 512
_PENDING = State.PENDING.value
_LENGTHS = frozenset(("max_completion_tokens", "max_output_tokens"))  # other names of max_tokens
BLOCK_BYTES = 64 * KIB  # of text per row of the store; reading a line reads its block


class JobRow(NamedTuple):
    """A line as a row of the store, without its text."""

    state: int
    custom_id: str | None
    identity: bytes | None
    place: bytes | None
    rank: int
    prompt_bytes: int | None
    max_tokens: int | None
    deadline_s: float | None
    code: str | None
    message: str | None
    id: int


@dataclass(frozen=True, slots=True)
class ParseOptions:
    """Options for parsing lines; sent to parser processes."""

    batch: int
    model_id: str
    priority: int = 0
    reuse: bool = True
    defaults: Mapping[str, Any] = field(default_factory=dict)
    owner: str | None = None  # see `Submission`


def custom_id_of(line: Mapping[str, Any], number: int) -> str:
    """The line's custom_id, or `line-N` without one."""
    custom_id = line.get("custom_id")
    if custom_id is None:
        return f"line-{number}"
    if type(custom_id) is not str or not 0 < len(custom_id) <= MAX_CUSTOM_ID_LENGTH:
        raise RequestRefused(
            f"custom_id must be a string of 1-{MAX_CUSTOM_ID_LENGTH} characters, not {shown(custom_id)}"
        )
    return custom_id


def body_of(line: Mapping[str, Any]) -> tuple[Endpoint, Mapping[str, Any]]:
    """The endpoint and the body of a line."""
    if "body" not in line and "url" not in line and "method" not in line:
        body = {key: value for key, value in line.items() if key != "custom_id"}
        if ("messages" in body) == ("prompt" in body):
            raise RequestRefused("a line must have either messages or a prompt")
        return "chat" if "messages" in body else "completion", body
    url = line.get("url")
    method = line.get("method")
    endpoint = URLS.get(url) if type(url) is str else None
    if endpoint is None:
        raise RequestRefused(f"url must be {' or '.join(URLS)}, not {shown(url)}")
    if method != "POST":
        raise RequestRefused(f'method must be "POST", not {shown(method)}')
    inner = line.get("body")
    if type(inner) is not dict:
        raise RequestRefused(f"body must be an object, not {shown(inner)}")
    if not line.keys() <= LINE_KEYS:
        key = next(key for key in line if key not in LINE_KEYS)
        raise RequestRefused(f"unknown key {shown(key)} next to body", hint="put keys of the request into body")
    return endpoint, inner


def call_of(text: str, defaults: Mapping[str, Any] | None = None) -> Call:
    """The call of a stored line, which was checked when it was stored.

    Raises RequestRefused or ValueError if the line cannot be decoded.
    """
    endpoint, body = body_of(parse(text))
    return stored_call(endpoint, _with_defaults(body, defaults))


def call_from(line: Mapping[str, Any], defaults: Mapping[str, Any] | None = None) -> Call:
    """The call of a parsed line: an OpenAI batch line or a plain body. Raises RequestRefused if it is invalid."""
    endpoint, body = body_of(line)
    return check(endpoint, _with_defaults(body, defaults))


def _with_defaults(body: Mapping[str, Any], defaults: Mapping[str, Any] | None) -> Mapping[str, Any]:
    if not defaults:
        return body
    if "max_tokens" in defaults and not _LENGTHS.isdisjoint(body):
        defaults = {key: value for key, value in defaults.items() if key != "max_tokens"}
    return {**defaults, **body}


def rows(chunk: Chunk, reading: ParseOptions) -> Iterator[JobRow]:
    """Yield the rows of a chunk's lines, without blank lines."""
    for number, raw in enumerate(chunk.data.split(b"\n"), chunk.first):
        try:
            line = from_json(raw, allow_inf_nan=False)
        except ValueError:  # blank, not UTF-8, not JSON, or JSON that `parse` can read
            line = None
        if type(line) is dict:
            yield _row(line, number, reading)
            continue
        for item in split(Chunk(number, raw)):
            yield bad_row(item, reading) if isinstance(item, BadLine) else row(item[1], number, reading)


def row(text: str, number: int, reading: ParseOptions) -> JobRow:
    """The row of a line; for a bad line, a failed row with the reason."""
    try:
        line = parse(text)
    except ValueError as error:
        return bad_row(BadLine(number, str(error)), reading)
    return _row(line, number, reading)


def _row(line: Mapping[str, Any], number: int, reading: ParseOptions) -> JobRow:
    custom_id = None
    try:
        name = custom_id_of(line, number)
        name.encode()
        custom_id = name
        endpoint, body = body_of(line)
        values = checked(endpoint, _with_defaults(body, reading.defaults))
        identity, place, prompt_bytes = place_values(reading.model_id, endpoint, values)
    except RequestRefused as error:
        reason = f"{error.message} ({error.hint})" if error.hint else error.message
        return bad_row(BadLine(number, reason), reading, custom_id)
    except UnicodeEncodeError:
        return bad_row(BadLine(number, "unpaired surrogate (\\ud800 to \\udfff)"), reading, custom_id)
    except ValueError as error:
        return bad_row(BadLine(number, str(error)), reading, custom_id)
    job = JobId.of(reading.batch, number)
    if not reading.reuse:
        identity = alone(identity, job)
    elif reading.owner is not None:
        identity = owned(identity, reading.owner)
    get = values.get
    rank = -get("priority", reading.priority)
    # Positional, because keyword arguments would double the cost.
    return JobRow(
        _PENDING, custom_id, identity, place, rank, prompt_bytes, get("max_tokens"), get("deadline"), None, None, job
    )


def bad_row(bad: BadLine, reading: ParseOptions, custom_id: str | None = None) -> JobRow:
    """The row of a line that cannot be run; its state is failed."""
    job = JobId.of(reading.batch, bad.number)
    reason = bad.reason.encode(errors="replace").decode()  # may quote an unpaired surrogate, which cannot be stored
    return JobRow(State.FAILED.value, custom_id, None, None, 0, None, None, None, INVALID_LINE, reason, job)


def blocks(chunk: Chunk, batch: int) -> Iterator[tuple[int, bytes]]:
    """Yield a chunk's text in blocks of complete lines, each with the number of its first job."""
    data = chunk.data
    number = chunk.first
    start = 0
    while start < len(data):
        end = data.rfind(b"\n", start, start + BLOCK_BYTES) + 1 or data.find(b"\n", start) + 1 or len(data)
        yield JobId.of(batch, number), data[start:end]
        number = number + data.count(b"\n", start, end)
        start = end


def line_in(block: bytes, index: int) -> str:
    """A line of a block; empty if it was too long to be stored."""
    return b"".join(block.split(b"\n", index + 1)[index : index + 1]).decode(errors="replace").strip()
