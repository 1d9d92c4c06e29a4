"""The CPUs of the test's own process, which avoids reserved cores after it has started an engine with a reserve."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

from tokenmill.engine.limits.reserve import restrict_to_cpus


@contextmanager
def own_cpus_restored() -> Iterator[set[int]]:
    """Yield the CPUs of this process, and restore its affinity afterwards."""
    before = os.sched_getaffinity(0)
    try:
        yield before
    finally:
        restrict_to_cpus(tuple(before))
