"""Tokens that each owner used today, for the limit `tokens_per_day`; batches are included.

    <state>/gateway/tokens.json     the day (UTC) and the tokens by owner; replaced atomically, mode 0600

The file is written every few seconds and when the gateway stops, so a kill loses the tokens of the last seconds. The
clock is a parameter. Methods belong to one event loop; only `save` may run in another thread.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from tokenmill.storage.atomic import replace_file
from tokenmill.storage.private import FILE_MODE, private_folder

DAY_S = 86400.0
SAVE_EVERY_S = 5.0


@dataclass(frozen=True, slots=True)
class _Saved:
    day: int  # days since 1970
    tokens: dict[str, int]


_FILE = TypeAdapter(_Saved)


@dataclass(slots=True)
class TokenBudget:
    """Tokens of the current day by owner."""

    path: Path
    clock: Callable[[], float] = time.time
    _day: int = 0
    _used: dict[str, int] = field(default_factory=dict)
    _saved: dict[str, int] = field(default_factory=dict)

    @classmethod
    def of(cls, state: Path, clock: Callable[[], float] = time.time) -> "TokenBudget":
        """Load the tokens of today; a missing or damaged file counts as none."""
        budget = cls(state / "gateway" / "tokens.json", clock)
        try:
            saved = _FILE.validate_json(budget.path.read_bytes())
        except (OSError, ValidationError):
            return budget
        budget._day, budget._used = saved.day, saved.tokens
        return budget

    def charge(self, owner: str, tokens: int) -> None:
        """Count tokens that an owner used."""
        self._turn_day()
        self._used[owner] = self._used.get(owner, 0) + tokens

    def used(self, owner: str) -> int:
        """Tokens that an owner used today."""
        self._turn_day()
        return self._used.get(owner, 0)

    def wait_s(self, owner: str, limit: int | None) -> float:
        """Seconds until an owner may use tokens again; 0 while fewer than `limit` are used."""
        if limit is None or self.used(owner) < limit:
            return 0.0
        return (self._day + 1) * DAY_S - self.clock()

    def save(self) -> None:
        """Write the file if anything changed; blocks. Raises OSError."""
        used = dict(self._used)
        if used == self._saved:
            return
        private_folder(self.path.parent)
        replace_file(self.path, _FILE.dump_json(_Saved(self._day, used)), mode=FILE_MODE)
        self._saved = used

    @asynccontextmanager
    async def saving(self, on_error: Callable[[str], None]) -> AsyncIterator[None]:
        """Save periodically during the block, and at its end; `on_error` receives why that failed."""
        task = asyncio.create_task(self._save_periodically(on_error))
        try:
            yield
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await self._try_save(on_error)

    async def _save_periodically(self, on_error: Callable[[str], None]) -> None:
        while True:
            await asyncio.sleep(SAVE_EVERY_S)
            await self._try_save(on_error)

    async def _try_save(self, on_error: Callable[[str], None]) -> None:
        try:
            await asyncio.to_thread(self.save)
        except OSError as error:
            on_error(f"{self.path}: {error.strerror}")

    def _turn_day(self) -> None:
        today = int(self.clock() // DAY_S)
        if today != self._day:
            self._day = today
            self._used = {}
