"""An engine on every node that fits the model, while nodes join and leave."""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import aclosing

import pytest

from support.fake_nodes import FakeActor, FakeCluster, never
from tokenmill import __version__
from tokenmill.engine.engine import Request, answer
from tokenmill.engine.ray.actors import NodeLost, NodePlan
from tokenmill.engine.ray.nodes import MAX_LOSSES, NodeEvent, RayNodes, ReadyNode
from tokenmill.errors import EngineError, UnknownModel

LIMIT_S = 60.0


class Events:
    """The reported events."""

    def __init__(self) -> None:
        self.events: list[NodeEvent] = []
        self._more = asyncio.Event()

    def __call__(self, event: NodeEvent) -> None:
        self.events.append(event)
        self._more.set()

    async def until(self, name: str, what: str) -> NodeEvent:
        while True:
            found = [event for event in self.events if (event.name, event.kind) == (name, what)]
            if found:
                return found[-1]
            self._more.clear()
            await self._more.wait()

    def excluded(self) -> dict[str, str]:
        return {event.name: event.message for event in self.events if event.kind == "excluded"}


def with_nodes(
    cluster: Callable[[], FakeCluster],
    work: Callable[[RayNodes, FakeCluster, Events], Awaitable[None]],
    *,
    model_id: str | None = None,
) -> None:
    async def run() -> None:
        made, events = cluster(), Events()
        nodes = RayNodes(made, never, on_event=events, model_id=model_id, poll_s=0.01, rejoin_timeout_s=0.05)
        async with asyncio.timeout(LIMIT_S):
            await work(nodes, made, events)
            await nodes.close()

    asyncio.run(run())


async def same(ready: ReadyNode) -> ReadyNode:
    return ready


def planned(model_id: str = "m", *, lacks: str | None = None, version: str = __version__) -> FakeActor:
    return FakeActor(NodePlan(version, "fake", model_id, lacks, False))


def test_every_node_gets_an_engine() -> None:
    async def work(nodes: RayNodes, cluster: FakeCluster, events: Events) -> None:
        assert await nodes.survey() == "m"
        async with aclosing(nodes.engines(same)) as engines:
            ready = [await anext(engines), await anext(engines)]
            assert {each.name for each in ready} == {"alpha", "beta"}
            for each in ready:
                assert (await answer(each.engine, Request("river"))).text
        await nodes.close()
        assert all(line.killed for lines in cluster.handles.values() for line in lines)
        assert all(host.closed for host in cluster.actors.values())

    with_nodes(lambda: FakeCluster(alpha=FakeActor(), beta=FakeActor()), work)


def test_a_node_of_no_use_is_left_out_and_named() -> None:
    async def work(nodes: RayNodes, cluster: FakeCluster, events: Events) -> None:
        assert await nodes.survey() == "m"
        async with aclosing(nodes.engines(same)) as engines:
            assert (await anext(engines)).name == "good"
        excluded = events.excluded()
        assert excluded.keys() == {"small", "old", "bare", "other"}
        assert "dram lacks 5 GiB" in excluded["small"]
        assert "0.0.9" in excluded["old"]
        assert __version__ in excluded["old"]
        assert excluded["bare"] == "kimi is not here"
        assert "fake differs" in excluded["other"]
        assert next(event.hint for event in events.events if event.name == "bare" and event.hint) == "pull it"

    with_nodes(
        lambda: FakeCluster(
            good=planned(),
            small=planned(lacks="dram lacks 5 GiB"),
            old=planned(version="0.0.9"),
            other=planned("n"),
            bare=FakeActor(UnknownModel("kimi is not here", hint="pull it")),
        ),
        work,
        model_id="m",
    )


def test_the_model_that_most_cluster_have_counts_where_none_is_here() -> None:
    async def work(nodes: RayNodes, cluster: FakeCluster, events: Events) -> None:
        assert await nodes.survey() == "n"
        assert set(events.excluded()) == {"alpha"}

    with_nodes(lambda: FakeCluster(alpha=planned("m"), beta=planned("n"), gamma=planned("n")), work)


def test_without_any_node_of_use_it_says_why_of_each() -> None:
    async def work(nodes: RayNodes, cluster: FakeCluster, events: Events) -> None:
        with pytest.raises(EngineError) as caught:
            await nodes.survey()
        *reasons, remedy = (caught.value.hint or "").splitlines()
        assert reasons == ["small: fake does not fit: dram lacks 5 GiB", "bare: kimi is not here"]
        assert "--context" in remedy

    with_nodes(
        lambda: FakeCluster(small=planned(lacks="dram lacks 5 GiB"), bare=FakeActor(UnknownModel("kimi is not here"))),
        work,
    )


class Gone(FakeActor):
    async def plan(self) -> NodePlan:
        raise NodeLost("the power is out", for_good=True)


def test_a_node_that_is_lost_while_it_plans_is_named() -> None:
    async def work(nodes: RayNodes, cluster: FakeCluster, events: Events) -> None:
        with pytest.raises(EngineError) as caught:
            await nodes.survey()
        assert caught.value.hint == "alpha: it was lost: the power is out"

    with_nodes(lambda: FakeCluster(alpha=Gone()), work)


def test_without_any_node_at_all_it_says_so() -> None:
    async def work(nodes: RayNodes, cluster: FakeCluster, events: Events) -> None:
        with pytest.raises(EngineError) as caught:
            await nodes.survey()
        assert "ray start" in (caught.value.hint or "")

    with_nodes(FakeCluster, work)


def test_an_engine_that_cannot_be_loaded_leaves_its_node_out() -> None:
    async def work(nodes: RayNodes, cluster: FakeCluster, events: Events) -> None:
        await nodes.survey()
        async with aclosing(nodes.engines(same)) as engines:
            assert (await anext(engines)).name == "good"
            assert (await events.until("bad", "excluded")).message == "while loading, it was killed"

    bad = EngineError("while loading, it was killed")
    with_nodes(lambda: FakeCluster(good=FakeActor(), bad=FakeActor(load=bad)), work)


def test_a_node_that_joins_later_is_used() -> None:
    async def work(nodes: RayNodes, cluster: FakeCluster, events: Events) -> None:
        await nodes.survey()
        async with aclosing(nodes.engines(same)) as engines:
            assert (await anext(engines)).name == "alpha"
            cluster.add("beta", FakeActor())
            assert (await anext(engines)).name == "beta"

    with_nodes(lambda: FakeCluster(alpha=FakeActor()), work)


def test_a_node_that_is_lost_is_forgotten_and_the_end_comes_with_the_last() -> None:
    async def work(nodes: RayNodes, cluster: FakeCluster, events: Events) -> None:
        await nodes.survey()
        async with aclosing(nodes.engines(same)) as engines:
            names = {(ready := await anext(engines)).name: ready for _ in range(2)}
            for name, ready in names.items():
                cluster.lose(name)
                assert (await ready.engine.status()).state == "failed"
                assert (await events.until(name, "lost")).message == "the power is out"
            with pytest.raises(StopAsyncIteration):
                await anext(engines)

    with_nodes(lambda: FakeCluster(alpha=FakeActor(), beta=FakeActor()), work)


def test_a_host_that_is_lost_on_a_node_that_lives_is_started_again_but_not_for_ever() -> None:
    async def work(nodes: RayNodes, cluster: FakeCluster, events: Events) -> None:
        await nodes.survey()
        async with aclosing(nodes.engines(same)) as engines:
            for _ in range(MAX_LOSSES):
                ready = await anext(engines)
                assert ready.name == "alpha"
                cluster.lose("alpha", node=False)
                assert (await ready.engine.status()).state == "failed"
            with pytest.raises(StopAsyncIteration):
                await anext(engines)
        assert "lost 3 times" in events.excluded()["alpha"]
        assert len(cluster.handles["alpha"]) == MAX_LOSSES

    with_nodes(lambda: FakeCluster(alpha=FakeActor()), work)


def test_cluster_of_one_name_are_told_apart() -> None:
    class Twins(FakeCluster):
        def __init__(self) -> None:
            super().__init__(mill=FakeActor())
            first = self.alive[0]
            self.alive.append(type(first)("id-twin", "mill", 4.0, 0.0))

    async def work(nodes: RayNodes, cluster: FakeCluster, events: Events) -> None:
        await nodes.survey()
        async with aclosing(nodes.engines(same)) as engines:
            assert {(await anext(engines)).name, (await anext(engines)).name} == {"mill", "mill-2"}

    with_nodes(Twins, work)


def test_what_is_being_loaded_is_expected_with_its_context() -> None:
    async def work(nodes: RayNodes, cluster: FakeCluster, events: Events) -> None:
        await nodes.survey()
        before = nodes.loading_contexts
        assert before == ()  # nothing is loaded yet
        expected = list[tuple[int | None, ...]]()

        async def made(ready: ReadyNode) -> str:
            expected.append(nodes.loading_contexts)
            return ready.name

        async with aclosing(nodes.engines(made)) as engines:
            assert await anext(engines) == "alpha"
            while nodes.loading_contexts:  # it is handed out
                await asyncio.sleep(0.01)
        assert expected == [(2048,)]

    with_nodes(lambda: FakeCluster(alpha=FakeActor(NodePlan(__version__, "fake", "m", None, False, 2048))), work)
