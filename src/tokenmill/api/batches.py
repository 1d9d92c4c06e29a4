"""Durable batches: `run` and `submit`; `work` is in `workers.py`.

A run asks the store whether the batch exists, plans the engine, stores the jobs, starts the engine and works until
every job has a result. The same call after a crash finds the same batch and continues it.
"""

import asyncio
import time
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, Unpack

from tokenmill.api.batch_run import counts_text, prepare, run_once
from tokenmill.api.display import display
from tokenmill.api.options import engine_options
from tokenmill.api.planning.plan import configuration
from tokenmill.api.progress import OnProgress, ignore, log
from tokenmill.api.run_options import RunArguments, SubmitArguments, check_arguments, run_options
from tokenmill.api.run_request import BatchRequest
from tokenmill.api.sources import JobSource
from tokenmill.api.stopping import Stop, in_thread
from tokenmill.api.stores import store_address
from tokenmill.api.summary import Summary, joined
from tokenmill.api.time_window import TimeWindow
from tokenmill.config import Config
from tokenmill.errors import UsageError
from tokenmill.jobs.ingest.background import Ingest
from tokenmill.jobs.models import Batch


def run(
    jobs: Any,
    *,
    output: str | Path | None = None,
    model: str | Path | None = None,
    store: str | Path | None = None,
    config: Config | str | Path | None = None,
    on_progress: OnProgress | None = None,
    **arguments: Unpack[RunArguments],
) -> Summary:
    """Run a durable batch to its end and return a summary.

    `jobs`: a JSONL or Parquet file, an iterable of strings (user messages) and dicts (OpenAI request bodies, lines of
    OpenAI's batch format, or `{"prompt": ...}`), or a pandas, Polars or PyArrow table with `template=`. `output`: the
    file for result lines; without it, read them with `Summary.results()`. `defaults=`: body keys such as max_tokens,
    for jobs that lack them. `store`: a folder or `postgresql://...`; default: the configuration's. The other arguments
    are those of `RunArguments`, with the engine options of `tokenmill.plan`.

    The store keeps jobs and results: the same call after a crash or an interrupt continues where it stopped and
    computes no finished answer again. A job that fails becomes an error line and raises nothing. KeyboardInterrupt
    stops the engine and keeps the batch.
    """
    check_arguments(arguments, RunArguments)
    settings = configuration(config)
    request = batch_request(jobs, output, model, store, settings, dict(arguments))
    stop = Stop()
    with display() if on_progress is None else nullcontext(on_progress) as show:
        return in_thread(lambda report: run_batch(request, settings, stop, report), stop, show)


def submit(
    jobs: Any,
    *,
    output: str | Path | None = None,
    model: str | Path | None = None,
    store: str | Path | None = None,
    config: Config | str | Path | None = None,
    **arguments: Unpack[SubmitArguments],
) -> Batch:
    """Store jobs as a batch without running it; `work` runs it, here or, from PostgreSQL, on another machine.

    The arguments are those of `run`, without those that only matter while jobs run (`attempts`, `job_timeout_s`, `on`).
    The same call finds the same batch.
    """
    check_arguments(arguments, SubmitArguments)
    settings = configuration(config)
    request = batch_request(jobs, output, model, store, settings, dict(arguments))
    request.check()
    with ExitStack() as stack:
        _, submission, _ = prepare(request, settings, stack, None, Stop(), ignore)
        ingest = stack.enter_context(Ingest(submission, whole=True))
        return ingest.found.batch


def batch_request(
    jobs: Any,
    output: str | Path | None,
    model: str | Path | None,
    store: str | Path | None,
    config: Config,
    arguments: dict[str, Any],
) -> BatchRequest:
    """Keyword arguments as a request; UsageError for a value that is out of range."""
    options = run_options(output, arguments)
    named = {
        name: arguments.pop(name) for name in ("template", "system", "layout", "key", "limit") if name in arguments
    }
    on = arguments.pop("on", None)
    return BatchRequest(
        JobSource(jobs, **named),
        store_address(store, config),
        options,
        engine_options(arguments),
        None if model is None else str(model),
        on,
    )


def run_batch(request: BatchRequest, config: Config, stop: Stop, on_progress: OnProgress) -> Summary:
    """Run a batch to its end, until `stop` is requested, or until its time limit; blocks."""
    request.check()
    options = request.options
    if options.window is not None:
        return _run_in_window(request, TimeWindow.parse(options.window), config, stop, on_progress)
    until_s = None if options.max_hours is None else time.time() + 3600 * options.max_hours
    return run_once(request, config, stop, on_progress, until_s=until_s)


def store_batch(request: BatchRequest, config: Config, stop: Stop, on_progress: OnProgress) -> Summary:
    """Store a batch and plan its engine, for another process that runs it; UsageError for a stream.

    Everything that can be wrong with the jobs, the options and the plan is raised here.
    """
    request.check()
    if not request.source.repeatable:
        raise UsageError("a stream cannot be read again by another process", hint="write the jobs to a file")
    return run_once(request, config, stop, on_progress, until_s=0.0)


def _run_in_window(
    request: BatchRequest, window: TimeWindow, config: Config, stop: Stop, on_progress: OnProgress
) -> Summary:
    """Run a batch in a daily time window. Between two windows, no engine is loaded and the store is closed.

    The seconds of the summary leave out the time between two windows.
    """
    ended: Summary | None = None
    while True:
        part = run_once(request, config, stop, on_progress, until_s=window.closes_s(time.time()))
        ended = part if ended is None else joined(ended, part)
        if not part.time_up:
            return ended
        opens_s = window.opens_s(time.time())
        at = time.strftime("%H:%M", time.localtime(opens_s))
        log.info("%s waits until %s: %s", part.batch.name, at, counts_text(part.batch.counts))
        asyncio.run(_wait(stop, opens_s))
        if stop.requested:
            return replace(ended, time_up=False)


async def _wait(stop: Stop, until_s: float) -> None:
    stop.begin()
    await stop.wait_until(until_s)
