"""Detects damaged answers: checksums, and a check of a whole store.

Every answer has a checksum of its body, which is verified whenever the body is read; older answers without one are
accepted. `check_store` reads all answers and finished jobs without changing them; `Store.requeue` makes the reported
jobs pending again.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tokenmill.errors import StoreError
from tokenmill.jobs.models import JobId
from tokenmill.jobs.store.backend import DatabaseBackend

_CHECKSUM_BYTES = 8
_PAGE_ANSWERS = 256  # per query; an answer with logprobs may have megabytes
_PAGE_JOBS = 20_000


def checksum(body: bytes) -> bytes:
    """The checksum that is stored with an answer."""
    return hashlib.blake2b(body, digest_size=_CHECKSUM_BYTES).digest()


def is_intact(body: Any, stored: Any) -> bool:
    """Whether a body from the database matches its stored checksum."""
    return isinstance(body, bytes) and (stored is None or stored == checksum(body))


@dataclass(frozen=True, slots=True)
class Damage:
    """Damaged answers, and the jobs without an intact answer."""

    answers: frozenset[int] = frozenset()
    jobs: tuple[int, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.answers or self.jobs)

    def lines(self) -> Mapping[int, list[int]]:
        """Line numbers of the jobs by batch."""
        found: dict[int, list[int]] = {}
        for job in self.jobs:
            found.setdefault(JobId.batch(job), []).append(JobId.line(job))
        return found


@dataclass(frozen=True, slots=True)
class CheckReport:
    """The result of `check_store`."""

    problems: tuple[str, ...]  # reported by the database itself
    damage: Damage
    answers: int = 0
    without_checksum: int = 0  # answers stored before checksums existed, which cannot be verified
    batches: Mapping[int, str] = field(default_factory=dict)  # names

    @property
    def clean(self) -> bool:
        """Whether no damage was found."""
        return not self.problems and not self.damage


def check_store(database: DatabaseBackend, batches: Mapping[int, str]) -> CheckReport:
    """Check the database and every answer. Unreadable data is reported, not raised."""
    problems = database.problems()
    answers = without_checksum = 0
    damage = Damage()
    try:
        damaged = set[int]()
        after = -1
        while rows := database.all("answers_after", after=after, limit=_PAGE_ANSWERS):
            after = rows[-1][0]
            answers += len(rows)
            without_checksum += sum(stored is None for _, _, stored in rows)
            damaged |= {answer for answer, body, stored in rows if not is_intact(body, stored)}
        damage = affected(database, damaged)
    except StoreError as error:
        if error.message not in problems:
            problems = [*problems, error.message]
    return CheckReport(tuple(problems), damage, answers, without_checksum, batches)


def affected(database: DatabaseBackend, damaged: set[int]) -> Damage:
    """The finished jobs whose answer is damaged, missing, or belongs to another request."""
    jobs = list[int]()
    after = -1
    while rows := database.all("answered", after=after, limit=_PAGE_JOBS):
        after = rows[-1][0]
        jobs += [job for job, answer, same in rows if not same or answer in damaged]
    return Damage(frozenset(damaged), tuple(jobs))
