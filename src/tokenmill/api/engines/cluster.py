"""A batch on the nodes of a Ray cluster: one engine per node, planned by the node itself.

The store and the output files stay on the driver, which schedules the jobs of every node as for a local engine; only
requests and answers are sent over the network.
"""

import asyncio
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import aclosing, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

from tokenmill.api.engines.choose import DEFAULT_MODEL, EngineChoice, model_path
from tokenmill.api.engines.slots import fit_slots
from tokenmill.api.options import ENGINES, EngineOptions, dialect_of
from tokenmill.api.planning.plan import configuration, plan_engine
from tokenmill.api.progress import OnProgress, described, log
from tokenmill.api.summary import NodeSummary
from tokenmill.config import Config
from tokenmill.engine.ray.actors import PreparedEngine, connect
from tokenmill.engine.ray.nodes import NodeEvent, RayNodes, ReadyNode
from tokenmill.errors import UsageError
from tokenmill.jobs.models import Batch
from tokenmill.jobs.output import Output
from tokenmill.jobs.store.address import Address
from tokenmill.jobs.store.store import Store
from tokenmill.jobs.worker.loop import WorkOptions
from tokenmill.jobs.worker.pool import PoolMember, PoolReport, run_pool
from tokenmill.jobs.worker.progress import RunReport, Snapshot
from tokenmill.model.identity import identity_of
from tokenmill.native.launching import launch_engine

_LOADING_S = 30.0  # between two messages about one load
_VERBS = {
    "found": "was found",
    "waiting": "is waiting",
    "ready": "is ready",
    "lost": "was lost",
    "excluded": "is excluded",
}


class ClusterRun:
    """The nodes of a cluster, with the report of each."""

    def __init__(self, nodes: RayNodes, node_log: "NodeLog", choice: EngineChoice, *, measure: bool) -> None:
        self.choice = choice
        self._nodes = nodes
        self._node_log = node_log
        self._measure = measure
        self._report: PoolReport | None = None
        self._load_s: float | None = None  # until the first engine was ready

    async def work(
        self,
        store: Store,
        batch: Batch,
        outputs: Mapping[int, Output],
        options: WorkOptions,
        stop: asyncio.Event,
        on_progress: OnProgress,
    ) -> tuple[RunReport, float | None]:
        """Start the engines and work; the report, and the seconds until the first engine was ready."""
        began_s = asyncio.get_running_loop().time()

        async def join(ready: ReadyNode) -> PoolMember:
            if self._load_s is None:
                self._load_s = asyncio.get_running_loop().time() - began_s
            return await self._member(ready, store, batch)

        try:
            async with aclosing(self._nodes.engines(join)) as members:
                self._report = await run_pool(
                    store,
                    [batch],
                    members,
                    outputs=outputs,
                    options=options,
                    stop=stop,
                    on_snapshot=lambda now: on_progress(self._with_nodes(now)),
                    expected=lambda: self._nodes.loading_contexts,
                )
        finally:
            await self._nodes.close()
        return self._report.total, self._load_s

    def nodes(self) -> tuple[NodeSummary, ...]:
        """Every node with its report, or why it did nothing."""
        members = self._report.members if self._report is not None else ()
        worked = {each.name for each in members}
        lost = self._node_log.lost
        left_out = self._node_log.left_out
        lost_early = {name: reason for name, reason in lost.items() if name not in worked | left_out.keys()}
        return (
            *(NodeSummary(each.name, each.report, each.lost) for each in members),
            *(NodeSummary(name, lost=reason) for name, reason in lost_early.items()),
            *(NodeSummary(name, left_out=reason) for name, reason in left_out.items()),
        )

    def _with_nodes(self, now: Snapshot) -> Snapshot:
        """A snapshot with the names of the nodes, unless an engine reports a status."""
        return replace(now, engine_detail=f"on {', '.join(self._nodes.up)}") if now.engine_detail is None else now

    async def _member(self, ready: ReadyNode, store: Store, batch: Batch) -> PoolMember:
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
) -> Iterator[ClusterRun]:
    """Connect to a cluster and let every node plan; the engines stop when the block ends."""
    _check(store, options)
    engine = options.engine_config(config)
    if engine.kind not in ENGINES:
        raise UsageError(
            f"a cluster starts engines, and {engine.kind} is running already",
            hint=f"use one of {', '.join(ENGINES)} as the engine",
        )
    options.goal_for(dialect_of(engine))  # refuse contradicting options before the cluster is asked
    file = None if model is None or not Path(model).exists() else os.path.abspath(model)  # noqa: PTH100
    node_log = NodeLog()
    with connect(where) as cluster:
        prepare = partial(prepare_here, file or model, options)
        model_id = None if file is None else identity_of(file)
        nodes = RayNodes(cluster, prepare, on_event=node_log.add, model_id=model_id)
        choice = EngineChoice(asyncio.run(nodes.survey()), model or DEFAULT_MODEL, engine, config.state_path)
        yield ClusterRun(nodes, node_log, choice, measure=options.sequences is None)


def _check(store: Address, options: EngineOptions) -> None:
    if not isinstance(store, Path):
        raise UsageError(
            "a cluster needs a store in a local folder, not in PostgreSQL",
            hint="use a folder as the store; or run tokenmill work on every machine, which needs no Ray",
        )
    if options.machine is not None:
        raise UsageError("machine and on contradict each other", hint="leave out machine: every node plans for itself")


def prepare_here(model: str | None, options: EngineOptions) -> PreparedEngine:
    """Plan for the machine that this is called on, with its own configuration."""
    config = configuration(None)
    planned = plan_engine(str(model_path(model, config)), options, config)
    return PreparedEngine(
        planned.plan, planned.model_path, planned.config, config.state_path, launch_engine, planned.tuned
    )


class NodeLog:
    """Logs the events of nodes; the progress of a load once per stage and every `_LOADING_S` seconds."""

    def __init__(self) -> None:
        self.left_out: dict[str, str] = {}  # node -> reason
        self.lost: dict[str, str] = {}
        self._loads: dict[str, tuple[str, float]] = {}  # node -> stage that was logged last, and when

    def add(self, event: NodeEvent) -> None:
        """Log one event."""
        if event.loading is not None:
            title, _, text = described(event.loading)
            logged, at_s = self._loads.get(event.name, ("", 0.0))
            if title != logged or time.monotonic() - at_s > _LOADING_S:
                self._loads[event.name] = title, time.monotonic()
                log.info(f"{event.name}: {title} {text}".rstrip())
            return
        if event.kind == "excluded":
            self.left_out[event.name] = event.message
        elif event.kind == "lost":
            self.lost[event.name] = event.message
        hint = f"\nhint: {event.hint}" if event.hint else ""
        log.info(f"{event.name} {_VERBS[event.kind]}: {event.message}{hint}")
