"""Jobs out of a table and a template, for `tokenmill run`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from cyclopts import Parameter

from tokenmill.api.sources import JobSource
from tokenmill.errors import UsageError
from tokenmill.jobs.read import check_there


@Parameter(name="*")
@dataclass(frozen=True, slots=True)
class TableOptions:
    """Jobs that are made of a table's rows instead of read from a file."""

    table: Path | None = None
    """A table instead of a job file: JSONL, CSV, TSV or Parquet; every row becomes a job."""

    template: Path | None = None
    """The file of the prompt for each row: {column} is what stands there, {*} all other columns as lines."""

    system: Path | None = None
    """The file of a system message for each row, written in the same way."""

    layout: Literal["auto", "file"] = "auto"
    """auto orders the columns of {*} so that rows share the most; file leaves them as they are. Default: auto."""

    key: str | None = None
    """The column that names the jobs; default: they are row-1, row-2, ..."""

    def source(self, jobs: str | None) -> JobSource:
        """The jobs of the command; UsageError unless there is exactly one source of them."""
        if self.table is None:
            lonely = [name for name in ("template", "system", "key") if getattr(self, name) is not None]
            if lonely:
                raise UsageError(f"--{lonely[0]} is for a table", hint="give --table too, or a job file alone")
            if jobs is None:
                raise UsageError("no jobs are given", hint="tokenmill run jobs.jsonl --output results.jsonl")
            return JobSource(jobs)
        if jobs is not None:
            raise UsageError("there is a job file and a table", hint="give one of them")
        if self.template is None:
            raise UsageError("a table needs a --template", hint="a text with {column} in it, and {*} for the others")
        check_there(self.table)
        return JobSource(self.table, self.template, self.system, self.layout, self.key)
