"""A daily time window in which a batch may run, such as 22:00-06:00 in local time. Pure: the time is an argument."""

import re
from dataclasses import dataclass
from datetime import datetime, time, timedelta
from typing import Self

from tokenmill.errors import UsageError

_FORM = re.compile(r"\s*(\d{1,2}:\d{2})\s*-\s*(\d{1,2}:\d{2})\s*")


@dataclass(frozen=True, slots=True)
class TimeWindow:
    """From `begins` to `ends`, every day; over midnight if `ends` is earlier."""

    begins: time
    ends: time

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read 22:00-06:00; UsageError for anything else."""
        found = _FORM.fullmatch(text)
        try:
            begins, ends = (time.fromisoformat(clock.zfill(5)) for clock in found.groups()) if found else (None, None)
        except ValueError:
            begins = ends = None
        if begins is None or ends is None or begins == ends:
            raise UsageError(f"cannot read {text!r} as a time window", hint="for example 22:00-06:00, in local time")
        return cls(begins, ends)

    def opens_s(self, now_s: float) -> float:
        """When work may begin, as Unix seconds: `now_s` if the window is open."""
        return now_s if self._is_open(now_s) else _next(self.begins, now_s)

    def closes_s(self, now_s: float) -> float:
        """When work must end, as Unix seconds: `now_s` if the window is closed."""
        return _next(self.ends, now_s) if self._is_open(now_s) else now_s

    def _is_open(self, now_s: float) -> bool:
        now = datetime.fromtimestamp(now_s).time()
        if self.begins < self.ends:
            return self.begins <= now < self.ends
        return now >= self.begins or now < self.ends


def _next(clock: time, now_s: float) -> float:
    """The next time that a local clock shows `clock`, after `now_s`."""
    now = datetime.fromtimestamp(now_s)
    at = datetime.combine(now.date(), clock)
    return (at if at > now else at + timedelta(days=1)).timestamp()
