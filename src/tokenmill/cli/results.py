"""`tokenmill results`: the output lines of a batch, as far as they are there."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, BinaryIO

from cyclopts import Parameter

from tokenmill.cli.batches import find
from tokenmill.cli.job_options import store_at
from tokenmill.cli.output import Common, say, show_json
from tokenmill.jobs.job import Batch, Result, State
from tokenmill.jobs.output import output_line
from tokenmill.jobs.reader import Reader
from tokenmill.model.newfile import new_file
from tokenmill.units import number_of

_PAGE = 512


def results(
    batch: str,
    /,
    *,
    output: Annotated[Path | None, Parameter(name=("--output", "-o"))] = None,
    failed: bool = False,
    force: bool = False,
    store: str | None = None,
    common: Common = Common(),  # noqa: B008  frozen
) -> None:
    """Write the results of a batch as OpenAI's batch output lines, in the order of the jobs.

    Jobs without an outcome are left out, so this may be asked at any time; the batch's own output file is not touched.

    Parameters
    ----------
    batch:
        Its name or the beginning of it, or last.
    output:
        The file to write; default: stdout.
    failed:
        Only lines without an answer.
    force:
        Overwrite an existing file.
    store:
        The folder of batches, or postgresql://...; default: store in the configuration, or batches in the state
        folder.
    """
    with Reader(store_at(store, common)) as reader:
        found = find(reader, batch)
        if output is None:
            count = _write(sys.stdout.buffer, reader, found, failed)
        else:
            with new_file(output, force=force) as file:
                count = _write(file, reader, found, failed)
    if common.json and output is not None:
        show_json({"batch": found.name, "lines": count, "jobs": found.counts.total, "output": output})
    elif output is not None:
        say(f"{number_of(count, 'line')} of {number_of(found.counts.total, 'job')} written to {output}")


def _write(file: BinaryIO, reader: Reader, batch: Batch, failed: bool) -> int:
    count = 0
    for result in _finished(reader, batch, failed):
        file.write(output_line(batch.name, result))
        count += 1
    return count


def _finished(reader: Reader, batch: Batch, failed: bool) -> Iterator[Result]:
    number = 0
    while page := (reader.failures if failed else reader.results)(batch.id, number, _PAGE):
        yield from (result for result in page if result.state.final and not (failed and result.state is State.DONE))
        number = page[-1].number
