"""`tokenmill run --on`: a batch on the machines of a Ray cluster, one engine on each, each with a plan of its own.

The store and the output stay here; only requests and answers travel.
"""

import asyncio
import os
import time
from collections.abc import Iterator
from contextlib import aclosing, contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import RenderableType
from rich.table import Table

from tokenmill.cli.engine_for import DEFAULT_MODEL, Choice, model_path
from tokenmill.cli.output import Common, harmless, say
from tokenmill.cli.run_view import progress_shown
from tokenmill.cli.shaping import shape_at
from tokenmill.cli.starting import KINDS, EngineOptions, described, planned
from tokenmill.cli.stopping import Stop
from tokenmill.engine.away.cluster import connected
from tokenmill.engine.away.fleet import Fleet
from tokenmill.engine.away.host import Prepared
from tokenmill.engine.away.places import News, Ready
from tokenmill.errors import EngineError, UsageError
from tokenmill.jobs.address import Address
from tokenmill.jobs.apart import set_apart
from tokenmill.jobs.crew import CrewReport, Hand, HandReport, crew
from tokenmill.jobs.job import Batch
from tokenmill.jobs.output import Output
from tokenmill.jobs.progress import Report, Snapshot
from tokenmill.jobs.store import Store
from tokenmill.jobs.width import measured_for
from tokenmill.jobs.worker import Options
from tokenmill.model.identity import identity_of

_LOADING_S = 30.0  # between two lines about one load
_VERBS = {"found": "is there", "waits": "waits", "ready": "is ready", "lost": "is lost", "left out": "is left out"}


class OnRay:
    """A batch on a cluster, and what came of it."""

    def __init__(self, fleet: Fleet, news: "Told", choice: Choice, *, measure: bool) -> None:
        self.choice = choice
        self._fleet, self._news, self._measure = fleet, news, measure
        self._report: CrewReport | None = None
        self._load_s: float | None = None  # until the first engine was ready

    async def work(
        self, store: Store, batch: Batch, output: Output | None, settings: Options
    ) -> tuple[Report | None, float | None, int]:
        """Bring engines up and work; what came of it, how long the first took to load, and the exit code."""
        stop, began_s = Stop(), asyncio.get_running_loop().time()
        stop.loaded()  # work can be stopped from the first moment on

        async def hand(ready: Ready) -> Hand:
            if self._load_s is None:
                self._load_s = asyncio.get_running_loop().time() - began_s
            return await self._hand(ready, store, batch)

        try:
            async with aclosing(self._fleet.engines(hand)) as hands:
                with progress_shown() as tell:
                    self._report = await crew(
                        store, [batch], hands, outputs={} if output is None else {batch.id: output}, options=settings,
                        stop=stop.event, tell=lambda now: tell(self._with_machines(now)),
                        coming=lambda: self._fleet.coming,
                    )  # fmt: skip
        finally:
            await self._fleet.close()
        whole = self._report.whole
        return whole, self._load_s, stop.code if whole.end == "stopped" else 0

    def _with_machines(self, now: Snapshot) -> Snapshot:
        """A snapshot that says where work is done, unless there is worse to say."""
        return replace(now, engine_says=f"on {', '.join(self._fleet.up)}") if now.engine_says is None else now

    async def _hand(self, ready: Ready, store: Store, batch: Batch) -> Hand:
        """An engine as it is to be used for the batch."""
        engine, width = ready.engine, None
        if self._measure and not ready.tuned:
            with suppress(EngineError):  # it is started again; the batch can do without
                width = await measured_for(engine, store, batch)
        if width is not None:
            say(f"{ready.name}: {width.value} at once: {width.reason}")
        if (done := await set_apart(engine, store, batch)) is not None:
            say(f"{ready.name}: {done}")
        return Hand(ready.name, engine, await shape_at(engine, width))

    def table(self) -> list[RenderableType]:
        """What every machine did, for a person."""
        hands = self._report.hands if self._report is not None else ()
        table = Table(box=None, pad_edge=False, header_style="bold", show_edge=False)
        table.add_column("machine", overflow="fold")
        for column in ("answers", "computed", "reused", "written", "tok/s"):
            table.add_column(column, justify="right")
        table.add_column("", overflow="fold")
        for each in hands:
            table.add_row(harmless(each.name), *_figures(each.report), harmless(_gone(each)))
        for name, why in self._before_work.items():
            table.add_row(harmless(name), *[""] * 5, harmless(f"lost: {why}"))
        for name, why in self._news.left_out.items():
            table.add_row(harmless(name), *[""] * 5, harmless(f"left out: {why}"))
        return ["", table] if table.row_count else []

    @property
    def _before_work(self) -> dict[str, str]:
        """Machines that were lost before they had any work, and did not come back."""
        others = {each.name for each in self._report.hands} if self._report is not None else set[str]()
        return {name: why for name, why in self._news.lost.items() if name not in others | self._news.left_out.keys()}

    def document(self) -> dict[str, Any]:
        """The same as JSON."""
        hands = self._report.hands if self._report is not None else ()
        return {"nodes": [
            *({"name": each.name, "lost": each.lost, "left_out": None, **_counted(each.report)} for each in hands),
            *({"name": name, "lost": why, "left_out": None, **_counted(None)}
              for name, why in self._before_work.items()),
            *({"name": name, "lost": None, "left_out": why, **_counted(None)}
              for name, why in self._news.left_out.items()),
        ]}  # fmt: skip


@contextmanager
def on_ray(
    where: str, store: Address, model: str | None, options: EngineOptions, common: Common
) -> Iterator[OnRay]:  # fmt: skip
    """The machines of a cluster, each with its plan; their engines end with this."""
    if not isinstance(store, Path):
        raise UsageError(
            "--on works from a store in a folder here, not from PostgreSQL",
            hint="--store FOLDER; or run tokenmill work on every machine, which needs no Ray",
        )
    if options.machine is not None:
        raise UsageError("--machine and --on contradict each other", hint="every machine plans for itself")
    if common.config is not None:
        raise UsageError(
            "--config and --on contradict each other: every machine reads its own",
            hint="put it on the machines as ~/.config/tokenmill/tokenmill.toml; --store and others are options, too",
        )
    config = common.load_config()
    engine = options.engine_config(config)
    if engine.kind not in KINDS:
        raise UsageError(f"--on starts engines, and {engine.kind} runs already", hint=f"--engine {', '.join(KINDS)}")
    options.goal_for(KINDS[engine.kind])  # refuses what cannot be, before anything is asked for
    news, file = Told(), None if model is None or not Path(model).exists() else os.path.abspath(model)  # noqa: PTH100
    with connected(where) as cluster:
        prepare = partial(prepare_here, file or model, options)
        fleet = Fleet(cluster, prepare, tell=news.tell, model_id=None if file is None else identity_of(file))
        model_id = asyncio.run(fleet.survey())
        choice = Choice(model_id, model or DEFAULT_MODEL, engine, config.state_path)
        yield OnRay(fleet, news, choice, measure=options.sequences is None)


def prepare_here(model: str | None, options: EngineOptions) -> Prepared:
    """Plan for the machine that this is called on, by its own configuration."""
    common = Common()
    config = common.load_config()
    wanted = planned(str(model_path(model, config, common)), options, common)
    return Prepared(wanted.plan, wanted.model_path, wanted.config, config.state_path, wanted.tuned)


class Told:
    """News of machines as lines; of a load the first of each stage, and one now and then."""

    def __init__(self) -> None:
        self.left_out: dict[str, str] = {}  # machines, and why
        self.lost: dict[str, str] = {}
        self._loads: dict[str, tuple[str, float]] = {}  # the stage that was told of last, and when

    def tell(self, news: News) -> None:
        """Say it."""
        if news.loading is not None:
            title, _, words = described(news.loading)
            said, at_s = self._loads.get(news.name, ("", 0.0))
            if title != said or time.monotonic() - at_s > _LOADING_S:
                self._loads[news.name] = title, time.monotonic()
                say(f"{news.name}: {title} {words}".rstrip())
            return
        if news.what == "left out":
            self.left_out[news.name] = news.words
        elif news.what == "lost":
            self.lost[news.name] = news.words
        say(f"{news.name} {_VERBS[news.what]}: {news.words}" + (f"\nhint: {news.hint}" if news.hint else ""))


def _figures(report: Report | None) -> list[str]:
    if report is None:
        return [""] * 5
    tokens, speed = report.tokens, report.tokens.generated / report.busy_s if report.busy_s > 0 else None
    counted = (report.answers, tokens.computed, tokens.cached, tokens.generated)
    return [*(f"{number:,}" for number in counted), "" if speed is None else f"{speed:,.1f}"]


def _gone(hand: HandReport) -> str:
    return "" if hand.lost is None else f"lost: {hand.lost.removeprefix(f'{hand.name} is lost: ')}"


def _counted(report: Report | None) -> dict[str, Any]:
    return {
        "answers": report.answers if report else 0,
        "computed_prompt_tokens": report.tokens.computed if report else 0,
        "reused_tokens": report.tokens.cached if report else 0,
        "generated_tokens": report.tokens.generated if report else 0,
        "busy_seconds": round(report.busy_s, 3) if report else 0.0,
        "engine_deaths": report.deaths if report else 0,
    }
