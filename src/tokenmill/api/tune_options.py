"""The options of `tune`, and the jobs of a file to measure with."""

import re
from contextlib import suppress
from dataclasses import dataclass
from typing import get_args

from tokenmill.api.options import EngineOptions
from tokenmill.engine.engine import Request
from tokenmill.errors import RequestRefused, UsageError
from tokenmill.jobs.ingest.job_file import job_lines
from tokenmill.jobs.ingest.line import call_from
from tokenmill.storage.json_text import parse
from tokenmill.storage.lines import BadLine
from tokenmill.tuner.point import Aim, AimKind

MAX_JOBS = 256  # of a file; enough to fill all slots several times
_SPAN = re.compile(r"(\d+(?:\.\d+)?)\s*(ms|s)?")
_SHARE = re.compile(r"(\d+(?:\.\d+)?)\s*(%)?")


@dataclass(frozen=True, slots=True)
class TuneOptions:
    """The options of `tokenmill.tune`, which documents them."""

    aim: AimKind = "throughput"
    first_token: str | float | None = None
    within: str | float = 0.1
    jobs: str | None = None
    prefix_tokens: int = 512
    own_tokens: int = 64
    answer_tokens: int = 64
    trials: int | None = None
    trial_seconds: float = 5.0
    fresh: bool = False
    busy: bool = False

    def aim_for(self, engine: EngineOptions) -> Aim:
        """The aim of the search; UsageError if options contradict each other or are out of range."""
        self._check()
        for option, value in (("sequences", engine.sequences), ("context", engine.context)):
            if value is not None and value < 1:
                raise UsageError(f"{option} must be at least 1 (got {value})")
        return Aim(
            kind=self.aim,
            first_token_s=None if self.first_token is None else _seconds(self.first_token),
            within=_share(self.within),
            least_context=engine.context,
            least_sequences=engine.sequences or 1,
            prompt_tokens=self.prefix_tokens,
            tail_tokens=self.own_tokens,
            output_tokens=self.answer_tokens,
        )

    def _check(self) -> None:
        if self.aim not in get_args(AimKind):
            raise UsageError(f"unknown aim {self.aim!r}", hint=", ".join(get_args(AimKind)))
        if (self.aim == "latency") != (self.first_token is not None):
            raise UsageError(
                f"aim latency and first_token need each other (got aim {self.aim}, first_token {self.first_token})",
                hint="first_token is the longest wait for the first token, such as 2s",
            )
        for name, minimum in (("prefix_tokens", 0), ("own_tokens", 1), ("answer_tokens", 1), ("trials", 1)):
            value = getattr(self, name)
            if value is not None and value < minimum:
                raise UsageError(f"{name} must be at least {minimum} (got {value})")
        if self.trial_seconds <= 0:
            raise UsageError(f"trial_seconds must be more than 0 (got {self.trial_seconds:g})")


def _seconds(value: str | float) -> float:
    match = _SPAN.fullmatch(str(value).strip())
    seconds = 0.0 if match is None else float(match[1]) / (1000 if match[2] == "ms" else 1)
    if seconds <= 0:
        raise UsageError(f"first_token must be a time (got {value!r})", hint="for example 2s, 0.5s or 500ms")
    return seconds


def _share(value: str | float) -> float:
    match = _SHARE.fullmatch(str(value).strip())
    share = 1.0 if match is None else float(match[1]) / (100 if match[2] else 1)
    if not 0 <= share < 1:
        raise UsageError(f"within must be a share from 0 to less than 1 (got {value!r})", hint="for example 10% or 0.1")
    return share


def requests_in(where: str) -> tuple[Request, ...]:
    """The first jobs of a file, without invalid lines. UsageError if all lines are invalid."""
    found: list[Request] = []
    for line in job_lines(where):
        if not isinstance(line, BadLine):
            with suppress(RequestRefused, UsageError, ValueError):  # ValueError: not JSON
                found.append(call_from(parse(line[1])).request("batch"))
        if len(found) == MAX_JOBS:
            break
    if not found:
        raise UsageError(f"{where} has no valid job", hint="tokenmill lint shows the errors")
    return tuple(found)
