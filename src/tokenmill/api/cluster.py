"""A batch on the machines of a Ray cluster: one engine on each, each planned by its own machine.

The store and the output stay here; only requests and answers travel.
"""

import asyncio
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import aclosing, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

from tokenmill.api.engines import DEFAULT_MODEL, EngineChoice, model_path
from tokenmill.api.options import ENGINES, EngineOptions
from tokenmill.api.planning import configuration, plan_engine
from tokenmill.api.progress import OnProgress, described, log
from tokenmill.api.slots import fit_slots
from tokenmill.api.summary import NodeSummary
from tokenmill.config import Config
from tokenmill.engine.ray_cluster.cluster import connected
from tokenmill.engine.ray_cluster.fleet import RayFleet
from tokenmill.engine.ray_cluster.host import Prepared
from tokenmill.engine.ray_cluster.places import NodeEvent, Ready
from tokenmill.errors import UsageError
from tokenmill.jobs.address import Address
from tokenmill.jobs.models import Batch
from tokenmill.jobs.output import Output
from tokenmill.jobs.progress import Report, Snapshot
from tokenmill.jobs.store import Store
from tokenmill.jobs.worker import Options
from tokenmill.jobs.worker_pool import PoolMember, PoolReport, run_pool
from tokenmill.model.identity import identity_of

_LOADING_S = 30.0  # between two messages about one load
_VERBS = {
    "found": "was found",
    "waits": "is waiting",
    "ready": "is ready",
    "lost": "was lost",
    "left out": "is left out",
}


class Cluster:
    """The machines of a cluster, and what each of them did."""

    def __init__(self, fleet: RayFleet, news: "NodeLog", choice: EngineChoice, *, measure: bool) -> None:
        self.choice = choice
        self._fleet = fleet
        self._news = news
        self._measure = measure
        self._report: PoolReport | None = None
        self._load_s: float | None = None  # until the first engine was ready

    async def work(
        self,
        store: Store,
        batch: Batch,
        outputs: Mapping[int, Output],
        options: Options,
        stop: asyncio.Event,
        on_progress: OnProgress,
    ) -> tuple[Report, float | None]:
        """Start the engines and work; the report, and the seconds until the first engine was ready."""
        began_s = asyncio.get_running_loop().time()

        async def hand(ready: Ready) -> PoolMember:
            if self._load_s is None:
                self._load_s = asyncio.get_running_loop().time() - began_s
            return await self._hand(ready, store, batch)

        try:
            async with aclosing(self._fleet.engines(hand)) as hands:
                self._report = await run_pool(
                    store,
                    [batch],
                    hands,
                    outputs=outputs,
                    options=options,
                    stop=stop,
                    tell=lambda now: on_progress(self._with_machines(now)),
                    coming=lambda: self._fleet.coming,
                )
        finally:
            await self._fleet.close()
        return self._report.whole, self._load_s

    def nodes(self) -> tuple[NodeSummary, ...]:
        """Every machine with its report, or why it did nothing."""
        hands = self._report.hands if self._report is not None else ()
        worked = {each.name for each in hands}
        news = self._news
        lost_early = {name: why for name, why in news.lost.items() if name not in worked | news.left_out.keys()}
        return (
            *(NodeSummary(each.name, each.report, each.lost) for each in hands),
            *(NodeSummary(name, lost=why) for name, why in lost_early.items()),
            *(NodeSummary(name, left_out=why) for name, why in news.left_out.items()),
        )

    def _with_machines(self, now: Snapshot) -> Snapshot:
        """A snapshot that names the machines, unless the engine has something to report."""
        return replace(now, engine_says=f"on {', '.join(self._fleet.up)}") if now.engine_says is None else now

    async def _hand(self, ready: Ready, store: Store, batch: Batch) -> PoolMember:
        shape = await fit_slots(
            ready.engine,
            store,
            batch,
            measure=self._measure and not ready.tuned,
            adapt_layout=True,
            label=ready.name,
        )
        return PoolMember(ready.name, ready.engine, shape)


@contextmanager
def open_cluster(
    where: str, store: Address, model: str | None, options: EngineOptions, config: Config
) -> Iterator[Cluster]:
    """Connect to a cluster and ask every machine for its plan; their engines stop when this ends."""
    _check(store, options)
    engine = options.engine_config(config)
    if engine.kind not in ENGINES:
        raise UsageError(
            f"a cluster starts engines, and {engine.kind} is running already",
            hint=f"use one of {', '.join(ENGINES)} as the engine",
        )
    options.goal_for(ENGINES[engine.kind])  # refuse contradicting options before the cluster is asked
    file = None if model is None or not Path(model).exists() else os.path.abspath(model)  # noqa: PTH100
    news = NodeLog()
    with connected(where) as cluster:
        prepare = partial(prepare_here, file or model, options)
        fleet = RayFleet(cluster, prepare, tell=news.add, model_id=None if file is None else identity_of(file))
        model_id = asyncio.run(fleet.survey())
        choice = EngineChoice(model_id, model or DEFAULT_MODEL, engine, config.state_path)
        yield Cluster(fleet, news, choice, measure=options.sequences is None)


def _check(store: Address, options: EngineOptions) -> None:
    if not isinstance(store, Path):
        raise UsageError(
            "a cluster needs a store in a local folder, not in PostgreSQL",
            hint="use a folder as the store; or run tokenmill work on every machine, which needs no Ray",
        )
    if options.machine is not None:
        raise UsageError("machine and on contradict each other", hint="leave out machine: every node plans for itself")


def prepare_here(model: str | None, options: EngineOptions) -> Prepared:
    """Plan for the machine that this is called on, with its own configuration."""
    config = configuration(None)
    planned = plan_engine(str(model_path(model, config)), options, config)
    return Prepared(planned.plan, planned.model_path, planned.config, config.state_path, planned.tuned)


class NodeLog:
    """Logs events of machines; of a load, each stage once, and again after a while."""

    def __init__(self) -> None:
        self.left_out: dict[str, str] = {}  # machine -> reason
        self.lost: dict[str, str] = {}
        self._loads: dict[str, tuple[str, float]] = {}  # machine -> stage that was logged last, and when

    def add(self, news: NodeEvent) -> None:
        """Log one event; mutates."""
        if news.loading is not None:
            title, _, text = described(news.loading)
            logged, at_s = self._loads.get(news.name, ("", 0.0))
            if title != logged or time.monotonic() - at_s > _LOADING_S:
                self._loads[news.name] = title, time.monotonic()
                log.info(f"{news.name}: {title} {text}".rstrip())
            return
        if news.what == "left out":
            self.left_out[news.name] = news.words
        elif news.what == "lost":
            self.lost[news.name] = news.words
        log.info(f"{news.name} {_VERBS[news.what]}: {news.words}" + (f"\nhint: {news.hint}" if news.hint else ""))
