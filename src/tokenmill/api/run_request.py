"""What `run` and `submit` are asked for: the jobs, the store, the options and the engine."""

import time
from dataclasses import dataclass

from tokenmill.api.options import EngineOptions
from tokenmill.api.run_options import RunOptions
from tokenmill.api.sources import JobSource
from tokenmill.jobs.output_checks import check_paths
from tokenmill.jobs.store.address import Address


@dataclass(frozen=True, slots=True)
class BatchRequest:
    """A batch to run: its jobs, its store, and the engine for it."""

    source: JobSource
    store: Address
    options: RunOptions
    engine: EngineOptions
    model: str | None = None
    on: str | None = None  # a Ray cluster

    def check(self) -> None:
        """UsageError for a request that cannot be run, before anything is downloaded, planned or stored."""
        self.options.check()
        check_paths(self.options.submission("", time.time()))
        self.source.check()
