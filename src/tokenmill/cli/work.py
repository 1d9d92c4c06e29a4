"""`tokenmill work`: one more runner on the batches that others have begun."""

import asyncio
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from tokenmill.cli.engine_for import Choice, choose, engine_up, plan_for
from tokenmill.cli.job_options import folder_beside, store_at
from tokenmill.cli.output import Common, facts, say, show, show_json
from tokenmill.cli.plan_view import render
from tokenmill.cli.run_view import progress_shown
from tokenmill.cli.shaping import shape_at, width_for
from tokenmill.cli.starting import KINDS, EngineOptions, Wanted
from tokenmill.cli.stopping import Stop
from tokenmill.engine.engine import Engine
from tokenmill.errors import UsageError
from tokenmill.jobs.job import Batch
from tokenmill.jobs.leased_out import announce
from tokenmill.jobs.portion import Means
from tokenmill.jobs.progress import Report
from tokenmill.jobs.retries import MOST_ATTEMPTS
from tokenmill.jobs.shape import EngineShape
from tokenmill.jobs.store import Store
from tokenmill.jobs.worker import Options
from tokenmill.jobs.worker import work as work_on
from tokenmill.units import format_seconds, number_of

DOES_NOT_FIT = 3
LOOK_S = 2.0  # between two looks for batches that have come
_OTHERS_HAVE_IT = "others are at work on all that is left; waiting until it is done, or one of them is lost"


def work(
    *,
    model: str | None = None,
    store: str | None = None,
    stay: bool = False,
    attempts: int = MOST_ATTEMPTS,
    job_timeout: float | None = None,
    options: EngineOptions = EngineOptions(),  # noqa: B008  frozen
    common: Common = Common(),  # noqa: B008  frozen
) -> int:
    """Work on the batches of a store on PostgreSQL, beside the runners on other hosts.

    Batches come from `tokenmill run --store postgresql://...`, which also writes their results, on its own host. Every
    runner takes those that ask for its model. Jobs with a common beginning go to as few runners as possible, and those
    that are too long for one to those with a larger --context. Ends when all batches are done: while other runners have
    all that is left, it waits, and does what one of them had at work that is lost.

    Parameters
    ----------
    model:
        A GGUF file, a folder of safetensors (vLLM), or the name of a pulled model; default: smollm2. It must be the
        very model that the batches were begun with; where its file lies does not matter.
    store:
        postgresql://user@host/database; default: store in the configuration. A password is better left to
        ~/.pgpass or PGPASSWORD: others on this host can read what is on a command line.
    stay:
        Wait for more batches when all are done; Ctrl-C ends it.
    attempts:
        How often a job is tried that fails for reasons that can pass; default: 3.
    job_timeout:
        Seconds that one attempt may take, for lines that do not say.
    """
    if attempts < 1:
        raise UsageError(f"--attempts must be at least 1, not {attempts}")
    if job_timeout is not None and job_timeout <= 0:
        raise UsageError("--job-timeout must be more than 0 seconds")
    address = store_at(store, common)
    if isinstance(address, Path):
        said = f"one process works with the batches in a folder, here {address}"
        raise UsageError(said, hint="--store postgresql://user@host/database, as tokenmill run was given")
    choice = choose(model, options, common)
    own = choice.record is None and choice.url is None
    if own:
        options.goal_for(KINDS[choice.config.kind])
    wanted = plan_for(choice, options, common) if own else None
    if wanted is not None and not wanted.plan.fits:
        show(*render(wanted.plan))
        return DOES_NOT_FIT
    began_s = time.monotonic()
    settings = Options(attempts=attempts, job_timeout_s=job_timeout)
    with Store(address) as opened, folder_beside(address, common) as folder:
        measure = wanted is not None and options.sequences is None and not wanted.tuned
        runner = _Runner(opened, choice, wanted, settings, folder, stay=stay, measure=measure)
        asyncio.run(runner.run())
    _tell(runner, time.monotonic() - began_s, common)
    return runner.code


class _Runner:
    """One process of `tokenmill work`."""

    def __init__(self, store: Store, choice: Choice, wanted: Wanted | None, settings: Options, folder: Path, *,
                 stay: bool, measure: bool) -> None:  # fmt: skip
        self._store, self._choice, self._wanted, self._settings = store, choice, wanted, settings
        self._folder, self._stay, self._measure = folder, stay, measure
        self.reports: list[Report] = []
        self.seen: dict[int, str] = {}  # names of the batches that were worked on
        self.code = 0

    async def run(self) -> None:
        """Until there is nothing to do, or a signal comes."""
        stop, wanted = Stop(), self._wanted
        room = wanted.plan.settings.context if wanted is not None else None
        await asyncio.to_thread(announce, self._store, Means(self._choice.model_id, room))
        try:
            batches = await self._awaited(stop.event)
            if not batches:
                return
            async with engine_up(self._choice, self._wanted, self._folder) as engine:
                width = await width_for(engine, self._store, batches[0]) if self._measure else None
                shape = await shape_at(engine, width)
                stop.loaded()
                while batches and not stop.event.is_set():
                    await self._round(batches, engine, shape, stop.event)
                    batches = await self._awaited(stop.event)
        except asyncio.CancelledError:
            if not stop.code:
                raise
        finally:
            self.code = stop.code

    async def _round(
        self, batches: Sequence[Batch], engine: Engine, shape: EngineShape, stop: asyncio.Event
    ) -> None:  # fmt: skip
        """Batches to their end, with those that come meanwhile."""
        self.seen |= {batch.id: batch.name for batch in batches}
        joining: asyncio.Queue[Batch] = asyncio.Queue()
        watch = asyncio.create_task(self._watch(joining, {batch.id for batch in batches}))
        try:
            with progress_shown() as tell:
                self.reports.append(await work_on(
                    self._store, batches, engine, shape, options=self._settings, stop=stop, tell=tell, joining=joining,
                    portion=self._store.portion(shape.width),
                ))  # fmt: skip
        finally:
            watch.cancel()
            with suppress(asyncio.CancelledError):
                await watch

    async def _watch(self, joining: "asyncio.Queue[Batch]", joined: set[int]) -> None:
        """Send what comes. The worker itself sees to what it knows and is open again."""
        while True:
            await asyncio.sleep(LOOK_S)
            for batch in await asyncio.to_thread(self._open):
                if batch.id not in joined:
                    joined.add(batch.id)
                    self.seen[batch.id] = batch.name
                    say(f"{batch.name} joins: {number_of(batch.counts.pending, 'job')}")
                    joining.put_nowait(batch)

    async def _awaited(self, stop: asyncio.Event) -> list[Batch]:
        """Batches with something to do; none: all are done, and nobody is to wait for others, or it is to stop.

        What other runners have is waited for here, so that no engine is loaded for it unless one of them is lost.
        """
        said = False
        while not stop.is_set():
            if found := await asyncio.to_thread(self._open):
                return found
            if not self._stay and not await asyncio.to_thread(self._with_others):
                break
            if not said:
                say("nothing to do; waiting for batches" if self._stay else _OTHERS_HAVE_IT)
                said = True
            await asyncio.to_thread(self._store.tend)
            with suppress(TimeoutError):
                async with asyncio.timeout(LOOK_S):
                    await stop.wait()
        return []

    def _open(self) -> list[Batch]:
        """Of our model, with every line stored, and something to do."""
        return self._store.open_batches(self._choice.model_id)

    def _with_others(self) -> bool:
        """Whether other runners have jobs that would be ours if they were lost."""
        ours = [batch for batch in self._store.batches() if batch.model_id == self._choice.model_id]
        return any(batch.sealed_s is not None and not batch.finished for batch in ours)


def _tell(runner: _Runner, seconds: float, common: Common) -> None:
    found = document(runner.reports, sorted(runner.seen.values()), seconds)
    if not runner.reports and not runner.code:
        say("there is nothing to do yet for this model\nhint: --stay waits for batches; tokenmill status lists them")
    if common.json:
        show_json(found)
        return
    if not runner.reports:
        return
    show(facts({
        "worked": f"on {number_of(len(runner.seen), 'batch', 'batches')} for {format_seconds(seconds)}",
        "answers": f"{found['computed']:,} were computed here",
        "prompts": f"{found['reused_tokens']:,} tokens reused, {found['computed_prompt_tokens']:,} computed",
        "written": f"{found['generated_tokens']:,} tokens",
    }))  # fmt: skip


def document(reports: Sequence[Report], batches: Sequence[str], seconds: float) -> dict[str, Any]:
    """What one runner did."""
    return {
        "batches": list(batches),
        "computed": sum(report.answers for report in reports),
        "reused_tokens": sum(report.tokens.cached for report in reports),
        "computed_prompt_tokens": sum(report.tokens.computed for report in reports),
        "generated_tokens": sum(report.tokens.generated for report in reports),
        "engine_deaths": sum(report.deaths for report in reports),
        "seconds": round(seconds, 3),
        "end": reports[-1].end if reports else "finished",
    }
