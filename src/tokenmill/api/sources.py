"""Converts jobs in any form to a job file.

A path is used unchanged, unless only its first jobs are wanted. Everything else is written to an unnamed temporary
file, which disappears even if the process is killed; equal jobs give equal bytes, so the same call finds its batch
again.
"""

import json
import os
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Literal, NamedTuple

from tokenmill.api.progress import log
from tokenmill.errors import UsageError
from tokenmill.jobs.ingest.job_file import job_lines
from tokenmill.jobs.layout import Saving, lay_out
from tokenmill.jobs.table import Table, read_table, table_from_arrow, table_from_rows
from tokenmill.jobs.template import read_template
from tokenmill.storage.json_text import compact_json
from tokenmill.storage.lines import BadLine, check_exists
from tokenmill.units import format_bytes, number_of


class JobFile(NamedTuple):
    """A file with one job in each line."""

    path: str
    name: str | None  # the name of the batch's source; None: the path


@dataclass(frozen=True, slots=True)
class JobSource:
    """Jobs, with a template for their prompts if they are rows of a table.

    `jobs`: a path (`-` is stdin), a table of pandas, Polars or PyArrow, or an iterable of strings (user messages) and
    dicts (bodies or batch lines of OpenAI's format, or `{"prompt": ...}`). `template` and `system` are texts, or files
    as `Path`.
    """

    jobs: Any
    template: str | Path | None = None
    system: str | Path | None = None
    layout: Literal["auto", "file"] = "auto"
    key: str | None = None
    limit: int | None = None  # only the first jobs

    def check(self) -> None:
        """UsageError for options that contradict each other or jobs of a wrong type; reads no jobs."""
        if self.layout not in ("auto", "file"):
            raise UsageError(f"layout must be auto or file (got {self.layout!r})")
        if self.limit is not None and self.limit < 1:
            raise UsageError(f"limit must be at least 1 (got {self.limit})")
        if self.template is None and _is_table(self.jobs):
            raise UsageError("a table needs a template", hint="a text with {column} in it, and {*} for the others")
        for name in ("system", "key"):
            if self.template is None and getattr(self, name) is not None:
                raise UsageError(f"{name} needs a template", hint="template is the prompt for each row of a table")
        if isinstance(self.jobs, str | os.PathLike):
            _check_file(os.fspath(self.jobs))
        elif hasattr(self.jobs, "columns") and not _is_table(self.jobs):  # iterating it would yield column names
            raise UsageError(
                f"this {type(self.jobs).__name__} has no Arrow interface",
                hint="update the library (pandas 2.2 or later), or pass the rows as dicts",
            )
        elif isinstance(self.jobs, Mapping) or not (_is_table(self.jobs) or isinstance(self.jobs, Iterable)):
            raise UsageError(
                f"jobs must be a path, a table or an iterable of jobs (got {type(self.jobs).__name__})",
                hint='[{"prompt": "Once upon a time"}], ["Say hello."], or "jobs.jsonl"',
            )

    @property
    def repeatable(self) -> bool:
        """Whether another process can read the same jobs: they are in a regular file."""
        return isinstance(self.jobs, str | os.PathLike) and Path(self.jobs).is_file()

    @contextmanager
    def as_file(self, folder: Path) -> Iterator[JobFile]:
        """The jobs as a file; a temporary one in `folder` if they are not in a file already."""
        self.check()
        if self._is_job_file and self.limit is None:
            yield JobFile(os.fspath(self.jobs), None)
            return
        name, lines = self._lines()
        lines = islice(lines, self.limit)
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder, buffering=1 << 20) as file:
            for line in lines:
                file.write(line)
            file.flush()
            yield JobFile(f"/dev/fd/{file.fileno()}", name)

    @property
    def _is_job_file(self) -> bool:
        return self.template is None and isinstance(self.jobs, str | os.PathLike)

    def _lines(self) -> tuple[str, Iterator[bytes]]:
        if self._is_job_file:
            return os.fspath(self.jobs), _file_lines(os.fspath(self.jobs))
        if self.template is None:
            return "python", map(job_line, self.jobs)
        table = self._table()
        template = read_template(_text(self.template), None if self.system is None else _text(self.system))
        mode: Literal["auto", "given"] = "auto" if self.layout == "auto" else "given"
        laid_out = lay_out(table, template, mode, key=self.key, rows="table")
        log.info(_saving_text(laid_out.saving, self.layout))
        return table.name, (line.encode() + b"\n" for line in laid_out)

    def _table(self) -> Table:
        if isinstance(self.jobs, str | os.PathLike):
            return read_table(Path(self.jobs))
        if _is_table(self.jobs):
            return table_from_arrow(self.jobs)
        return table_from_rows(self.jobs)


def job_line(job: Any) -> bytes:
    """One job as a line of JSON; UsageError if it is neither a string nor a dict."""
    if isinstance(job, str):
        job = {"messages": [{"role": "user", "content": job}]}
    if not isinstance(job, Mapping):
        raise UsageError(f"a job must be a string or a dict (got {type(job).__name__})")
    try:
        return compact_json(dict(job)).encode() + b"\n"
    except UnicodeEncodeError:  # half a surrogate pair: the job fails by itself
        return json.dumps(dict(job), separators=(",", ":")).encode() + b"\n"
    except (TypeError, ValueError) as error:
        raise UsageError(f"a job cannot be written as JSON: {error}") from error


def _file_lines(path: str) -> Iterator[bytes]:
    """The lines of a job file that are not blank; UsageError for one that cannot be copied."""
    for item in job_lines(path):
        if isinstance(item, BadLine):
            raise UsageError(f"line {item.number} cannot be copied: {item.reason}", hint="remove the line")
        yield item[1].encode() + b"\n"


def _check_file(path: str) -> None:
    """UsageError if the file does not exist; a string with spaces was probably meant as a prompt."""
    try:
        check_exists(path)
    except UsageError as error:
        if " " not in path:
            raise
        raise UsageError(error.message, hint="a string is the path of a job file; give prompts as a list") from error


def _is_table(jobs: Any) -> bool:
    return hasattr(jobs, "__arrow_c_stream__")


def _saving_text(saving: Saving, layout: str) -> str:
    total, given, reordered = (format_bytes(size) for size in (saving.prompt_bytes, saving.given_bytes, saving.bytes))
    text = f"{number_of(saving.rows, 'row')}, {total} of prompts"
    if layout == "file" or saving.saved_bytes <= 0:
        return f"{text}: {given} to compute when shared prefixes are computed once"
    share = saving.saved_bytes / saving.given_bytes
    return f"{text}: {reordered} to compute after reordering columns, {given} in the given order ({share:.0%} less)"


def _text(template: str | Path) -> str:
    if isinstance(template, str):
        return template
    try:
        return template.read_text(encoding="utf-8")
    except OSError as error:
        raise UsageError(f"cannot read {template}: {error.strerror}", hint="check the path") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"{template} is not UTF-8", hint="write it as UTF-8") from error
