"""`tokenmill status`: shows the state and progress of batches."""

import time
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter
from rich.console import RenderableType
from rich.table import Table

from tokenmill.api import detached
from tokenmill.api.stores import find_batch, store_address
from tokenmill.cli.batches.seen_batch import SeenBatch, seen_batches
from tokenmill.cli.batches.watch import WatchedSpeeds, watched
from tokenmill.cli.batches.workers import unwritten
from tokenmill.cli.options import when
from tokenmill.cli.output import Common, facts, jsonable, show, show_json
from tokenmill.cli.views.run import near
from tokenmill.doctor.reserves import reserves_now
from tokenmill.engine.limits.reserve import AppliedLimits
from tokenmill.errors import UsageError
from tokenmill.jobs.store.address import Address
from tokenmill.jobs.store.open import has_batches
from tokenmill.jobs.store.reader import HttpSubmission, StoreReader
from tokenmill.units import format_seconds

_NEWEST = 20
_FAILURES = 3
_ACTIVE = ("being read", "waiting", "running")  # states that change by themselves


def status(
    batch: str | None = None,
    /,
    *,
    watch: bool = False,
    store: Annotated[str | None, Parameter(metavar="STORE")] = None,
    common: Common = Common(),  # noqa: B008  frozen
) -> None:
    """Show the progress of all batches, or of one in detail.

    Reads counters only, so it is fast for any number of jobs and does not slow down workers.

        tokenmill status
        tokenmill status last --watch

    Parameters
    ----------
    batch:
        Name of the batch, a prefix of it, or last for the one that was run last. [default: the newest batches]
    watch:
        Show changes until the batch is done, with its speed and the time left; without BATCH, until no batch runs.
    store:
        Batch store: a folder, or postgresql://USER@HOST/DATABASE. [default: from the configuration, or batches in the
        state folder]
    """
    address = store_address(store, common.load_config())
    if watch:
        if common.json:
            raise UsageError("--watch cannot be combined with --json", hint="run tokenmill status --json repeatedly")
        speeds = WatchedSpeeds()
        watched(lambda: _parts(batch, address, common, speeds))
        return
    if common.json:
        show_json(_read_document(batch, address, common))
        return
    parts, _ = _parts(batch, address, common, None)
    show(*parts)


def _parts(
    batch: str | None, address: Address, common: Common, speeds: WatchedSpeeds | None
) -> tuple[list[RenderableType], bool]:
    """The text, and whether it can still change."""
    state = common.load_config().state_path
    reserves = _left(reserves_now(state))
    if batch is None and not has_batches(address):
        none = [f"no batches in {address}", "to start one: tokenmill run jobs.jsonl --output results.jsonl"]
        return [*none, *reserves], False
    with StoreReader(address) as reader:
        if batch is None:
            batches = seen_batches(address, reader, reader.batches())
            refused = {name: each for name, each in reader.submitted_over_http().items() if each.failed}
            return [*_many(batches, refused), *reserves], any(each.state in _ACTIVE for each in batches)
        (seen,) = seen_batches(address, reader, [find_batch(reader, batch)])
        found = seen.batch
        failures = [f"line {item.number}: {item.message}" for item in reader.failures(found.id, 0, _FAILURES)]
        missing = unwritten(reader, found)
    background = detached.running(state, found.name)
    more = {}
    if background is not None:
        more["background"] = f"process {background.process.pid}; to see what it prints: tokenmill attach {found.name}"
    if speeds is not None and (speed := speeds.add(found, time.time())) is not None:
        more["speed"] = speed
    shown = _one(seen, more, failures, missing)
    return [*shown, *reserves], background is not None or seen.state in _ACTIVE


def _read_document(batch: str | None, address: Address, common: Common) -> dict[str, Any] | list[dict[str, Any]]:
    if batch is None and not has_batches(address):
        return []
    state = common.load_config().state_path
    with StoreReader(address) as reader:
        if batch is None:
            return [_document(each, state) for each in seen_batches(address, reader, reader.batches())]
        (seen,) = seen_batches(address, reader, [find_batch(reader, batch)])
        return {**_document(seen, state), "reserves": reserves_now(state)}


def _many(batches: list[SeenBatch], refused: dict[str, HttpSubmission]) -> list[RenderableType]:
    columns = ("batch", "state", "jobs", "done", "failed", "from")
    known = {each.batch.name for each in batches}
    timed = [(each.batch.created_s, _row(each)) for each in batches]
    timed += [
        (each.created_s, (name, "failed", "-", "-", "-", each.filename or ""))
        for name, each in refused.items()
        if name not in known
    ]
    rows = [row for _, row in sorted(timed, key=lambda one: one[0])]
    hidden = len(rows) - _NEWEST
    rows = rows[-_NEWEST:]
    table = Table(box=None, pad_edge=False)
    for index, column in enumerate(columns):
        last = column == "from"  # the only column that may be truncated
        width = None if last else max(len(row[index]) for row in (columns, *rows))
        table.add_column(
            column,
            justify="right" if index > 1 and not last else "left",
            no_wrap=True,
            min_width=width,
            overflow="ellipsis",
        )
    for row in rows:
        table.add_row(*row)
    return [table, f"and {hidden:,} older"] if hidden > 0 else [table]


def _left(reserves: dict[str, AppliedLimits]) -> list[RenderableType]:
    """The cores and memory that running engines reserve for other programs, as the kernel reports them."""
    return [f"engine {name}: {words}" for name, kept in reserves.items() for words in kept.describe()]


def _row(seen: SeenBatch) -> tuple[str, ...]:
    counts = seen.counts
    numbers = (f"{number:,}" for number in (counts.total, counts.done, counts.final - counts.done))
    return seen.batch.name, seen.state, *numbers, Path(seen.source).name


def _one(seen: SeenBatch, more: dict[str, str], failures: list[str], missing: str | None) -> list[RenderableType]:
    batch = seen.batch
    counts = seen.counts
    totals = batch.totals
    state = seen.state
    if state == "stopped" and "background" in more:
        state = "waiting"  # between two windows, the run does not hold the store
    parts = {
        "done": counts.done,
        "running": counts.running,
        "pending": counts.pending,
        "failed": counts.failed,
        "quarantined": counts.quarantined,
        "cancelled": counts.cancelled,
    }
    rows = {
        "batch": batch.name,
        "state": f"{state} ({seen.own.words})" if state == "running" else state,
        "jobs": f"{counts.total:,}: " + ", ".join(f"{number:,} {word}" for word, number in parts.items() if number),
        "from": seen.source,
        "created": f"{when(batch.created_s)}, {format_seconds(max(0.0, time.time() - batch.created_s))} ago",
    }
    if batch.deadline_s is not None:
        rows["deadline"] = when(batch.deadline_s)
    if batch.priority:
        rows["priority"] = str(batch.priority)
    if totals.computed or totals.reused:
        rows["answers"] = f"{totals.computed:,} computed, {totals.reused:,} reused from the store or from equal lines"
    if totals.prompt_tokens:
        share = totals.cached_tokens / totals.prompt_tokens
        rows["prompts"] = f"{totals.prompt_tokens:,} tokens, {share:.0%} from cache"
        rows["generated"] = f"{totals.completion_tokens:,} tokens"
    rows |= {label: near(path) for label, path in (("results", batch.output), ("errors", batch.errors)) if path}
    shown: list[RenderableType] = [facts(rows | more)]
    if failures:
        shown += ["", "first failures:", *(f"  {words}" for words in failures)]
    if missing:
        shown += ["", missing]
    if state == "stopped":
        shown += ["", "run the same tokenmill run command again to continue"]
    return shown


def _document(seen: SeenBatch, state: Path) -> dict[str, Any]:
    counts = seen.counts
    background = detached.running(state, seen.batch.name)
    return {
        **jsonable(seen.batch),
        "counts": jsonable(counts),
        "state": seen.state,
        "filename": seen.submission.filename if seen.submission else None,
        **seen.own.document(),
        "background": None if background is None else {"pid": background.process.pid, "log": background.log},
        "jobs": counts.total,
        "succeeded": counts.done,
        "failed": counts.final - counts.done,
        "finished": seen.batch.finished,
    }
