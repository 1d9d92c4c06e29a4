"""`tokenmill results`: the output lines of a batch, as far as they are there."""

import sys
from pathlib import Path
from typing import Annotated, BinaryIO

from cyclopts import Parameter

from tokenmill.api.stores import find_batch, store_address
from tokenmill.cli.output import Common, say, show_json
from tokenmill.jobs.models import Batch, State
from tokenmill.jobs.output import output_line
from tokenmill.jobs.store.reader import StoreReader
from tokenmill.storage.atomic import new_file
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
) -> int:
    """Write the results of a batch as OpenAI's batch output lines, in the order of the jobs.

    Jobs without an outcome are left out, so this may be asked at any time; the batch's own output file is not touched.
    Jobs whose stored answer is damaged are left out, too, and the exit code is 1.

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
    with StoreReader(store_address(store, common.load_config())) as reader:
        found = find_batch(reader, batch)
        if output is None:
            count, damaged = _write(sys.stdout.buffer, reader, found, failed)
        else:
            with new_file(output, force=force) as file:
                count, damaged = _write(file, reader, found, failed)
    if common.json and output is not None:
        document = {"batch": found.name, "lines": count, "jobs": found.counts.total, "output": output}
        show_json(document | {"damaged": damaged})
    elif output is not None:
        say(f"{number_of(count, 'line')} of {number_of(found.counts.total, 'job')} written to {output}")
    if damaged:
        say(f"left out {number_of(damaged, 'line')}: their stored answers are damaged\nhint: tokenmill store check")
    return 1 if damaged else 0


def _write(file: BinaryIO, reader: StoreReader, batch: Batch, failed: bool) -> tuple[int, int]:
    """Write finished lines; how many, and how many were left out because their answer is damaged."""
    count = damaged = number = 0
    while page := (reader.failures if failed else reader.results)(batch.id, number, _PAGE):
        number = page[-1].number
        for result in page:
            if result.damaged_answer is not None:
                damaged += 1
            elif result.state.final and not (failed and result.state is State.DONE):
                file.write(output_line(batch.name, result))
                count += 1
    return count, damaged
