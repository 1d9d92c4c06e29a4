"""Options about jobs: how answers are drawn, when they are due, and where batches are kept."""

import fcntl
import json
import os
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime, timedelta
from itertools import count
from pathlib import Path
from typing import Any

from cyclopts import Parameter

from tokenmill.cli.output import Common
from tokenmill.errors import ConfigError, RequestRefused, UsageError
from tokenmill.jobs.address import Address, address_of
from tokenmill.jobs.body import checked
from tokenmill.jobs.faults import unusable

_SPAN = re.compile(r"(\d+(?:\.\d+)?)\s*(s|m|min|h|d)")
_LONGEST_S = 100 * 366 * 86400.0
_SECONDS = {"s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0}


@Parameter(name="*")
@dataclass(frozen=True, slots=True)
class BodyOptions:
    """Values for jobs whose lines do not say."""

    max_tokens: int | None = None
    """Tokens of an answer at most, for lines that do not say."""

    temperature: float | None = None
    """0 always takes the likeliest token; for lines that do not say."""

    top_p: float | None = None
    """Draw from the likeliest tokens that together have this probability; for lines that do not say."""

    seed: int | None = None
    """Of the draws, for lines that do not say."""

    body: str | None = None
    """More of the same as a JSON object with keys of OpenAI's bodies, such as '{"response_format": ...}'."""

    def defaults(self) -> dict[str, Any]:
        """As keys of a body; UsageError where one is wrong."""
        named = {"max_tokens": self.max_tokens, "temperature": self.temperature, "top_p": self.top_p, "seed": self.seed}
        given = _object(self.body) | {key: value for key, value in named.items() if value is not None}
        if "messages" in given or "prompt" in given:
            raise UsageError("--body is for all lines: the prompt belongs into each")
        try:
            checked("chat", {"messages": [{"role": "user", "content": ""}], **given})
        except RequestRefused as error:
            raise UsageError(f"a default for all lines: {error.message}", hint=error.hint) from error
        return given


def _object(text: str | None) -> dict[str, Any]:
    if text is None:
        return {}
    try:
        value = json.loads(text)
    except ValueError as error:
        raise UsageError(f"--body is not JSON: {error}", hint="""--body '{"min_p": 0.1}'""") from error
    if not isinstance(value, dict):
        raise UsageError("--body is not a JSON object", hint="""--body '{"min_p": 0.1}'""")
    return value


def moment_s(text: str, now_s: float) -> float:
    """A time to come as Unix seconds: `8h` or `90m` from now, `06:30` when it comes next, or a date with a time."""
    found = _moment_s(text, now_s)
    if found <= now_s:
        raise UsageError(f"{text!r} is over", hint="8h, 90m, 06:30, or a date that is to come")
    if found > now_s + _LONGEST_S:
        raise UsageError(f"{text!r} is more than a hundred years away", hint="leave the deadline out")
    return found


def _moment_s(text: str, now_s: float) -> float:
    if match := _SPAN.fullmatch(text.strip()):
        return now_s + float(match[1]) * _SECONDS[match[2]]
    now = datetime.fromtimestamp(now_s).astimezone()
    try:
        if re.fullmatch(r"\d{1,2}:\d{2}", text.strip()):
            clock = datetime.strptime(text.strip(), "%H:%M")
            today = now.replace(hour=clock.hour, minute=clock.minute, second=0, microsecond=0)
            return (today if today > now else today + timedelta(days=1)).timestamp()
        when = datetime.fromisoformat(text.strip())
        return (when if when.tzinfo is not None else when.astimezone()).timestamp()
    except ValueError as error:
        raise UsageError(f"{text!r} is no time", hint="8h, 90m, 06:30, or 2026-12-01T06:30") from error


def when(time_s: float) -> str:
    """A time for people."""
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(time_s))


def store_at(store: str | None, common: Common) -> Address:
    """Where batches are kept."""
    config = common.load_config()
    said = store if store is not None else config.store
    if said is None:
        return config.state_path / "batches"
    found = address_of(said)
    if store is not None or not isinstance(found, Path):
        return found
    try:
        return found.expanduser()
    except RuntimeError as error:
        raise ConfigError(f"store: {said} names a user that is not here") from error


@contextmanager
def folder_beside(address: Address, common: Common) -> Iterator[Path]:
    """A folder here for what a run needs beside its store: the store's own, or one of those for runners on servers.

    These are numbered and used again; each is one process's at a time.
    """
    if isinstance(address, Path):
        yield address
        return
    runners = common.load_config().state_path / "runners"
    folder, lock = next((folder, lock) for number in count(1)
                        if (lock := _locked(folder := runners / str(number))) is not None)  # fmt: skip
    try:
        yield folder
    finally:
        os.close(lock)


def _locked(folder: Path) -> int | None:
    """A folder's lock, held; None: another process has it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise unusable(folder, error) from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        return None
    return lock
