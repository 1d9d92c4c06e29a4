"""The options of a batch: output, retries, deadline, priority and defaults of its jobs."""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any, Literal

from tokenmill.api.options import EngineArguments, check_names
from tokenmill.api.time_window import TimeWindow
from tokenmill.errors import RequestRefused, UsageError
from tokenmill.jobs.models import Submission
from tokenmill.jobs.openai.call import checked
from tokenmill.jobs.openai.requests import HIGHEST_PRIORITY, ChatJob
from tokenmill.jobs.worker.loop import WorkOptions
from tokenmill.jobs.worker.retries import MAX_ATTEMPTS

Deadline = str | float | datetime | timedelta
_SPAN = re.compile(r"(\d+(?:\.\d+)?)\s*(s|m|min|h|d)")
_SECONDS = {"s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
_FLOATS = ("temperature", "top_p")
_TYPES = {"attempts": int, "job_timeout_s": float | int | None, "priority": int | None}
_LONGEST_S = 100 * 366 * 86400.0
_TIMES = "8h, 90m, 06:30, or 2026-12-01T06:30"


@dataclass(frozen=True, slots=True)
class RunOptions:
    """The options of a batch."""

    output: str | None = None
    """The file for result lines; None keeps them in the store only."""

    errors: str | None = None
    """A separate file for the lines of failed jobs; None writes them to the output."""

    strict: bool = False
    """Refuse the jobs if one of them is invalid; otherwise it becomes an error line."""

    reuse: bool = True
    """Use answers that are in the store already."""

    attempts: int = MAX_ATTEMPTS
    """Maximum attempts for retryable failures."""

    job_timeout_s: float | None = None
    """Seconds for one attempt, for jobs without a timeout of their own."""

    deadline: Deadline | None = None
    """When to give up jobs that have not started: "8h", "06:30", a datetime, a timedelta, or Unix seconds."""

    priority: int | None = None
    """Priority of jobs without one of their own; higher runs first."""

    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Body keys such as max_tokens or temperature, for jobs that lack them."""

    max_hours: float | None = None
    """Stop after this many hours, loading included; the same call continues."""

    window: str | None = None
    """Work only in this daily time window, such as "22:00-06:00" in local time, until the batch is finished."""

    def check(self) -> None:
        """UsageError for a value that has the wrong type or is out of range."""
        self._check_times()
        for name, types in _TYPES.items():
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, types):
                raise UsageError(f"{name} must be a number (got {value!r})")
        if self.attempts < 1:
            raise UsageError(f"attempts must be at least 1 (got {self.attempts})")
        if self.job_timeout_s is not None and self.job_timeout_s <= 0:
            raise UsageError(f"the job timeout must be more than 0 seconds (got {self.job_timeout_s:g})")
        if self.priority is not None and abs(self.priority) > HIGHEST_PRIORITY:
            raise UsageError(f"priority must be -{HIGHEST_PRIORITY} to {HIGHEST_PRIORITY} (got {self.priority})")
        check_defaults(self.defaults)

    def _check_times(self) -> None:
        if self.max_hours is not None and not 0 < self.max_hours < float("inf"):
            raise UsageError(f"max_hours must be more than 0 (got {self.max_hours:g})", hint="0.5 is half an hour")
        if self.window is not None:
            TimeWindow.parse(self.window)
            if self.max_hours is not None:
                raise UsageError("max_hours and a time window cannot be combined", hint="use a shorter window")

    def submission(self, model_id: str, now_s: float) -> Submission:
        """These options for a store; `now_s` is the time on its clock."""
        return Submission(
            model_id,
            output=_absolute(self.output),
            errors=_absolute(self.errors),
            priority=self.priority,
            deadline_s=None if self.deadline is None else deadline_s(self.deadline, now_s),
            reuse=self.reuse,
            strict=self.strict,
            defaults=_as_floats(self.defaults),
        )

    def worker_options(self) -> WorkOptions:
        """The options of the worker."""
        return WorkOptions(attempts=self.attempts, job_timeout_s=self.job_timeout_s, count_minimum=True)


class WorkArguments(EngineArguments, total=False):
    """`tokenmill.work`'s keyword arguments."""

    attempts: int
    job_timeout_s: float | None


class SubmitArguments(EngineArguments, total=False):
    """`tokenmill.submit`'s keyword arguments: options of the batch, its template, and engine options."""

    errors: str | Path | None
    strict: bool
    reuse: bool
    deadline: Deadline | None
    priority: int | None
    defaults: Mapping[str, Any]
    template: str | Path | None
    system: str | Path | None
    key: str | None
    layout: Literal["auto", "file"]
    limit: int | None


class RunArguments(SubmitArguments, total=False):
    """`tokenmill.run`'s keyword arguments: those of `submit`, and options of its execution."""

    attempts: int
    job_timeout_s: float | None
    max_hours: float | None
    window: str | None
    on: str | None


def check_arguments(arguments: Mapping[str, Any], accepted: type[Any]) -> None:
    """UsageError for a keyword argument that is not a key of the TypedDict `accepted`."""
    accepts_defaults = "defaults" in accepted.__annotations__
    for name in arguments:
        if accepts_defaults and name in ChatJob.__struct_fields__ and name not in accepted.__annotations__:
            hint = f'defaults={{"{name}": ...}} sets it for every job'
            raise UsageError(f"{name} is a key of the request body, not an option", hint=hint)
    check_names(arguments, accepted)


def run_options(output: str | Path | None, arguments: dict[str, Any]) -> RunOptions:
    """Take the options of a run out of keyword arguments; mutates `arguments`."""
    own = {each.name for each in fields(RunOptions)}
    given = {name: arguments.pop(name) for name in list(arguments) if name in own}
    if given.get("errors") is not None:
        given["errors"] = os.fspath(given["errors"])
    options = RunOptions(output=None if output is None else os.fspath(output), **given)
    options.check()
    return options


def check_defaults(defaults: Mapping[str, Any]) -> None:
    """UsageError for body keys that cannot be defaults for all jobs."""
    if not isinstance(defaults, Mapping):
        raise UsageError(f"defaults must be a dict (got {defaults!r})", hint='for example {"max_tokens": 64}')
    if "messages" in defaults or "prompt" in defaults:
        raise UsageError("defaults must not contain messages or prompt", hint="put the prompt into each job")
    try:
        checked("chat", {"messages": [{"role": "user", "content": ""}], **defaults})
    except RequestRefused as error:
        raise UsageError(f"invalid defaults: {error.message}", hint=error.hint) from error


def _as_floats(defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Defaults with float values, so that 0 and 0.0 (which the command line passes) identify the same batch."""
    return {
        name: float(value) if name in _FLOATS and isinstance(value, int) else value for name, value in defaults.items()
    }


def deadline_s(deadline: Deadline, now_s: float) -> float:
    """A deadline as Unix seconds: `8h` or `90m` from now, the next `06:30`, or a date with a time."""
    found = _moment_s(deadline, now_s)
    if found <= now_s:
        raise UsageError(f"deadline {deadline!s} has passed", hint=f"a time in the future: {_TIMES}")
    if found > now_s + _LONGEST_S:
        raise UsageError(f"deadline {deadline!s} is more than a hundred years away", hint="leave the deadline out")
    return found


def _moment_s(deadline: Deadline, now_s: float) -> float:
    if isinstance(deadline, int | float):
        return float(deadline)
    if isinstance(deadline, timedelta):
        return now_s + deadline.total_seconds()
    if isinstance(deadline, datetime):
        return (deadline if deadline.tzinfo is not None else deadline.astimezone()).timestamp()
    text = deadline.strip()
    if match := _SPAN.fullmatch(text):
        return now_s + float(match[1]) * _SECONDS[match[2]]
    try:
        if re.fullmatch(r"\d{1,2}:\d{2}", text):
            return _next_clock_s(datetime.strptime(text, "%H:%M"), now_s)
        return _moment_s(datetime.fromisoformat(text), now_s)
    except ValueError as error:
        raise UsageError(f"cannot read {deadline!r} as a time", hint=_TIMES) from error


def _next_clock_s(clock: datetime, now_s: float) -> float:
    now = datetime.fromtimestamp(now_s).astimezone()
    today = now.replace(hour=clock.hour, minute=clock.minute, second=0, microsecond=0)
    return (today if today > now else today + timedelta(days=1)).timestamp()


def _absolute(path: str | None) -> str | None:
    return None if path is None else os.path.abspath(path)  # noqa: PTH100  Path.resolve would follow links
