"""What `tokenmill tune` is told: an aim in a user's words, and jobs to measure with."""

import re
from contextlib import suppress

from tokenmill.cli.starting import EngineOptions
from tokenmill.engine.engine import Request
from tokenmill.errors import RequestRefused, UsageError
from tokenmill.jobs.line import call_of
from tokenmill.jobs.read import BadLine, lines
from tokenmill.tune.point import Aim, AimKind

MOST_JOBS = 256  # of a file: enough for the widest wave, several times
_SPAN = re.compile(r"(\d+(?:\.\d+)?)\s*(ms|s)?")
_SHARE = re.compile(r"(\d+(?:\.\d+)?)\s*(%)?")


def aim_of(
    kind: AimKind, first_token: str | None, within: str, head: int, tail: int, output: int, options: EngineOptions
) -> Aim:
    """What was asked for; UsageError where it makes no sense."""
    if (kind == "latency") != (first_token is not None):
        raise UsageError(
            "--aim latency and --first-token go together", hint="for example: --aim latency --first-token 2s"
        )
    if head < 0 or tail < 1 or output < 1:
        raise UsageError("--head-tokens must be at least 0, --tail-tokens and --output-tokens at least 1")
    for option, value in (("sequences", options.sequences), ("context", options.context)):
        if value is not None and value < 1:
            raise UsageError(f"--{option} must be at least 1, not {value}")
    return Aim(
        kind, None if first_token is None else _seconds(first_token), _share(within), options.context,
        options.sequences or 1, head, tail, output,
    )  # fmt: skip


def _seconds(text: str) -> float:
    match = _SPAN.fullmatch(text.strip())
    seconds = 0.0 if match is None else float(match[1]) / (1000 if match[2] == "ms" else 1)
    if seconds <= 0:
        raise UsageError(f"--first-token: {text!r} is no time", hint="2s, 0.5s or 500ms")
    return seconds


def _share(text: str) -> float:
    match = _SHARE.fullmatch(text.strip())
    share = 1.0 if match is None else float(match[1]) / (100 if match[2] else 1)
    if not 0 <= share < 1:
        raise UsageError(f"--within: {text!r} is no share", hint="10% or 0.1")
    return share


def requests_in(where: str) -> tuple[Request, ...]:
    """The first jobs of a file; those that cannot be read are passed over."""
    found: list[Request] = []
    for line in lines(where):
        if not isinstance(line, BadLine):
            with suppress(RequestRefused, UsageError, ValueError):  # the last: no JSON
                found.append(call_of(line[1]).request("batch"))
        if len(found) == MOST_JOBS:
            break
    if not found:
        raise UsageError(f"{where} holds no job that can be read", hint="tokenmill lint says what is wrong with it")
    return tuple(found)
