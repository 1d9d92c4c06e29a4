"""Jobs out of a table and a template, for `tokenmill run`."""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from cyclopts import Parameter

from tokenmill.cli.output import say
from tokenmill.errors import UsageError
from tokenmill.jobs.layout import Saving, lay_out
from tokenmill.jobs.read import check_there
from tokenmill.jobs.table import read_table
from tokenmill.jobs.template import read_template
from tokenmill.model.newfile import new_file
from tokenmill.units import format_bytes, number_of


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

    def check(self, jobs: str | None) -> None:
        """Whether there are jobs, from one place that is there; UsageError where not. Reads nothing."""
        if self.table is None:
            lonely = [name for name in ("template", "system", "key") if getattr(self, name) is not None]
            if lonely:
                raise UsageError(f"--{lonely[0]} is for a table", hint="give --table too, or a job file alone")
            if jobs is None:
                raise UsageError("no jobs are given", hint="tokenmill run jobs.jsonl --output results.jsonl")
            check_there(jobs)
            return
        if jobs is not None:
            raise UsageError("there is a job file and a table", hint="give one of them")
        if self.template is None:
            raise UsageError("a table needs a --template", hint="a text with {column} in it, and {*} for the others")
        check_there(self.table)

    def source(self, jobs: str | None, folder: Path) -> str:
        """Where the jobs are: the file that was given, or one made of the table, in the store's folder.

        The store must be held: another process may be reading its own table there. `opened` takes the file away again.
        """
        self.check(jobs)
        if self.table is None or self.template is None:
            return jobs or ""
        return str(self._written(self.table, self.template, folder))

    @contextmanager
    def opened(self, jobs: str | None, folder: Path) -> Iterator[str]:
        """The same while they are read: what was made of a table goes when they are stored, and when they are refused.

        The same command makes the same file again, and a batch needs none once it is stored.
        """
        source = self.source(jobs, folder)
        try:
            yield source
        finally:
            if self.table is not None:
                Path(source).unlink(missing_ok=True)
                with suppress(OSError):  # another table's file is there
                    Path(source).parent.rmdir()

    def _written(self, table: Path, template: Path, folder: Path) -> Path:
        prompt = read_template(_text(template), None if self.system is None else _text(self.system))
        laid = lay_out(
            read_table(table), prompt, "auto" if self.layout == "auto" else "given", key=self.key, rows="table"
        )
        say(_words(laid.saving, self.layout))
        path = folder / "tables" / f"{table.name}.{template.stem}.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        with new_file(path, force=True) as file:
            for line in laid:
                file.write(line.encode() + b"\n")
        return path


def _words(saving: Saving, layout: str) -> str:
    whole, given, least = (format_bytes(size) for size in (saving.prompt_bytes, saving.given_bytes, saving.bytes))
    words = f"{number_of(saving.rows, 'row')}, {whole} of prompts"
    if layout == "file" or saving.saved_bytes <= 0:
        return f"{words}: {given} have to be computed when shared beginnings are computed once"
    share = saving.saved_bytes / saving.given_bytes
    return f"{words}: {least} have to be computed in this layout, {given} in the table's own ({share:.0%} less)"


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}", hint="check the path") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"{path} is not UTF-8", hint="write it as UTF-8") from error
