"""Checks of a stored batch before its engine is loaded: jobs that are too long, and jobs that name another model.

Both read a limited number of jobs, the longest ones and the first ones.
"""

import re
import time
from pathlib import Path
from typing import Any

from tokenmill.api.engines.batch import EngineSetup
from tokenmill.api.engines.choose import EngineChoice
from tokenmill.api.progress import log
from tokenmill.api.tokens import token_counter
from tokenmill.errors import RequestRefused
from tokenmill.jobs.batch_profile import CountTokens
from tokenmill.jobs.ingest.line import call_of
from tokenmill.jobs.models import Batch, Failure, QueuedJob
from tokenmill.jobs.openai.call import Call
from tokenmill.jobs.store.reader import StoreReader
from tokenmill.jobs.store.store import Store
from tokenmill.jobs.workload import pending_rows
from tokenmill.units import number_of

_COUNT_S = 30.0  # at most for counting tokens; the engine checks the other jobs
_NAMED_JOBS = 512  # whose model is compared
_SPLIT = re.compile(r"-\d{5}-of-\d{5}$")


def fail_too_long(store: Store, batch: Batch, setup: EngineSetup) -> int:
    """Fail pending jobs whose prompt alone is longer than the planned context; returns how many.

    Does nothing if another worker of the store may have a larger context, or if the vocabulary is not on this machine.
    """
    planned = setup.planned
    if planned is None or setup.choice.path is None or store.shared:
        return 0
    context = planned.plan.settings.context
    rows = [row for row in pending_rows(store, batch) if row.prompt_bytes > context]  # a token has at least one byte
    if not rows:
        return 0
    failed = 0
    with token_counter(str(setup.choice.path), setup.config) as tokens:
        if tokens.count is None:
            return 0
        until_s = time.monotonic() + _COUNT_S
        for row in sorted(rows, key=lambda row: row.prompt_bytes, reverse=True):
            if time.monotonic() > until_s:
                break
            prompt_tokens = _tokens(store, batch, row, tokens.count)
            if prompt_tokens > context:
                message = (
                    f"the prompt has at least {prompt_tokens} tokens and the context {context}: "
                    f"{prompt_tokens - context} too many; shorten the prompt, or use a larger --context"
                )
                store.fail(row.id, Failure("too_long", message))
                failed += 1
    if failed:
        log.warning("%s too long for the context of %s tokens", number_of(failed, "job"), f"{context:,}")
    return failed


def _tokens(store: StoreReader, batch: Batch, row: QueuedJob, count: CountTokens) -> int:
    """The tokens of a prompt without its chat template; 0 if the line cannot be read, which the worker reports."""
    job = store.job(row.id)
    try:
        call = None if job is None else call_of(job.line, batch.defaults)
    except (RequestRefused, ValueError):
        return 0
    return 0 if call is None else sum(map(count, _texts(call)))


def _texts(call: Call) -> list[str]:
    prompt = call.values.get("prompt")
    if prompt is not None:
        return [prompt] if isinstance(prompt, str) else []
    texts: list[str] = []
    for message in call.values["messages"]:
        content: Any = message.get("content")
        parts = content if isinstance(content, list | tuple) else [{"text": content}]
        texts += [part["text"] for part in parts if isinstance(part.get("text"), str)]
    return texts


def warn_of_other_models(store: StoreReader, batch: Batch, choice: EngineChoice) -> None:
    """Log once that jobs name a model other than the one that answers them."""
    others: dict[str, int] = {}
    rows = store.waiting([batch.id], limit=_NAMED_JOBS)
    for row in rows:
        job = store.job(row.id)
        try:
            name = None if job is None else call_of(job.line, batch.defaults).model
        except (RequestRefused, ValueError):
            continue
        if name is not None and not _same_model(name, choice):
            others[name] = others.get(name, 0) + 1
    if others:
        names = ", ".join(f"{name!r}" for name in sorted(others)[:3])
        of = f"{sum(others.values()):,} of the first {len(rows):,} jobs" if len(rows) > 1 else "the job"
        log.warning('%s ask for "model" %s; %s answers them', of, names, choice.model)


def _same_model(name: str, choice: EngineChoice) -> bool:
    """Whether a name in a job means the chosen model: one is part of the other, apart from case and punctuation."""
    known = [choice.model, Path(choice.model).stem, "" if choice.path is None else choice.path.stem]
    if choice.record is not None:
        known.append(choice.record.model)
    asked = _plain(name.partition(":")[0].rpartition("/")[2])
    return any(asked in plain or plain in asked for plain in map(_plain, known) if asked and plain)


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", _SPLIT.sub("", name).lower())
