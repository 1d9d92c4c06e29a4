"""`tokenmill results`: writes the results of a batch that are available so far."""

import json
import sys
from pathlib import Path
from typing import Annotated, BinaryIO

from cyclopts import Parameter

from tokenmill.api.stores import find_batch, store_address
from tokenmill.cli.output import Common, say, show_json
from tokenmill.errors import UsageError
from tokenmill.jobs.models import Batch, Result, State
from tokenmill.jobs.openai.answers import is_cut
from tokenmill.jobs.output import output_line
from tokenmill.jobs.store.reader import StoreReader
from tokenmill.storage.atomic import new_file
from tokenmill.units import number_of

_PAGE = 512


def results(
    batch: str,
    /,
    *,
    output: Annotated[Path | None, Parameter(name=("--output", "-o"), metavar="FILE")] = None,
    failed: bool = False,
    cut: bool = False,
    force: bool = False,
    store: Annotated[str | None, Parameter(metavar="STORE")] = None,
    common: Common = Common(),  # noqa: B008  frozen
) -> int:
    """Write the results of a batch that are available so far, in OpenAI's batch output format.

    Works at any time, even while the batch runs; the batch's own output file is not changed. Lines are in input order.
    Unfinished jobs are omitted. Jobs whose stored answer is damaged are omitted, and the exit code is 1.

        tokenmill results last -o so-far.jsonl

    Parameters
    ----------
    batch:
        Name of the batch, a prefix of it, or last for the one that was run last.
    output:
        Write to FILE. [default: stdout]
    failed:
        Write only failed lines.
    cut:
        Write only answers that are incomplete, because they reached max_tokens or the end of the context.
    force:
        Overwrite an existing file.
    store:
        Batch store: a folder, or postgresql://USER@HOST/DATABASE. [default: from the configuration, or batches in the
        state folder]
    """
    if failed and cut:
        raise UsageError("--failed and --cut cannot be combined", hint="use one of them")
    with StoreReader(store_address(store, common.load_config())) as reader:
        found = find_batch(reader, batch)
        if output is None:
            count, damaged = _write(sys.stdout.buffer, reader, found, failed=failed, cut=cut)
        else:
            with new_file(output, force=force) as file:
                count, damaged = _write(file, reader, found, failed=failed, cut=cut)
    if common.json and output is not None:
        document = {"batch": found.name, "lines": count, "jobs": found.counts.total, "output": output}
        show_json(document | {"damaged": damaged})
    elif output is not None:
        say(f"wrote {number_of(count, 'line')} of {number_of(found.counts.total, 'job')} to {output}")
    if damaged:
        say(f"omitted {number_of(damaged, 'line')} with damaged stored answers\nhint: tokenmill store check --repair")
    return 1 if damaged else 0


def _write(file: BinaryIO, reader: StoreReader, batch: Batch, *, failed: bool, cut: bool) -> tuple[int, int]:
    """Write the finished lines; return how many were written and how many were omitted as damaged."""
    count = damaged = number = 0
    while page := (reader.failures if failed else reader.results)(batch.id, number, _PAGE):
        number = page[-1].number
        for result in page:
            if result.damaged_answer is not None:
                damaged += 1
            elif _selected(result, failed=failed, cut=cut):
                file.write(output_line(batch.name, result))
                count += 1
    return count, damaged


def _selected(result: Result, *, failed: bool, cut: bool) -> bool:
    if not result.state.final or (failed and result.state is State.DONE):
        return False
    return not cut or (result.body is not None and is_cut(json.loads(result.body)))
