"""A set of prompts as an engine holds them: what they take together when shared, and what another one would find.

Knows head keys only, so in whole chunks. What is in the set, and when it goes, others decide.
"""

from bisect import bisect_left, insort

from tokenmill.jobs.forest import Pending, shared_bytes


class PrefixIndex:
    """Prompts in the order in which they were last used."""

    def __init__(self) -> None:
        self.bytes = 0  # of all of them, shared heads counted once
        self._sorted: list[tuple[bytes, int]] = []
        self._records: dict[int, Pending] = {}  # oldest first

    def __len__(self) -> int:
        return len(self._records)

    def __contains__(self, job: object) -> bool:
        return job in self._records

    def add(self, record: Pending) -> None:
        """Put a prompt in, or make it the youngest; mutates."""
        if self._records.pop(record.job, None) is None:
            self.bytes += self.extra_bytes(record)
            insort(self._sorted, (record.head, record.job))
        self._records[record.job] = record

    def drop(self, job: int) -> None:
        """Take a prompt out if it is there; mutates."""
        record = self._records.pop(job, None)
        if record is not None:
            del self._sorted[bisect_left(self._sorted, (record.head, job))]
            self.bytes -= self.extra_bytes(record)

    def clear(self) -> None:
        """Take all out; mutates."""
        self._sorted.clear()
        self._records.clear()
        self.bytes = 0

    def oldest(self, but: "PrefixIndex") -> int | None:
        """The job that was used longest ago and is not in another set. Mutates nothing."""
        return next((job for job in self._records if job not in but), None)

    def best(self, record: Pending) -> tuple[int, int | None]:
        """Bytes of a prompt that are here, and the job they are from. Mutates nothing."""
        at = bisect_left(self._sorted, (record.head, record.job))
        near = (self._records[job] for _, job in self._sorted[max(0, at - 1) : at + 2] if job != record.job)
        found = max(((shared_bytes(record, other), other.job) for other in near), default=(0, None))
        return found if found[0] else (0, None)

    def extra_bytes(self, record: Pending) -> int:
        """Bytes that a prompt takes beyond what is here. Mutates nothing."""
        return record.prompt_bytes - self.best(record)[0]
